"""The study `scale` from records, as a table and as a picture: methods over sizes of the codebook.

A method that is too slow may have been run for fewer steps: its row says so, and every method of that size that went on
gets another row at that step, from a run of that length where there is one, else from the curve of its longest run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from experiments.figures.style import canvas, size_axis, style
from experiments.records import Record, Records, mixtures
from experiments.specs import QUICK, SCALE, Cell, Options, cells
from experiments.tables import FACTS, Spread, Table, as_text, check_whole, facts, mean_and_std, ran_on, span
from topovq.view.pictures import COLORS

MEASURES = {"loss": 1e3, "psnr": 1.0, "usage": 100.0, "perplexity": 1.0}  # a validation's values, and their units here
COLUMNS = ("loss", "psnr", "codes_used_percent", "perplexity")
COSTS = {"ms_per_step": 3, "peak_mib": 0}  # of the runs' last lines, and the digits that are shown
KEYS = ("table", "dataset", "codebook_size", "method")


@dataclass(frozen=True)
class Point:
    """A method at one size and one step: the validations there of its runs, which were `length` steps long."""

    cell: Cell
    step: int
    length: int
    validations: list[dict[str, Any]]
    runs: list[Record]

    def cost(self, name: str) -> float | None:
        """The mean over the runs that measured it."""
        ends = [run.lines[-1] for run in self.runs]
        found = [float(end[name]) for end in ends if end.get(name) is not None]
        return sum(found) / len(found) if found else None

    def spreads(self) -> list[Spread | None]:
        return [
            Spread.of([float(seen[name]) * unit for seen in self.validations if seen.get(name) is not None])
            for name, unit in MEASURES.items()
        ]


def make_scale(options: Options, records: Records) -> Table:
    """The study for one data set; a cell without any run, or with too few, is refused unless --partial."""
    number = options.seeds_of(SCALE)
    chosen = cells(SCALE, options.dataset, options.codebooks)
    full = chosen[0].config(0, options.steps).steps
    assert full is not None
    lengths = sorted({run.config["steps"] for run in records if run.finished} | {full}, reverse=True)
    points: list[Point] = []
    missing: list[str] = []
    runs: list[Record] = []
    for size in dict.fromkeys(cell.codebook_size for cell in chosen):
        group = {
            cell: _by_length(cell, records, number, [n for n in lengths if n <= full], options.batch_size)
            for cell in chosen
            if cell.codebook_size == size
        }
        missing += [text for cell, found in group.items() for text in _lacking(cell, found, number)]
        runs += [run for found in group.values() for same in found.values() for run in same]
        made = _points({cell: found for cell, found in group.items() if found})
        points += [point for point in made if point.validations]
        early = [point for point in made if not point.validations]
        missing += [f"{point.cell.name} at step {point.step:,} (runs with --steps {point.step})" for point in early]
    notes = check_whole(
        f"{SCALE} on {options.dataset}", options, {"missing": missing, "mixed": mixtures(runs)}, bool(points)
    )
    batch_size, usual = options.batch_size, chosen[0].setting.batch_size
    if batch_size not in (None, usual):
        notes.append(f"Trained with batches of {batch_size:,} images instead of {usual:,}.")
    return _table(options.dataset, points, full, notes, runs)


def _by_length(
    cell: Cell, records: Records, seeds: int, lengths: Sequence[int], batch_size: int | None
) -> dict[int, list[Record]]:
    """The cell's finished runs by their number of steps, longest first."""
    found = {}
    for length in lengths:
        configs = (cell.config(seed, length, batch_size=batch_size) for seed in cell.seeds(seeds))
        if same := records.all_finished(configs):
            found[length] = same
    return found


def _lacking(cell: Cell, found: dict[int, list[Record]], seeds: int) -> list[str]:
    wanted = len(cell.seeds(seeds))
    have = len(next(iter(found.values()), []))
    return [f"{cell.name} ({have} of {wanted} seeds)"] if have < wanted else []


def _points(group: dict[Cell, dict[int, list[Record]]]) -> list[Point]:
    """Rows of one size: each method at the end of its longest runs, and where others ended before."""
    ends = {cell: max(found) for cell, found in group.items()}
    rows = []
    for step in sorted(set(ends.values()), reverse=True):
        ended = [_at(cell, step, step, found[step]) for cell, found in group.items() if ends[cell] == step]
        went_on = [cell for cell in group if ends[cell] > step]
        lengths = {cell: step if step in group[cell] else ends[cell] for cell in went_on}
        rows += ended + [_at(cell, step, length, group[cell][length]) for cell, length in lengths.items()]
    return rows


def _at(cell: Cell, step: int, length: int, runs: list[Record]) -> Point:
    """The runs' validations at `step`; the last one before it where none was at it."""
    at = [[seen for seen in run.validations() if seen["step"] <= step][-1:] for run in runs]
    return Point(cell, step, length, [seen for last in at for seen in last], runs)


def _table(dataset: str, points: list[Point], full: int, notes: list[str], runs: list[Record]) -> Table:
    header = ["K", "method", "steps", "n", "loss", "PSNR", "codes used", "perplexity"]
    measured = any(point.cost(name) is not None for point in points for name in COSTS)
    header += ["ms a step", "peak MiB"] * measured
    rows, values = [], []
    for point in points:
        spreads = point.spreads()
        of = f" of {point.length:,}" if point.length > point.step else ""
        size, n = point.cell.codebook_size or 0, len(point.validations)
        shown = [
            spread.show(digits) + unit if spread else ""
            for spread, digits, unit in zip(spreads, (2, 2, 1, 0), ("", " dB", "%", ""))
        ]
        costs = {name: point.cost(name) for name in COSTS}
        if measured:
            shown += ["" if cost is None else f"{cost:,.{COSTS[name]}f}" for name, cost in costs.items()]
        rows.append([f"{size:,}", point.cell.method, f"{point.step:,}{of}", str(n), *shown])
        numbers = [number for spread in spreads for number in mean_and_std(spread)]
        numbers += as_text(costs.values())
        key = [SCALE, dataset, str(size), point.cell.method]
        values.append([*key, str(n), str(point.step), str(point.length), *numbers, *facts(point.runs).values()])
    notes = [*notes, *_notes(dataset, points, full, runs)]
    if measured:
        notes.append("ms a step and peak memory are of each run alone on the device, over 50 of its first steps.")
    title = (
        f"Study {SCALE}, {dataset}: validation loss (1e-3), PSNR, share of the codes that occur among the validation "
        "tokens, and their perplexity at the last step; mean ± standard deviation over n seeds."
    )
    columns = [*KEYS, "n", "steps", "run_steps", *(f"{name}_{what}" for name in COLUMNS for what in ("mean", "std"))]
    columns += [*COSTS, *FACTS]
    return Table(f"{SCALE}-{dataset}", title, notes, header, rows, columns, values)


def _notes(dataset: str, points: list[Point], full: int, runs: list[Record]) -> list[str]:
    notes = []
    if any(point.length < full for point in points):
        notes.append(
            f"Methods with runs of fewer than {full:,} steps are shown where they ended, and the other methods of that "
            "size also at that step."
        )
    if any(point.length > point.step for point in points):
        notes.append("'a of b' is the curve of a run of b steps at step a: a schedule over b steps is not over there.")
    if dataset == QUICK:
        notes.append("This is the quick version: a small model on the photographs that come with the package.")
    best: dict[tuple[int | None, int], Point] = {}
    for point in points:
        mine, key = point.spreads()[0], (point.cell.codebook_size, point.step)
        leader = best[key].spreads()[0] if key in best else None
        if mine is not None and (leader is None or mine.mean < leader.mean):
            best[key] = point
    winners = [f"{point.cell.method} at {size:,} ({step:,} steps)" for (size, step), point in best.items() if size]
    notes.append(f"Lowest mean loss: {', '.join(winners)}.")
    return [*notes, *ran_on(runs)]


# The picture


# method -> (what the legend says, color, marker)
LOOKS = {
    "ema": ("EMA-VQ", COLORS["EMA-VQ"], "o"),
    "ksom-paper": ("KSOM as in the paper", "#7cb79b", "s"),
    "ksom": ("KSOM, narrowing", COLORS["KSOM"], "D"),
    "vqp": ("vector-quantize-pytorch, k-means start and expiry", "#4c6fb1", "^"),
    "vqp-rotation": ("vector-quantize-pytorch, rotation trick", "#8fa8d8", "v"),
    "simvq": ("SimVQ", "#8c564b", "P"),
    "fsq": ("FSQ", "#9467bd", "X"),
    "lfq": ("LFQ", "#b0a030", "*"),
}
LEAST = 0.1  # of the steps: before that, losses say how a method starts


def draw_scale(table: Table) -> Any:
    """Two panels from the rows of the study's table: filled where runs had all steps, hollow at an earlier step, where
    methods of which some had fewer are compared; what they were after the first LEAST of the steps is left out."""
    rows = [dict(zip(table.columns, row)) for row in table.values]
    full = max(int(row["steps"]) for row in rows)
    rows = [row for row in rows if int(row["steps"]) >= LEAST * full]
    sizes = sorted({int(row["codebook_size"]) for row in rows})
    seeds = sorted({int(row["n"]) for row in rows})
    fewer = sorted({int(row["steps"]) for row in rows} - {full}, reverse=True)
    caption = f"{span(seeds)} seed{'s' * (seeds != [1])} a point, {full:,} steps"
    if fewer:
        caption += f"; hollow: after {' or '.join(f'{steps:,}' for steps in fewer)} steps, every method with as many"
    caption += ". Codes in use are those that occur among the tokens of the validation images."
    with style():
        figure, (losses, uses) = canvas(2, "Codebooks of growing size", caption)
        for method, (label, color, marker) in LOOKS.items():
            how = {"color": color, "marker": marker, "markersize": 5, "capsize": 2}
            for steps in (full, *fewer):
                drawn = [row for row in rows if row["method"] == method and int(row["steps"]) == steps]
                drawn.sort(key=lambda row: int(row["codebook_size"]))
                if not drawn:
                    continue
                line = {"linewidth": 1.8} if steps == full else {"linewidth": 0.9, "linestyle": "--", "mfc": "white"}
                for ax, name in ((losses, "loss"), (uses, "codes_used_percent")):
                    means = [float(row[f"{name}_mean"]) for row in drawn]
                    spread = [float(row[f"{name}_std"] or 0) for row in drawn]
                    at = [int(row["codebook_size"]) for row in drawn]
                    ax.errorbar(at, means, spread, label=label, **how, **line)
                label = "_"  # once is enough: such labels are not in a legend
        for ax in (losses, uses):
            size_axis(ax, sizes)
        losses.set(ylabel="validation reconstruction loss (1e-3)", ylim=(0, None))
        uses.set(ylabel="codes in use (%)", ylim=(0, 104))
        losses.legend(loc="lower left", labelspacing=0.25)  # below the curves
    return figure
