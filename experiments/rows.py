"""The rows of a table: cells with the runs found for them, and what is lacking, by name."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from experiments.history import History
from experiments.library import Found, Library
from experiments.specs import Cell
from experiments.targets import COLUMNS, MEASURES

NAMED = 6  # problems that a message names before it only counts


class IncompleteTable(ValueError):
    """Runs of a table are missing or do not go together; the message names them."""


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation (of a sample: divided by n - 1; None of one run) over n runs."""

    mean: float
    std: float | None
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        if not values:
            return None
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))

    def standard_errors_from(self, other: Spread) -> float | None:
        """(self - other) / sqrt(s1^2/n1 + s2^2/n2); None where that is not known."""
        if self.std is None or other.std is None:
            return None
        error = math.sqrt(self.std**2 / self.n + other.std**2 / other.n)
        return (self.mean - other.mean) / error if error else None


@dataclass(frozen=True)
class Row:
    """A cell with the runs found for it."""

    cell: Cell
    steps: int
    runs: list[Found]

    @property
    def n(self) -> int:
        return len(self.runs)

    def ours(self) -> dict[str, Spread | None]:
        """Best loss in 1e-3, and thousands of steps to within 10% and 20% of it."""
        histories = [_history(found) for found in self.runs]
        return {
            "loss": Spread.of([1e3 * history.best for history in histories]),
            "steps10": Spread.of([history.steps_to(1.1) / 1e3 for history in histories]),
            "steps20": Spread.of([history.steps_to(1.2) / 1e3 for history in histories]),
        }

    def paper(self) -> dict[str, Spread | None]:
        """The paper's figures, where it has them."""
        told = self.cell.paper or {}
        return {
            measure: Spread(float(told[mean]), float(told[std]), int(told["seeds"])) if told.get(mean) else None
            for measure, mean, std in zip(MEASURES, COLUMNS[0::2], COLUMNS[1::2])
        }


def _history(found: Found) -> History:
    try:
        return History.of(found.lines)
    except ValueError as error:
        raise ValueError(f"{found.path}: {error}") from None


def rows_of(
    chosen: Sequence[Cell],
    library: Library,
    seeds: int,
    steps: int | None,
    batch_size: int | None = None,
    *,
    partial: bool,
) -> tuple[list[Row], list[str]]:
    """Every cell with its runs, and notes on what is lacking.

    Without `partial` anything that is lacking raises IncompleteTable, but for rows that nobody has run yet.
    """
    rows, missing, pending, otherwise = [], [], [], []
    for cell in chosen:
        runs, lacking = [], []
        for seed in cell.seeds(seeds):
            config = cell.config(seed, steps, batch_size=batch_size)
            found = library.finished(config)
            if found is not None:
                runs.append(found)
                continue
            lacking.append(seed)
            instead = library.instead(config)
            if instead:
                otherwise.append(f"{cell.name} seed {seed}: {instead}")
        if cell.pending and not runs:
            pending.append(cell.name)
        elif lacking:
            missing.append(f"{cell.name} (seed{'s' * (len(lacking) > 1)} {', '.join(map(str, lacking))})")
        rows.append(Row(cell, cell.config(0, steps).steps, runs))
    mixed = mixtures(found for row in rows for found in row.runs)
    problems = [
        *([f"missing: {some(missing)}"] if missing else []),
        *([f"left out, since they were run otherwise: {some(otherwise)}"] if otherwise else []),
        *([f"mixed: {some(mixed)}"] if mixed else []),
    ]
    where = f"{chosen[0].table} on {chosen[0].dataset}"
    if problems and not partial:
        raise IncompleteTable(
            f"the table {where} is not whole; {'; '.join(problems)}. Without --render-only what is missing is run; "
            "--partial shows what is there"
        )
    if not any(row.runs for row in rows):
        raise IncompleteTable(f"there is no finished run of {where}; {'; '.join(problems)}")
    notes = [f"Not measured yet: {some(pending)}."] if pending else []
    return rows, [*(f"PARTIAL: {problem}." for problem in problems), *notes]


FACTS = ("hardware", "commit")  # the last columns of a CSV


def told(runs: Sequence[Found]) -> list[str]:
    """What the runs were trained on, and with which commits."""
    return [" ".join(dict.fromkeys(str(run.config.get(name) or "")[:most] for run in runs))
            for name, most in zip(FACTS, (None, 7))]  # fmt: skip


def mixtures(runs: Iterable[Found]) -> list[str]:
    """What the runs' data sets, which no id speaks of, have different values of: images, normalization, size."""
    values: dict[str, dict[str, list[str]]] = {}
    for found in runs:
        for name, value in found.config.items():
            if name.startswith("source_") and name not in ("source_path", "source_skipped"):
                values.setdefault(name, {}).setdefault(str(value), []).append(found.path.as_posix())
    return [
        f"{name} is " + " and ".join(f"{value} in {len(paths)} ({paths[0]})" for value, paths in found.items())
        for name, found in values.items()
        if len(found) > 1
    ]


def some(problems: Sequence[str]) -> str:
    """The first few of them, and how many more there are."""
    more = len(problems) - NAMED
    return "; ".join(problems[:NAMED]) + (f"; and {more} more" if more > 0 else "")
