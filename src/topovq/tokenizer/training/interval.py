"""What is read from the device between steps, on its way to the person who watches."""

from __future__ import annotations

import time

from topovq.tokenizer.training.progress import Reporter
from topovq.tokenizer.training.step import Reading


class Figures:
    """Figures on their way to the reporter, one interval late: reading them never leaves the device without work."""

    def __init__(self, reporter: Reporter) -> None:
        self.reporter = reporter
        self.pending: tuple[int, Reading] | None = None
        self.restart()

    def send(self, step: int, reading: Reading) -> None:
        self.show()
        self.pending = (step, reading)
        if reading.arrived is None:  # on the CPU there is nothing to wait for
            self.show()

    def show(self) -> None:
        if self.pending is not None:
            step, reading = self.pending
            values = reading.values()
            # Since the restart: where the host was waiting just now says little about when the device did each part.
            self.steps += values["steps"]
            speed = self.steps / max(time.monotonic() - self.began, 1e-9)  # a coarse clock may not have moved
            self.reporter.interval(step, values, speed, reading.levels())
            self.pending = None

    def restart(self) -> None:
        """Leave out of the speed what was not training."""
        self.began, self.steps = time.monotonic(), 0.0
