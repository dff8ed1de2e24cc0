"""A training run small enough for tests, also as a process of its own: `python tiny.py OUT [FIELD=JSON ...]`."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from topovq.tokenizer.data import Source
from topovq.tokenizer.training import Interrupted, TrainConfig, train


class TinySource(Source):
    """24 smooth 16x16 images for training and 10 for validation."""

    def __init__(self) -> None:
        super().__init__("tiny", 16, ((127.5,) * 3, (64.0,) * 3), np.arange(10), train_images=24)
        generator = torch.Generator().manual_seed(0)
        coarse = torch.rand(34, 3, 2, 2, generator=generator) * 255
        images = torch.nn.functional.interpolate(coarse, size=(16, 16), mode="bilinear").to(torch.uint8)
        self.images, self.held_out = images[:24], images[24:]

    def resident(self) -> Tensor | None:
        return self.images

    def _train(self, batch_size: int, rows: range, seed: int, start: int) -> Generator[Tensor, None, None]:
        for i in itertools.count(start):
            yield self.images[self.indices(i, batch_size, seed)[rows.start : rows.stop]]

    def _validation(self, indices: np.ndarray, batch_size: int) -> Generator[Tensor, None, None]:
        yield from self.held_out[indices].split(batch_size)


def tiny_config(out: Path, **changes: Any) -> TrainConfig:
    fields: dict[str, Any] = {
        "out": out,
        "model_options": {"hidden": 16, "residual_hidden": 8},
        "codebook_size": 16,
        "code_dim": 8,
        "steps": 12,
        "batch_size": 8,
        "validate_every": 4,
        "checkpoint_every": 4,
        "log_every": 2,
        "device": "cpu",
        "seed": 3,
    }
    return TrainConfig(**{**fields, **changes})


def main() -> None:
    changes = {name: json.loads(value) for name, value in (argument.split("=", 1) for argument in sys.argv[2:])}
    try:
        train(tiny_config(Path(sys.argv[1]), **changes), source=TinySource())
    except Interrupted as stopped:
        print(stopped)
        sys.exit(stopped.exit_code)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
