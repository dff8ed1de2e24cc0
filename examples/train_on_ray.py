"""Train a tokenizer on several machines with Ray Train: the same run as with torchrun, started by Ray.

    python examples/train_on_ray.py [FOLDER]            # on a Ray that is started here
    RAY_ADDRESS=10.0.0.1:6379 python examples/train_on_ray.py /shared/runs/mine

Ray starts two workers, gives each its rank, and starts them again if one is lost with its machine. `resume=True` then
goes on from the last checkpoint, so FOLDER must be one folder for all machines. Needs `pip install 'ray[train]'`.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

WORKERS, USE_GPU = 2, False


def train_here(config: dict[str, Any]) -> None:
    """What each worker does: Ray has set its rank and made the process group by now."""
    from topovq.tokenizer.training import TrainConfig, train

    train(TrainConfig(**config), quiet=True)


def main() -> None:
    out = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="train_on_ray_")).resolve()
    config = {
        "data": "photos", "out": out, "resume": True, "preset": "small", "device": "cuda" if USE_GPU else "cpu",
        "steps": 60, "batch_size": 16, "checkpoint_every": 20, "validate_every": 20,
    }  # fmt: skip
    trainer = TorchTrainer(
        train_here,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=WORKERS, use_gpu=USE_GPU),
        run_config=RunConfig(storage_path=str(out / "ray"), failure_config=FailureConfig(max_failures=3)),
    )
    trainer.fit()
    from topovq.tokenizer.training.record import read_record

    losses = [line["loss"] for line in read_record(out / "record.jsonl") if line["event"] == "validation"]
    print(f"{WORKERS} workers, validation losses {', '.join(f'{loss:.3f}' for loss in losses)}: {out}")


if __name__ == "__main__":
    main()
