"""A training run small enough for tests, also as a process of its own: `python tiny.py OUT [FIELD=JSON ...]`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from topovq.tokenizer.training import Interrupted, TrainConfig, train


class TinySource:
    """24 smooth 16x16 images for training and 10 for validation, as topovq.tokenizer.data's interface has it."""

    name, size = "tiny", 16
    mean, std = (127.5,) * 3, (64.0,) * 3

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        coarse = torch.rand(34, 3, 2, 2, generator=generator) * 255
        images = torch.nn.functional.interpolate(coarse, size=(16, 16), mode="bilinear").to(torch.uint8)
        self.images, self.held_out = images[:24], images[24:]

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "images": len(self.images)}

    def resident(self) -> Tensor:
        return self.images

    def indices(self, i: int, batch_size: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + i)
        return torch.randint(len(self.images), (batch_size,), generator=generator)

    def train(
        self, batch_size: int, *, seed: int, start: int = 0, rank: int = 0, world_size: int = 1
    ) -> Iterator[Tensor]:
        local, i = batch_size // world_size, start
        while True:
            yield self.images[self.indices(i, batch_size, seed)[rank * local : (rank + 1) * local]]
            i += 1

    def validation(
        self, batch_size: int, *, rank: int = 0, world_size: int = 1, part: str | None = None
    ) -> Iterator[Tensor]:
        yield from self.held_out[rank::world_size].split(batch_size)


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
