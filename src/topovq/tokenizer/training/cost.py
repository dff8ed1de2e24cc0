"""What a step of a run costs, measured over some of its first steps: milliseconds and, on a GPU, memory.

Runs that share a device take turns. While it is measured, a run takes no turns: the figures are of it alone.
"""

from __future__ import annotations

import time

import torch

FIRST, LAST = 20, 70  # the steps between which the clock runs: kernels are chosen and graphs captured before


class Cost:
    """Tell it of each step, and of anything else that takes time; made before the model is.

    Between `made` and `begin` other runs may take memory: what is there at `begin` is theirs, but for what this one
    had at `made`.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.steps, self.began = device, 0, 0.0
        self.ms: float | None = None
        self.peak_mib: float | None = None
        self.others, self.own = self._allocated(), 0

    def made(self) -> None:
        """The model is there."""
        self.own = self._allocated() - self.others

    def begin(self) -> None:
        """The run takes the device."""
        self.others = self._allocated() - self.own

    def start(self) -> None:
        """The first step is next."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    @property
    def measuring(self) -> bool:
        return self.steps < LAST

    def step(self) -> None:
        """A step was taken."""
        self.steps += 1
        if self.steps == FIRST:
            self._finish()
            self.began = time.monotonic()
        elif self.steps == LAST:
            self._finish()
            self.ms = 1e3 * (time.monotonic() - self.began) / (LAST - FIRST)
            if self.device.type == "cuda":
                self.peak_mib = (torch.cuda.max_memory_allocated(self.device) - self.others) / 2**20

    def give_up(self) -> None:
        """Something else was done: what has been measured so far is not of steps alone."""
        self.steps = max(self.steps, LAST)

    def figures(self) -> dict[str, float | None]:
        return {
            "ms_per_step": None if self.ms is None else round(self.ms, 4),
            "peak_mib": None if self.peak_mib is None else round(self.peak_mib, 1),
        }

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
