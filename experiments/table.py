"""The paper's tables from records alone: ours, theirs, n, and the difference in standard errors.

A table is made of the runs its spec names, looked up by configuration. Runs that are missing, and runs that are there
but were done otherwise, are refused by name; a partial table leaves them out and says so.
"""

from __future__ import annotations

from collections.abc import Sequence

from experiments.library import Library
from experiments.rows import FACTS, Row, Spread, rows_of, told
from experiments.sheet import Sheet
from experiments.specs import PAPER_STEPS, QUICK, cells, default_seeds
from experiments.targets import COLUMNS, IMAGES, KEYS, MEASURES, other_data

NAMES = {"loss": "loss", "steps10": "+10%", "steps20": "+20%"}


def make_table(
    table: str,
    dataset: str,
    library: Library,
    *,
    seeds: int | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    partial: bool = False,
) -> Sheet:
    """One of the paper's tables for one data set, from records; rows without any run are in the CSV alone."""
    number = default_seeds(table, dataset) if seeds is None else seeds
    rows, notes = rows_of(cells(table, dataset), library, number, steps, batch_size, partial=partial)
    shown = [row for row in rows if row.runs]
    return Sheet(
        name=f"{table}-{dataset}",
        title=_title(table, dataset, shown),
        notes=[*notes, *_notes(shown)],
        **_for_people(shown),
        columns=[*KEYS, "n", "steps", *(f"{whose}_{name}" for whose in ("ours", "paper") for name in COLUMNS), *FACTS],
        values=[_values(row) for row in rows],
    )


def _values(row: Row) -> list[str]:
    """The row of the CSV; the paper's numbers as it prints them."""
    ours = [number for spread in row.ours().values() for number in _mean_and_std(spread)]
    paper = [(row.cell.paper or {}).get(name, "") for name in COLUMNS]
    return [*row.cell.key, str(row.n), str(row.steps), *ours, *paper, *told(row.runs)]


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
        if not _other_images(rows):
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
    over = "mean ± standard deviation over n seeds" if any(row.n > 1 for row in rows) else "one seed"
    return (
        f"Table {table}, {dataset}: best validation loss (1e-3), and thousands of steps to within 10% and 20% of it; "
        f"{over}, {rows[0].steps:,} steps, validated every {every:,}"
        + (f"; {', '.join(shared)}" if shared else "")
        + "."
    )


def _notes(rows: list[Row]) -> list[str]:
    """What a reader must know besides: what is less than the paper's, which formula a row has, what differs."""
    notes = []
    dataset, other = rows[0].cell.dataset, _other_images(rows)
    if other:
        notes.append(
            f"Not the paper's data: {_listed(other)} training images, about {IMAGES[dataset]:,} there. The comparison "
            "is between our methods; the paper's numbers are of other data, so no difference from them is given."
        )
    seeds = [(row.n, int(row.cell.paper["seeds"])) for row in rows if row.cell.paper]
    if any(n < theirs for n, theirs in seeds):
        ours, paper = map(_range, zip(*seeds))
        notes.append(f"Fewer seeds than the paper: {ours} a cell, {paper} there.")
    steps, quick = rows[0].steps, dataset == QUICK
    if steps < PAPER_STEPS:
        notes.append(f"Fewer steps than the paper: {steps:,}, {PAPER_STEPS:,} there.")
    batch, usual = rows[0].runs[0].config["batch_size"], rows[0].cell.setting.batch_size
    if batch != usual:
        whose, where = ("the quick version's", "usually") if quick else ("the paper's", "there")
        notes.append(f"{'Smaller' if batch < usual else 'Larger'} batches than {whose}: {batch:,}, {usual:,} {where}.")
    if quick:
        notes.append(
            "This is the quick version: a small model on the photographs that come with the package, to see the "
            "machinery at work; its numbers have no counterpart in the paper."
        )
    if not other and (images := _images(rows)):
        notes.append(f"Trained on {_listed(images)} images.")
    if any(name.endswith("diff/SE") for name in _for_people(rows)["header"]):
        notes.append(
            "diff/SE: (ours - paper) / sqrt(s1²/n1 + s2²/n2), with means, standard deviations and seeds of both."
        )
    if {"gaussian", "exponential"} & {row.cell.neighborhood for row in rows}:
        notes.append("gaussian is the paper's formula, exponential the one in its authors' code.")
    if any(row.cell.key[1:3] == ("cifar10", "ema") and row.cell.count_init == "0" for row in rows):
        notes.append("The paper's ema rows with count_init 0 are of ten seeds that it calls good; ours are not chosen.")
    if any(row.cell.method.startswith("som-vae") for row in rows):
        notes.append(
            "som-vae pulls neighbors toward the winning code, as the authors' code does, by squared distances that are "
            "summed over dimensions, with the weight 0.1 that their last sweep appears to use. "
            "som-vae-TARGET-mean-WEIGHT pulls them toward the target it names, by the mean over dimensions: with "
            f"{rows[0].cell.setting.code_dim} of them, a weight has 1/{rows[0].cell.setting.code_dim} of the effect."
        )
    apart = [] if other else [text for row in rows if (text := _apart(row, _telling(rows)))]
    if apart:
        notes.append(f"More than two standard errors from the paper: {'; '.join(apart)}.")
    configs = [run.config for row in rows for run in row.runs]
    hardware = sorted({config["hardware"] for config in configs if config.get("hardware")})
    if hardware:
        notes.append(f"Run on {', '.join(hardware)}.")
    return notes


def _images(rows: Sequence[Row]) -> list[int]:
    """The numbers of training images that the records tell of."""
    told = {run.config.get("source_train_images") for row in rows for run in row.runs}
    return sorted(number for number in told if number)


def _other_images(rows: Sequence[Row]) -> list[int]:
    """Those that are not the paper's."""
    return [number for number in _images(rows) if other_data(rows[0].cell.dataset, number)]


def _listed(numbers: Sequence[int]) -> str:
    return " or ".join(f"{number:,}" for number in numbers)


def _range(numbers: Sequence[int]) -> str:
    """`3`, or `2 to 3` where they differ."""
    least, most = min(numbers), max(numbers)
    return f"{least}" if least == most else f"{least} to {most}"
