"""recall: the codes that a forward saw, for when activation checkpointing runs it once more in the backward pass.

By then an update has moved them. Where several forwards wait for their second run, its vectors tell which one it is:
a mean of them is as near to that of the first run as rounding allows. The device finds that out; nobody waits for it.

Legend: N vectors x, K codes, D dimensions, E forwards that wait.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from topovq.ops.search import projection

MOST = 8  # states of the codes that are kept: so many updates may lie between a forward and its backward pass
ALIKE = 1e-3  # means that differ by less than this share of their length are of the same vectors
LARGE = 1e15  # what a mean is cut off at, so that its square is finite


class Forward(NamedTuple):
    """One forward: codes and step as it saw them, a mean [D] of its vectors, and how often it was run again."""

    codes_KD: Tensor
    step: Tensor
    versions: tuple[int, int]
    mean_D: Tensor
    again: Tensor


class Recall:
    """The forwards of one codebook that may be run again."""

    def __init__(self) -> None:
        self.forwards: list[Forward] = []
        self.waiting = 0  # how many have not been run again yet
        self.forgot = False  # whether one of them is no longer kept

    def __reduce__(self) -> tuple[Any, ...]:
        return Recall, ()  # a copy has a graph of its own, and nothing waits in it

    def remember(self, codes_KD: Tensor, step: Tensor, x_ND: Tensor) -> None:
        """Keep the codes and the step of a forward of these vectors."""
        if self.waiting <= 0:
            self.forwards, self.waiting, self.forgot = [], 0, False
        versions = codes_KD._version, step._version
        if self.forwards and self.forwards[-1].versions == versions:
            seen = self.forwards[-1][:2]
        else:
            seen = codes_KD.detach().clone(), step.clone()
        self.forwards.append(Forward(*seen, versions, mean(x_ND), torch.zeros_like(step)))
        self.waiting += 1
        while len({forward.versions for forward in self.forwards}) > MOST:
            self.forwards.pop(0)
            self.forgot = True

    def place(self, x_ND: Tensor) -> Tensor | None:
        """Which forward had these vectors, int64, 0-dim; None where all that are kept saw the same.

        Of several forwards with the same vectors it is the last that was not run again: a backward pass goes back.
        """
        same = all(forward.versions == self.forwards[0].versions for forward in self.forwards)
        if same and not self.forgot:
            return None
        mean_D = mean(x_ND)
        apart_E = torch.stack([(forward.mean_D - mean_D).square().sum() for forward in self.forwards])
        if self.forgot:
            torch._assert_async(apart_E.min() <= ALIKE**2 * mean_D.square().sum(), FORGOTTEN)
        number = len(self.forwards)
        from_last_E = torch.arange(number - 1, -1, -1, device=apart_E.device)
        order_E = torch.stack([forward.again for forward in self.forwards]) * number + from_last_E
        order_E = torch.where(apart_E <= apart_E.min(), order_E, torch.iinfo(torch.int64).max)
        return order_E.argmin()

    def seen(self, place: Tensor | None) -> tuple[Tensor, Tensor]:
        """(codes, step) of the forward at `place`."""
        codes_KD, step, versions = self.forwards[-1][:3]
        for number in range(len(self.forwards) - 2, -1, -1):
            forward = self.forwards[number]
            if place is not None and forward.versions != versions:
                earlier, versions = place <= number, forward.versions
                codes_KD = torch.where(earlier, forward.codes_KD, codes_KD)
                step = torch.where(earlier, forward.step, step)
        return codes_KD, step

    def again(self, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        """(codes, step) for the second run of the forward that had these vectors."""
        place = self.place(x_ND)
        self.waiting -= 1
        if place is not None:
            for number, forward in enumerate(self.forwards):
                forward.again.add_(place == number)
        return self.seen(place)


def mean(x_ND: Tensor) -> Tensor:
    """What forwards are told apart by, [D]: a mean of their vectors whose weights differ, so that order counts."""
    x_ND = x_ND.detach().to(torch.promote_types(x_ND.dtype, torch.float32))
    mean_D = (x_ND * projection(x_ND.shape[0], x_ND)[:, None]).sum(0) / max(1, x_ND.shape[0])
    return mean_D.nan_to_num().clamp(-LARGE, LARGE)


FORGOTTEN = (
    f"activation checkpointing: a quantizer was called more than {MOST} times before the backward pass, and the codes "
    "of its first calls are no longer known. Run the backward pass sooner, call the quantizer once with all vectors, "
    "or leave it out of the checkpointed part"
)
