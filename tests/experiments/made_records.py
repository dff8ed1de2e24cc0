"""Records written by hand, for runs that never were."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from topovq.tokenizer.training import TrainConfig


def lines_of(config: TrainConfig, losses: Sequence[float | None], **changes: Any) -> list[dict[str, Any]]:
    """A finished run that validated `losses` (in 1e-3) at equal distances; `changes` are of its first line."""
    whole = config.resolve("cuda")
    every = whole.steps // len(losses)
    first = {
        "event": "config",
        "id": whole.run_id,
        **whole.as_dict(),
        "hardware": "a GPU",
        "source_train_images": 40053,
    }
    seen = [
        {
            "event": "validation",
            "step": (i + 1) * every,
            "loss": None if loss is None else loss / 1e3,
            "psnr": 20.0 + i,
            "perplexity": 100.0 * (i + 1),
            "usage": 0.25,
            "seconds": 1.5 * i,
        }
        for i, loss in enumerate(losses)
    ]
    final = {"event": "final", "step": whole.steps, "steps": whole.steps, "best_loss": 0.0, "seconds": 9.0}
    return [first | changes, *seen, final]


def write_record(path: Path, lines: Sequence[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
