"""A prior small enough for tests, also as a process of its own: `python tiny_prior.py RUN OUT [FIELD=JSON ...]`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from topovq.prior.fitting import fit
from topovq.prior.settings import PriorConfig
from topovq.tokenizer.training import Interrupted


def tiny_prior(source: Path, out: Path, **changes: Any) -> PriorConfig:
    fields: dict[str, Any] = {
        "images": 256,
        "dim": 16,
        "layers": 1,
        "heads": 2,
        "steps": 12,
        "batch_size": 8,
        "validate_every": 4,
        "checkpoint_every": 4,
        "log_every": 2,
        "device": "cpu",
    }
    return PriorConfig(str(source), out=out, **{**fields, **changes})


def main() -> None:
    changes = {name: json.loads(value) for name, value in (argument.split("=", 1) for argument in sys.argv[3:])}
    try:
        fit(tiny_prior(Path(sys.argv[1]), Path(sys.argv[2]), **changes))
    except Interrupted as stopped:
        print(stopped)
        sys.exit(stopped.exit_code)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
