"""The paper's tables from records alone: ours, theirs, n, and the difference in standard errors.

A table is made of the runs its spec names, looked up by configuration.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

from experiments.records import Record, Records, mixtures, some
from experiments.specs import (
    BLOCKS,
    COLUMNS,
    IMAGES,
    KEYS,
    MEASURES,
    PAPER_STEPS,
    QUICK,
    SCALE,
    Cell,
    Options,
    cells,
    other_data,
)
from experiments.tables import FACTS, Spread, Table, check_whole, facts, mean_and_std, ran_on, span

BLOCK_NAMES = {"paper": "residual blocks as the authors have them", "plain": "plain residual blocks, not the authors'"}
NAMES = {"loss": "loss", "steps10": "+10%", "steps20": "+20%"}


@dataclass(frozen=True)
class Row:
    """A cell with the runs found for it."""

    cell: Cell
    steps: int
    runs: list[Record]

    @property
    def n(self) -> int:
        return len(self.runs)

    def ours(self) -> dict[str, Spread | None]:
        """Best loss in 1e-3, and thousands of steps to within 10% and 20% of it."""
        return {
            "loss": Spread.of([1e3 * run.best for run in self.runs]),
            "steps10": Spread.of([run.steps_to(1.1) / 1e3 for run in self.runs]),
            "steps20": Spread.of([run.steps_to(1.2) / 1e3 for run in self.runs]),
        }

    def paper(self) -> dict[str, Spread | None]:
        """The paper's figures, where it has them."""
        told = self.cell.paper or {}
        return {
            measure: Spread(float(told[mean]), float(told[std]), int(told["seeds"])) if told.get(mean) else None
            for measure, mean, std in zip(MEASURES, COLUMNS[0::2], COLUMNS[1::2])
        }


def rows_of(table: str, options: Options, records: Records) -> tuple[list[Row], list[str]]:
    """Every cell of a table with its runs, and notes on what is lacking.

    Without --partial anything that is lacking raises IncompleteTable, but for rows that nobody has run yet.
    """
    rows, missing, pending, otherwise = [], [], [], []
    for cell in cells(table, options.dataset, options.codebooks, options.blocks):
        runs, lacking = [], []
        for seed in cell.seeds(options.seeds_of(table)):
            config = cell.config(seed, options.steps, batch_size=options.batch_size)
            found = records.finished(config)
            if found is not None:
                runs.append(found)
                continue
            lacking.append(seed)
            instead = records.instead(config)
            if instead:
                otherwise.append(f"{cell.name} seed {seed}: {instead}")
        if cell.pending and lacking:
            pending.append(cell.name)
            runs = []  # some of its seeds beside all of the others'
        elif lacking:
            missing.append(f"{cell.name} (seed{'s' * (len(lacking) > 1)} {', '.join(map(str, lacking))})")
        steps = cell.config(0, options.steps).steps
        assert steps is not None
        rows.append(Row(cell, steps, runs))
    problems = {
        "missing": missing,
        "left out, since they were run otherwise": otherwise,
        "mixed": mixtures(run for row in rows for run in row.runs),
    }
    notes = check_whole(f"{table} on {options.dataset}", options, problems, any(row.runs for row in rows))
    return rows, [*notes, *([f"Not measured yet: {some(pending)}."] if pending else [])]


def make_table(table: str, options: Options, records: Records) -> Table:
    """One of the paper's tables for one data set, from records; rows without any run are in the CSV alone."""
    options = settled(table, options, records)
    rows, notes = rows_of(table, options, records)
    shown = [row for row in rows if row.runs]
    return Table(
        name=f"{table}-{options.dataset}",
        title=_title(table, options.dataset, shown),
        notes=[*notes, *_notes(shown)],
        **_for_people(shown),
        columns=[
            *KEYS,
            "blocks",
            "n",
            "steps",
            *(f"{whose}_{name}" for whose in ("ours", "paper") for name in COLUMNS),
            *FACTS,
        ],
        values=[_values(row) for row in rows],
    )


def _values(row: Row) -> list[str]:
    """The row of the CSV; the paper's numbers as it prints them."""
    ours = [number for spread in row.ours().values() for number in mean_and_std(spread)]
    paper = [(row.cell.paper or {}).get(name, "") for name in COLUMNS]
    return [*row.cell.key, row.cell.blocks, str(row.n), str(row.steps), *ours, *paper, *facts(row.runs).values()]


def _for_people(rows: list[Row]) -> dict[str, list]:
    """Header and rows without columns that are empty or say the same in every row."""
    columns: dict[str, list[str]] = {name: [getattr(row.cell, name) for row in rows] for name in _telling(rows)}
    columns["n"] = [str(row.n) for row in rows]
    ours, paper = [row.ours() for row in rows], [row.paper() for row in rows]
    for measure, mean, std in zip(MEASURES, COLUMNS[0::2], COLUMNS[1::2]):
        columns[f"{NAMES[measure]} ours"] = [
            found.show(_digits(measure, row)) if (found := mine[measure]) else "" for mine, row in zip(ours, rows)
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
        + ("" if dataset == QUICK else f", {BLOCK_NAMES[rows[0].cell.blocks]}")
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
        ours, paper = map(span, zip(*seeds))
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
    return [*notes, *ran_on(run for row in rows for run in row.runs)]


def _images(rows: Sequence[Row]) -> list[int]:
    """The numbers of training images that the records tell of."""
    told = {run.config.get("source_train_images") for row in rows for run in row.runs}
    return sorted(number for number in told if number)


def _other_images(rows: Sequence[Row]) -> list[int]:
    """Those that are not the paper's."""
    return [number for number in _images(rows) if other_data(rows[0].cell.dataset, number)]


def _listed(numbers: Sequence[int]) -> str:
    return " or ".join(f"{number:,}" for number in numbers)


# Which runs a table is drawn from where nothing is to be run: the paper's residual blocks, if records hold them whole.
# A table has runs of one kind of blocks, and its title names it. Where some seeds of the paper's blocks are still
# missing, it has as many as every cell has. A partial table has the blocks of which there are more runs.

LEAST_SEEDS = {"cifar10": 3}  # of every cell, that make a table of the paper's blocks; of other data sets one


def settled(table: str, options: Options, records: Records) -> Options:
    """The options with `blocks` filled in, and with the number of seeds that there are where none was asked for."""
    if options.blocks is not None or not options.render_only or table == SCALE or options.dataset == QUICK:
        return options
    for asked in (replace(options, blocks=blocks) for blocks in BLOCKS):
        found = min(number for number, pending in _numbers(table, asked, records) if not pending)
        wanted = asked.seeds_of(table)
        least = wanted if options.seeds is not None else LEAST_SEEDS.get(options.dataset, 1)
        if found >= least:
            return replace(asked, seeds=min(found, wanted))
    if not options.partial:
        return replace(options, blocks="paper")  # whose runs are what is missing
    return max((replace(options, blocks=blocks) for blocks in BLOCKS), key=lambda asked: _runs(table, asked, records))


def most_seeds(table: str, options: Options, records: Records) -> int:
    """As many seeds has the cell that has most of them."""
    return max(number for number, _ in _numbers(table, options, records))


def _runs(table: str, options: Options, records: Records) -> int:
    return sum(number for number, _ in _numbers(table, options, records))


def _numbers(table: str, options: Options, records: Records) -> Iterator[tuple[int, bool]]:
    """How many of the first seeds of a cell are there, and whether the table is whole without it."""
    for cell in cells(table, options.dataset, options.codebooks, options.blocks):
        of_seed = (cell.config(seed, options.steps, batch_size=options.batch_size) for seed in count())
        yield next(seed for seed, config in enumerate(of_seed) if records.finished(config) is None), cell.pending
