"""The neighborhood matrix as a function of map distance: at one moment of training, and how it falls over the steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

CUTOFF = 1e-10  # a weight below this share of the whole is no weight
NARROWEST = 1e-6  # a kernel of width 0 is the identity: no division by it


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


def falling(schedule: str, step: Tensor, tau: float, start: float, end: float, steps: int) -> Tensor:
    """1 / (1 + t*tau) if `schedule` is "harmonic", else from start to end over `steps`; float64, where the step is."""
    t = step.double()
    if schedule == "harmonic":
        return 1 / (1 + t * tau)
    progress = (t / steps).clamp(max=1)
    if schedule == "linear":
        return start + (end - start) * progress
    return start * (end / start) ** progress


@dataclass(frozen=True)
class Course:
    """How a kernel's width and strength follow from the step: plain numbers, which Triton kernels compute with too.

    harmonic            with s = 1 / (1 + t*tau):  hard: width = start, strength = s;  gaussian: width = start sqrt(s);
                        exponential: width = start s
    linear, exponential width from start to end over `steps`, strength 1
    """

    kind: str
    schedule: str
    tau: float
    start: float
    end: float
    steps: int

    @property
    def widest(self) -> float:
        """The largest width there will be: courses only fall."""
        return self.start

    def width(self, step: Tensor) -> Tensor:
        """Reach of the kernel in grid cells at `step`, float64, 0-dim."""
        if self.schedule == "harmonic" and self.kind in ("none", "hard"):
            return torch.full_like(step, self.start, dtype=torch.float64)
        value = falling(self.schedule, step, self.tau, self.start, self.end, self.steps)
        if self.schedule != "harmonic":
            return value.clamp(min=NARROWEST)
        return self.start * (value.sqrt() if self.kind == "gaussian" else value)

    def strength(self, step: Tensor) -> Tensor:
        """Weight of the kernel off the diagonal at `step`, float64, 0-dim."""
        if self.kind == "hard" and self.schedule == "harmonic":
            return falling(self.schedule, step, self.tau, self.start, self.end, self.steps)
        return torch.ones_like(step, dtype=torch.float64)

    def at(self, step: Tensor) -> Kernel:
        """The weights at `step` as a function of distance."""
        if self.kind == "none":  # no weight off the diagonal, whatever its width: nothing to compute
            return Kernel(self.kind, step, step, self.start)
        return Kernel(self.kind, self.width(step), self.strength(step), self.start)
