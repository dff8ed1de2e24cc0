"""How long runs of the study take: as such runs did before, and until then as they did on one H200."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from experiments.prior.cells import Cell

STEP, STEP_OF_A_CODE = 0.0155, 8e-8  # seconds, of the transformer and of a flat head (one H200, before the study)
TOKENIZER = 30.0  # seconds, likewise
Kind = tuple[str, str, int]


class Pace:
    """Seconds a step of each kind of run, learned from records."""

    def __init__(self, records: Iterable[Mapping[str, Any]]) -> None:
        self.known: dict[Kind, float] = {}
        self.ratios: list[float] = []  # what runs took, over what was guessed
        for record in records:
            if "ms" in record:
                self.learn(Cell.of(record["cell"]), record["seconds"])

    def learn(self, cell: Cell, seconds: float) -> None:
        self.known[kind(cell)] = seconds / cell.steps
        self.ratios.append(seconds / cell.steps / guess(cell))

    def seconds(self, cell: Cell) -> float:
        """Of a whole run, its tokenizer left out."""
        step = self.known.get(kind(cell))
        return cell.steps * (step if step is not None else guess(cell) * median(self.ratios or [1.0]))

    def all_seconds(self, cells: Iterable[Cell]) -> float:
        """Of runs one after the other, each tokenizer trained once."""
        cells = list(cells)
        return sum(map(self.seconds, cells)) + TOKENIZER * len({cell.book for cell in cells})


def kind(cell: Cell) -> Kind:
    return cell.book.data, cell.head.removesuffix(" shuffled"), cell.book.K


def guess(cell: Cell) -> float:
    """Seconds a step."""
    return STEP + STEP_OF_A_CODE * cell.book.K * cell.head.startswith("flat")
