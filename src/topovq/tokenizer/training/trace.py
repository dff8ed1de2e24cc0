"""The course of a training in small steps: the loss and the perplexity of every so many batches, in the record.

A line `trace` has the `losses` (of the reconstruction) of the steps `first`, `first` + `every` and so on up to its own,
and for each level the `perplexities` of the codes chosen in these batches. Nothing waits for the device before a line
is due.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from topovq.metrics import perplexity
from topovq.tokenizer.training.step import TrainStep

DIGITS = 6  # of a loss and of a perplexity


class Trace:
    """Looks at one step in `every`; at none where that is None."""

    def __init__(self, every: int | None, take_step: TrainStep) -> None:
        self.every, self.take_step = every, take_step
        self.books = [book for quantizer in take_step.model.quantizers for book in quantizer.maps[:1]]
        self.first = 0
        self.seen: list[Tensor] = []

    def step(self, step: int) -> None:
        """Take step number `step`, and look at it if it is due."""
        if self.every is None or step % self.every:
            self.take_step()
            return
        sums_3 = self.take_step.sums_3  # at an address that never changes
        held_3, before = sums_3.clone(), [book.hits.clone() for book in self.books]
        sums_3.zero_()
        self.take_step()
        # hits = memory * before + (1 - memory) * counts of the batch, which are whole numbers
        pairs = zip(self.books, before)
        counts = [((book.hits - book.memory * hits) / (1 - book.memory)).round().clamp(min=0) for book, hits in pairs]
        self.first = self.first if self.seen else step
        self.seen.append(torch.stack([sums_3[1], *[perplexity(counts_K).to(sums_3) for counts_K in counts]]))
        sums_3 += held_3

    def lines(self) -> dict[str, Any]:
        """The fields of the record's next line, and begin anew; empty where nothing was looked at."""
        if not self.seen:
            return {}
        losses, *levels = torch.stack(self.seen).T.tolist()
        self.seen = []
        course = {"losses": _short(losses), "perplexities": [_short(level) for level in levels]}
        return {"first": self.first, "every": self.every, **course}


def _short(numbers: list[float]) -> list[float]:
    return [float(f"{number:.{DIGITS}g}") for number in numbers]
