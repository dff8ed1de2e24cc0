"""The paper's tables from records alone: ours, theirs, n, and the difference in standard errors.

A table is made of the runs its spec names, looked up by configuration. Runs that are missing, and runs that are there
but were done otherwise, are refused by name; a partial table leaves them out and says so.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from topovq.studies.history import History
from topovq.studies.library import Found, Library
from topovq.studies.sheet import Sheet
from topovq.studies.specs import PAPER_STEPS, QUICK, Cell, cells, default_seeds
from topovq.studies.targets import COLUMNS, KEYS, MEASURES

NAMES = {"loss": "loss", "steps10": "+10%", "steps20": "+20%"}
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
    chosen: Sequence[Cell], library: Library, seeds: int, steps: int | None, *, partial: bool
) -> tuple[list[Row], list[str]]:
    """Every cell with its runs, and a partial table's notes on what it lacks.

    Without `partial` anything that is lacking raises IncompleteTable.
    """
    rows, missing, otherwise = [], [], []
    for cell in chosen:
        runs, lacking = [], []
        for seed in cell.seeds(seeds):
            config = cell.config(seed, steps)
            found = library.finished(config)
            if found is not None:
                runs.append(found)
                continue
            lacking.append(seed)
            instead = library.instead(config)
            if instead:
                otherwise.append(f"{cell.name} seed {seed}: {instead}")
        if lacking:
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
    return rows, [f"PARTIAL: {problem}." for problem in problems]


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


def make_table(
    table: str,
    dataset: str,
    library: Library,
    *,
    seeds: int | None = None,
    steps: int | None = None,
    partial: bool = False,
) -> Sheet:
    """One of the paper's tables for one data set, from records."""
    number = default_seeds(table, dataset) if seeds is None else seeds
    rows, notes = rows_of(cells(table, dataset), library, number, steps, partial=partial)
    return Sheet(
        name=f"{table}-{dataset}",
        title=_title(table, dataset, rows),
        notes=[*notes, *_notes(rows)],
        **_for_people(rows),
        columns=[*KEYS, "n", "steps", *(f"{whose}_{name}" for whose in ("ours", "paper") for name in COLUMNS)],
        values=[_values(row) for row in rows],
    )


def _values(row: Row) -> list[str]:
    """The row of the CSV; the paper's numbers as it prints them."""
    ours = [number for spread in row.ours().values() for number in _mean_and_std(spread)]
    paper = [(row.cell.paper or {}).get(name, "") for name in COLUMNS]
    return [*row.cell.key, str(row.n), str(row.steps), *ours, *paper]


def _mean_and_std(spread: Spread | None) -> list[str]:
    numbers = (None, None) if spread is None else (spread.mean, spread.std)
    return ["" if number is None else f"{number:.6g}" for number in numbers]


def _for_people(rows: list[Row]) -> dict[str, list]:
    """Header and rows without columns that are empty or say the same in every row."""
    columns: dict[str, list[str]] = {name: [getattr(row.cell, name) for row in rows] for name in _telling(rows)}
    columns["n"] = [str(row.n) for row in rows]
    ours, paper = [row.ours() for row in rows], [row.paper() for row in rows]
    for measure, mean, std in zip(MEASURES, COLUMNS[0::2], COLUMNS[1::2]):
        columns[f"{NAMES[measure]} ours"] = [
            _show(mine[measure], _digits(measure, row)) for mine, row in zip(ours, rows)
        ]
        told = [row.cell.paper or {} for row in rows]
        columns[f"{NAMES[measure]} paper"] = [f"{t[mean]} ± {t[std]}" if t.get(mean) else "" for t in told]
        columns[f"{NAMES[measure]} diff/SE"] = [_difference(m[measure], p[measure]) for m, p in zip(ours, paper)]
    columns = {name: texts for name, texts in columns.items() if any(texts)}
    return {"header": list(columns), "rows": [list(texts) for texts in zip(*columns.values())]}


def _digits(measure: str, row: Row) -> int:
    if measure == "loss":
        best = row.ours()["loss"]
        return 3 if best is not None and best.mean < 10 else 2
    return 1 if row.cell.setting.validate_every >= 1_000 else 2


def _show(spread: Spread | None, digits: int) -> str:
    if spread is None:
        return ""
    return f"{spread.mean:.{digits}f}" + (f" ± {spread.std:.{digits}f}" if spread.std is not None else "")


def _difference(ours: Spread | None, paper: Spread | None) -> str:
    if ours is None or paper is None:
        return ""
    errors = ours.standard_errors_from(paper)
    return "" if errors is None else f"{errors:+.1f}"


def _apart(row: Row, telling: Sequence[str]) -> str:
    """The measures that are more than two standard errors from the paper's, after what tells the row from others."""
    far = [
        f"{NAMES[measure]} {_difference(ours, paper)}"
        for (measure, ours), paper in zip(row.ours().items(), row.paper().values())
        if ours and paper and abs(ours.standard_errors_from(paper) or 0) > 2
    ]
    words = [text for name in telling if (text := getattr(row.cell, name)) not in ("", "none")]
    return f"{' '.join(words)} ({', '.join(far)})" if far else ""


def _telling(rows: Sequence[Row]) -> list[str]:
    """The key columns that differ between rows (a method's name always does, in words)."""
    return [n for n in KEYS[2:] if n == "method" or len({getattr(row.cell, n) for row in rows} - {""}) > 1]


def _title(table: str, dataset: str, rows: list[Row]) -> str:
    shared = []
    for name in KEYS[3:]:
        texts = {getattr(row.cell, name) for row in rows} - {""}
        if len(texts) == 1:
            shared.append(f"{name} {texts.pop()}")
    every = rows[0].cell.setting.validate_every
    return (
        f"Table {table}, {dataset}: best validation loss (1e-3), and thousands of steps to within 10% and 20% of it; "
        f"mean ± standard deviation over n seeds, {rows[0].steps:,} steps, validated every {every:,}"
        + (f"; {', '.join(shared)}" if shared else "")
        + "."
    )


def _notes(rows: list[Row]) -> list[str]:
    """What a reader must know besides: what is less than the paper's, which formula a row has, what differs."""
    notes = []
    seeds = [(row.n, int(row.cell.paper["seeds"])) for row in rows if row.cell.paper]
    if any(n < theirs for n, theirs in seeds):
        ours, paper = map(_range, zip(*seeds))
        notes.append(f"Fewer seeds than the paper: {ours} a cell, {paper} there.")
    steps, quick = rows[0].steps, rows[0].cell.dataset == QUICK
    if steps < PAPER_STEPS:
        notes.append(f"Fewer steps than the paper: {steps:,}, {PAPER_STEPS:,} there.")
    if quick:
        notes.append(
            "This is the quick version: a small model on the photographs that come with the package, to see the "
            "machinery at work; its numbers have no counterpart in the paper."
        )
    found = [run.config for row in rows for run in row.runs]
    images = sorted({config["source_train_images"] for config in found if config.get("source_train_images")})
    if images:
        notes.append(f"Trained on {' or '.join(f'{number:,}' for number in images)} images.")
    if not quick:
        notes.append(
            "diff/SE: (ours - paper) / sqrt(s1²/n1 + s2²/n2), with means, standard deviations and seeds of both."
        )
    if {"gaussian", "exponential"} <= {row.cell.neighborhood for row in rows}:
        notes.append("gaussian is the paper's formula, exponential the one in its authors' code.")
    if any(row.cell.key[1:3] == ("cifar10", "ema") and row.cell.count_init == "0" for row in rows):
        notes.append("The paper's ema rows with count_init 0 are of ten seeds that it calls good; ours are not chosen.")
    if any(row.cell.method == "som-vae" for row in rows):
        notes.append(
            "som-vae pulls neighbors toward the winning code, as the authors' code does, with the weight 0.1 that "
            "their last sweep appears to use; som-vae-TARGET-WEIGHT toward the target with the weight it names."
        )
    apart = [text for row in rows if (text := _apart(row, _telling(rows)))]
    if apart:
        notes.append(f"More than two standard errors from the paper: {'; '.join(apart)}.")
    hardware = sorted({config["hardware"] for config in found if config.get("hardware")})
    if hardware:
        notes.append(f"Run on {', '.join(hardware)}.")
    return notes


def _range(numbers: Sequence[int]) -> str:
    """`3`, or `2 to 3` where they differ."""
    least, most = min(numbers), max(numbers)
    return f"{least}" if least == most else f"{least} to {most}"
