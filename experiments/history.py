"""What a run's validations say: its best loss, and how soon it came close to it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class History:
    """The validated steps of a run, in order, and the loss at each."""

    steps: tuple[int, ...]
    losses: tuple[float, ...]

    @classmethod
    def of(cls, lines: Iterable[dict[str, Any]]) -> History:
        """From the lines of a record; a loss that was not finite (null there) is infinite."""
        seen = [line for line in lines if line["event"] == "validation"]
        losses = tuple(math.inf if line["loss"] is None else float(line["loss"]) for line in seen)
        if not any(map(math.isfinite, losses)):
            raise ValueError(f"none of the {len(seen)} validations has a finite loss")
        return cls(tuple(line["step"] for line in seen), losses)

    @property
    def best(self) -> float:
        """The lowest loss."""
        return min(self.losses)

    def steps_to(self, ratio: float) -> int:
        """The first validated step whose loss is at most `ratio` times the best one (1.1: within 10%)."""
        return next(step for step, loss in zip(self.steps, self.losses) if loss <= ratio * self.best)
