"""The neighborhood matrix as a function of map distance, at one moment of training."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

CUTOFF = 1e-10  # a weight below this share of the whole is no weight


@dataclass(frozen=True)
class Kernel:
    """weight(r) = strength * k(r / width) for r > 0, and 1 at r = 0 (neighborhood.py defines k for each kind).

    width and strength are 0-dim float64 tensors on the device (not read for "none"); `widest`, the largest width there
    will ever be, is known to the host, so that shapes can follow from it.
    """

    kind: str
    width: Tensor
    strength: Tensor
    widest: float

    def weight(self, distance: Tensor) -> Tensor:
        """float64, the shape of `distance`."""
        distance = distance.double()
        if self.kind == "none":
            return (distance == 0).double()
        if self.kind == "hard":
            off = (distance <= self.width + 1e-9).double()
        elif self.kind == "gaussian":
            off = torch.exp(-((distance / self.width) ** 2))
        else:
            off = torch.exp(-distance / self.width)
        return torch.where(distance == 0, 1.0, self.strength * off)

    def reach(self, width: float) -> float:
        """The distance beyond which the weight is below CUTOFF at this width."""
        decades = -math.log(CUTOFF)
        return width * {"hard": 1.0, "gaussian": math.sqrt(decades), "exponential": decades}[self.kind]
