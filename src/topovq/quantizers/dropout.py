"""Quantizer dropout: in training, only the first few quantizers of a row are used, so that few tokens decode too."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Dropout:
    """cutoff       at least cutoff + 1 quantizers stay
    multiple_of  as many as a multiple of this stay
    """

    quantizers: int
    cutoff: int = 0
    multiple_of: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.cutoff < self.quantizers:
            raise ValueError(
                f"quantize_dropout_cutoff_index={self.cutoff!r} must be from 0 to {self.quantizers - 1}, "
                "the last of the quantizers"
            )
        if self.multiple_of < 1:
            raise ValueError(f"quantize_dropout_multiple_of={self.multiple_of!r} must be at least 1")

    def draw(self, device: torch.device, seed: int | None = None) -> Tensor:
        """int64, 0-dim: the last quantizer that stays, all equally likely before it is rounded up to a multiple.

        It is drawn on the device, which nobody waits for: the others run with all of their vectors masked. So ranks
        may draw differently. With a seed it is what vector-quantize-pytorch draws.
        """
        if seed is None:
            last = torch.randint(self.cutoff, self.quantizers, (), device=device)
            last = (last // self.multiple_of + 1) * self.multiple_of - 1 if self.multiple_of > 1 else last
            return last.clamp(max=self.quantizers - 1)
        place = random.Random(seed).randrange(self.cutoff, self.quantizers)
        place = math.ceil((place + 1) / self.multiple_of) * self.multiple_of - 1
        return torch.full((), min(place, self.quantizers - 1), device=device)
