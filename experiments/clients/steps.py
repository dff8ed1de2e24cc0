"""Training steps of loops of our own, as CUDA graphs where they can be."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

WARM_UP = 20  # steps before the clock runs


class Steps:
    """Runs a training step, given or of a subclass, again and again: as a CUDA graph where it can be one. `seconds` of
    `timed` steps."""

    step: Callable[[], None]

    def __init__(
        self, step: Callable[[], None] | None, optimizer: torch.optim.Optimizer, device: torch.device, graph: bool
    ) -> None:
        if step is not None:
            self.step = step
        self.optimizer, self.device = optimizer, device
        self.graphed = graph and device.type == "cuda"
        self.restart()

    def restart(self) -> None:
        self.graph: torch.cuda.CUDAGraph | None = None
        self.done, self.timed, self.seconds = 0, 0, 0.0

    @property
    def ms(self) -> float:
        """Of a step."""
        return 1e3 * self.seconds / max(1, self.timed)

    def eager(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.step()

    def advance(self, number: int) -> None:
        if self.graphed and self.graph is None:
            number -= self._capture(min(3, number))
        start, first, last = self.now(), self.done, self.done + number
        while self.done < last:
            self.graph.replay() if self.graph is not None else self.eager()
            self.done += 1
            if self.done == WARM_UP:
                start, first = self.now(), self.done
        self.seconds, self.timed = self.seconds + self.now() - start, self.timed + self.done - first

    def _capture(self, number: int) -> int:
        """The first steps, on a side stream, then the graph of one (which runs nothing)."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(number):
                self.eager()
        torch.cuda.current_stream().wait_stream(side)
        self.done += number
        self.optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        self.graph = graph
        return number

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()
