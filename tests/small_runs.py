"""Training runs of a second or less, to look at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from topovq.tokenizer.training import TrainConfig, train


def make_run(folder: Path, **changes: Any) -> Path:
    """A run on the package's photographs in `folder`; `changes` are fields of TrainConfig."""
    fields: dict[str, Any] = {
        "data": "photos",
        "out": folder,
        "device": "cpu",
        "model_options": {"hidden": 16, "residual_hidden": 8},
        "steps": 4,
        "batch_size": 8,
        "validate_every": 2,
        "codebook_size": 12,
        "code_dim": 8,
        "seed": 1,
    }
    return train(TrainConfig(**{**fields, **changes}), quiet=True).folder
