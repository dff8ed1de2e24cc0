"""The study `clients` from records, as a table and as a figure: quantizers in a modern tokenizer.

A row is one method in one setting, its numbers the means over the seeds that were run. A setting that nobody has run
yet is named below the table; one that has fewer seeds than the study asks for is refused, and so are runs of one row
that were done otherwise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from experiments.clients.methods import METHODS, QUICK_CELL, cells
from experiments.clients.run import Cell, run_cells
from experiments.figures.style import canvas, size_axis, style
from experiments.records import by_seeds, finished, some
from experiments.runs import missing_cells
from experiments.specs import CLIENTS, QUICK, Options
from experiments.tables import FACTS, Spread, Table, as_text, check_whole, differing, facts, ran_on
from topovq.view.pictures import COLORS

FILE = f"{CLIENTS}.jsonl"  # in the folder of runs
KEYS = ("data", "K", "d", "metric", "method", "steps")
MEASURES = ("psnr", "ssim", "used", "tokens_per_code", "perplexity", "topographic_error")
COLUMNS = (*KEYS, "n", *MEASURES, "ms", "psnr_std", "psnr_third", "used_third", *FACTS)
HEADINGS = ("PSNR 1/3", "PSNR", "SSIM", "codes used", "tokens a code", "perplexity", "topographic error", "ms")
ALIKE = ("train_images", "val_images")  # of the runs of one setting
LABELS = {
    "recommended": "KohonenVQ",
    "former": "KohonenVQ as recommended before",
    "ema": "EMA-VQ",
    "vqp": "vector-quantize-pytorch",
    "vqp-rewritten": "vector-quantize-pytorch, rewritten",
    "simvq": "SimVQ",
    "fvq": "FVQ (VQ-Bridge)",
    "diveq": "DiVeQ",
    "fsq": "FSQ",
    "lfq": "LFQ",
    "ibq": "IBQ",
}
OURS = ("recommended", "former", "ema")
LOOKS = {  # of the figure: color, marker
    "recommended": (COLORS["KSOM"], "D"),
    "former": ("#7cb79b", "s"),
    "vqp-rewritten": ("#4c6fb1", "^"),
    "ema": (COLORS["EMA-VQ"], "o"),
}


@dataclass(frozen=True)
class Row:
    """A method in a setting, and the records of its seeds."""

    cell: Cell
    records: list[dict[str, Any]]

    @property
    def setting(self) -> Cell:
        return replace(self.cell, method="", seed=0)

    def spread(self, name: str, at: int = -1) -> Spread | None:
        """Over the seeds, at the end, or after a third of the steps (at=0)."""
        found = [record["rows"][at][name] for record in self.records]
        return Spread.of([value for value in found if value is not None])

    def mean(self, name: str, at: int = -1) -> float | None:
        spread = self.spread(name, at)
        return None if spread is None else spread.mean

    @property
    def ms(self) -> float:
        return sum(record["ms"] for record in self.records) / len(self.records)


def wanted(options: Options) -> list[Cell]:
    """The cells of the study; the quick version has every method once, in a small model on photographs."""
    if options.dataset == QUICK:
        found = [replace(QUICK_CELL, method=method, steps=options.steps or QUICK_CELL.steps) for method in METHODS]
    else:
        found = cells()
    if options.codebooks is not None:
        found = [cell for cell in found if cell.K in options.codebooks]
    return found


def run_missing(options: Options, say: Callable[[str], object]) -> None:
    """Train what no record tells of, one run after the other, on this machine."""
    todo = missing_cells(wanted(options), find(options), options.dataset == QUICK, say)
    options.runs.mkdir(parents=True, exist_ok=True)
    run_cells(todo, options.runs / FILE, options.data_path, say=say)


def find(options: Options) -> dict[str, dict[str, Any]]:
    return finished(CLIENTS, (options.runs, *options.records), lambda told: Cell(**told))


def make_clients(options: Options) -> Table:
    found, left = by_seeds(wanted(options), find(options))
    lacking = Counter(replace(cell, seed=0) for cell in left)
    some_seeds = [f"{cell.name[:-7]} ({n} seeds)" for cell, n in lacking.items() if found[cell]]
    not_run = [cell.name[:-7] for cell in lacking if not found[cell]]
    shown = [Row(cell, records) for cell, records in found.items() if records]
    problems = {"missing": some_seeds, "mixed": _mixed(shown)}
    notes = check_whole(CLIENTS, options, problems, bool(shown))
    if not_run:
        notes.append(f"Not measured yet: {some(not_run)}.")
    return Table(
        name=CLIENTS if options.dataset != QUICK else f"{CLIENTS}-{QUICK}",
        title="Study clients: a modern tokenizer (VQGAN's networks, squared error alone) with several quantizers. PSNR "
        "after a third of the steps and at the end, mean ± standard deviation over n seeds.",
        notes=[*notes, *_notes(shown)],
        header=[*KEYS, "n", *HEADINGS],
        rows=[_for_people(row) for row in shown],
        columns=list(COLUMNS),
        values=[_for_programs(row) for row in shown],
    )


def _mixed(rows: Sequence[Row]) -> list[str]:
    """Data sets of which the runs saw different images."""
    told = ((row.cell.data, " + ".join(f"{record[n]:,}" for n in ALIKE)) for row in rows for record in row.records)
    return [f"{data} was {' and '.join(found)} images" for data, found in differing(told).items()]


def _data(cell: Cell) -> str:
    return cell.data + (f" stride {cell.stride}" if cell.stride != Cell.stride else "")


def _for_people(row: Row) -> list[str]:
    cell = row.cell
    key = [_data(cell), f"{cell.K:,}", str(cell.d), cell.metric, LABELS[cell.method], f"{cell.steps:,}"]
    forms = {"ssim": "{:.3f}", "used": "{:.1%}", "tokens_per_code": "{:.0f}", "perplexity": "{:,.0f}"}
    forms["topographic_error"] = "{:.2f}"
    psnr = [spread.show(2) if (spread := row.spread("psnr", at)) else "" for at in (0, -1)]
    others = ["" if (value := row.mean(name)) is None else form.format(value) for name, form in forms.items()]
    return [*key, str(len(row.records)), *psnr, *others, f"{row.ms:.2f}"]


def _for_programs(row: Row) -> list[str]:
    key = {**asdict(row.cell), "data": _data(row.cell)}
    late = row.spread("psnr")
    numbers = [row.mean(name) for name in MEASURES]
    numbers += [row.ms, late.std if late else None, row.mean("psnr", 0), row.mean("used", 0)]
    return [*(str(key[name]) for name in KEYS), str(len(row.records)), *as_text(numbers), *facts(row.records).values()]


def _notes(rows: Sequence[Row]) -> list[str]:
    """Who is ahead in each setting, and what the columns mean."""
    settings: dict[Cell, list[Row]] = {}
    for row in rows:
        settings.setdefault(row.setting, []).append(row)
    behind, compared = [], 0
    for setting, group in settings.items():
        mine = [row for row in group if row.cell.method == "recommended"]
        others = [row for row in group if row.cell.method not in OURS]
        if not mine or not others:
            continue
        compared += 1
        for at, when in ((0, "after a third"), (-1, "at the end")):
            best = max(others, key=lambda row: row.mean("psnr", at) or 0)
            ahead = (best.mean("psnr", at) or 0) - (mine[0].mean("psnr", at) or 0)
            if ahead > 0:
                where = (
                    f"{_data(setting)}, {setting.K:,} codes of {setting.d}, {setting.metric}, {setting.steps:,} steps"
                )
                behind.append(f"{LABELS[best.cell.method]} by {ahead:.2f} dB {when} ({where})")
    notes = []
    if compared:
        said = "; ".join(behind) if behind else "nowhere"
        notes.append(f"Where a quantizer of others has the higher PSNR, of {compared} settings: {said}.")
    notes.append(
        "vector-quantize-pytorch has its best recipe: k-means start, decay 0.99, expiry below a count of 2. "
        "Rewritten is the same rule, written so that a step fits into a CUDA graph."
    )
    notes.append("`codes used` are those that occur among the validation tokens, of which there are so many a code.")
    if any(not record["graph"] for row in rows for record in row.records):
        methods = [row.cell.method for row in rows if not all(record["graph"] for record in row.records)]
        notes.append(f"ms is of a whole step, without a CUDA graph for {', '.join(dict.fromkeys(methods))}.")
    return [*notes, *ran_on(record for row in rows for record in row.records)]


def draw_clients(table: Table) -> Any:
    """Two panels over the size of the codebook: codes in use, and PSNR; from those rows of the table that have the
    usual code dimension, metric and images, and the fewest steps. None where there are no such rows."""
    rows = [dict(zip(table.columns, row)) for row in table.values]
    rows = [row for row in rows if row["metric"] == Cell.metric and int(row["d"]) == Cell.d]
    plain = [row for row in rows if row["data"] in (Cell.data, QUICK)]
    if not plain:
        return None
    shortest = min(int(row["steps"]) for row in plain)
    drawn = [row for row in plain if int(row["steps"]) == shortest]
    sizes = sorted({int(row["K"]) for row in drawn})
    seeds = " or ".join(sorted({row["n"] for row in drawn}))
    caption = f"{Cell.d}-dimensional codes, {shortest:,} steps; seeds a point: {seeds}. "
    caption += "Codes in use are those that occur among the validation tokens."
    with style():
        figure, axes = canvas(2, "Quantizers in a modern tokenizer", caption)
        for method, (color, marker) in LOOKS.items():
            mine = sorted((row for row in drawn if row["method"] == method), key=lambda row: int(row["K"]))
            at = [int(row["K"]) for row in mine]
            for ax, name, unit in zip(axes, ("used", "psnr"), (100.0, 1.0)):
                values = [unit * float(row[name]) for row in mine]
                ax.plot(at, values, color=color, marker=marker, markersize=5, linewidth=1.8, label=LABELS[method])
        for ax, name in zip(axes, ("codes in use (%)", "PSNR (dB)")):
            size_axis(ax, sizes)
            ax.set_ylabel(name)
        axes[0].set_ylim(0, 104)
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center")
    return figure
