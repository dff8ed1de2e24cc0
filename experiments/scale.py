"""The study `scale` from records: methods over sizes of the codebook, compared after as many steps.

A method that is too slow may have been run for fewer steps: its row says so, and every method of that size that went on
gets another row at that step, from a run of that length where there is one, else from the curve of its longest run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from experiments.library import Found, Library
from experiments.rows import FACTS, IncompleteTable, Spread, mixtures, some, told
from experiments.sheet import Sheet
from experiments.specs import QUICK, SCALE, Cell, cells, default_seeds

MEASURES = {"loss": 1e3, "psnr": 1.0, "usage": 100.0, "perplexity": 1.0}  # a validation's values, and their units here
COLUMNS = ("loss", "psnr", "codes_used_percent", "perplexity")
COSTS = {"ms_per_step": 3, "peak_mib": 0}  # of the runs' last lines, and the digits that are shown
KEYS = ("table", "dataset", "codebook_size", "method")


@dataclass(frozen=True)
class Line:
    """A method at one size and one step: the validations there of its runs, which were `length` steps long."""

    cell: Cell
    step: int
    length: int
    validations: list[dict[str, Any]]
    runs: list[Found]

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


def make_scale(
    dataset: str,
    library: Library,
    *,
    seeds: int | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    partial: bool = False,
    codebooks: Sequence[int] | None = None,
) -> Sheet:
    """The study for one data set; a cell without any run, or with too few, is refused unless `partial`."""
    number = default_seeds(SCALE, dataset) if seeds is None else seeds
    chosen = cells(SCALE, dataset, codebooks)
    full = chosen[0].config(0, steps).steps
    lengths = sorted({found.config["steps"] for found in library.all() if found.finished} | {full}, reverse=True)
    lines: list[Line] = []
    missing: list[str] = []
    runs: list[Found] = []
    for size in dict.fromkeys(cell.codebook_size for cell in chosen):
        group = {
            cell: _by_length(cell, library, number, [n for n in lengths if n <= full], batch_size)
            for cell in chosen
            if cell.codebook_size == size
        }
        missing += [text for cell, found in group.items() for text in _lacking(cell, found, number)]
        runs += [run for found in group.values() for same in found.values() for run in same]
        made = _lines({cell: found for cell, found in group.items() if found})
        lines += [line for line in made if line.validations]
        early = [line for line in made if not line.validations]
        missing += [f"{line.cell.name} at step {line.step:,} (runs with --steps {line.step})" for line in early]
    mixed = mixtures(runs)
    problems = [
        *([f"missing: {some(missing)}"] if missing else []),
        *([f"mixed: {some(mixed)}"] if mixed else []),
    ]
    if problems and not partial:
        raise IncompleteTable(
            f"{SCALE} on {dataset} is not whole; {'; '.join(problems)}. Without --render-only what is missing is run; "
            "--partial shows what is there"
        )
    if not lines:
        raise IncompleteTable(f"there is no finished run of {SCALE} on {dataset}; {'; '.join(problems)}")
    notes = [f"PARTIAL: {problem}." for problem in problems]
    usual = chosen[0].setting.batch_size
    if batch_size not in (None, usual):
        notes.append(f"Trained with batches of {batch_size:,} images instead of {usual:,}.")
    return _sheet(dataset, lines, full, notes, runs)


def _by_length(
    cell: Cell, library: Library, seeds: int, lengths: Sequence[int], batch_size: int | None
) -> dict[int, list[Found]]:
    """The cell's finished runs by their number of steps, longest first."""
    found = {}
    for length in lengths:
        same = [library.finished(cell.config(seed, length, batch_size=batch_size)) for seed in cell.seeds(seeds)]
        if any(same):
            found[length] = [run for run in same if run is not None]
    return found


def _lacking(cell: Cell, found: dict[int, list[Found]], seeds: int) -> list[str]:
    wanted = len(cell.seeds(seeds))
    have = len(next(iter(found.values()), []))
    return [f"{cell.name} ({have} of {wanted} seeds)"] if have < wanted else []


def _lines(group: dict[Cell, dict[int, list[Found]]]) -> list[Line]:
    """Rows of one size: each method at the end of its longest runs, and where others ended before."""
    ends = {cell: max(found) for cell, found in group.items()}
    rows = []
    for step in sorted(set(ends.values()), reverse=True):
        ended = [_at(cell, step, step, found[step]) for cell, found in group.items() if ends[cell] == step]
        went_on = [cell for cell in group if ends[cell] > step]
        lengths = {cell: step if step in group[cell] else ends[cell] for cell in went_on}
        rows += ended + [_at(cell, step, length, group[cell][length]) for cell, length in lengths.items()]
    return rows


def _at(cell: Cell, step: int, length: int, runs: list[Found]) -> Line:
    """The runs' validations at `step`; the last one before it where none was at it."""
    at = [[seen for seen in run.validations() if seen["step"] <= step][-1:] for run in runs]
    return Line(cell, step, length, [seen for last in at for seen in last], runs)


def _sheet(dataset: str, lines: list[Line], full: int, notes: list[str], runs: list[Found]) -> Sheet:
    header = ["K", "method", "steps", "n", "loss", "PSNR", "codes used", "perplexity"]
    measured = any(line.cost(name) is not None for line in lines for name in COSTS)
    header += ["ms a step", "peak MiB"] * measured
    rows, values = [], []
    for line in lines:
        spreads = line.spreads()
        of = f" of {line.length:,}" if line.length > line.step else ""
        size, n = line.cell.codebook_size or 0, len(line.validations)
        shown = [
            _show(spread, digits, unit) for spread, digits, unit in zip(spreads, (2, 2, 1, 0), ("", " dB", "%", ""))
        ]
        costs = {name: line.cost(name) for name in COSTS}
        if measured:
            shown += ["" if cost is None else f"{cost:,.{COSTS[name]}f}" for name, cost in costs.items()]
        rows.append([f"{size:,}", line.cell.method, f"{line.step:,}{of}", str(n), *shown])
        numbers = [
            "" if number is None else f"{number:.6g}"
            for spread in spreads
            for number in ((spread.mean, spread.std) if spread else (None, None))
        ]
        numbers += ["" if cost is None else f"{cost:.6g}" for cost in costs.values()]
        key = [SCALE, dataset, str(size), line.cell.method]
        values.append([*key, str(n), str(line.step), str(line.length), *numbers, *told(line.runs)])
    notes = [*notes, *_notes(dataset, lines, full, runs)]
    if measured:
        notes.append("ms a step and peak memory are of each run alone on the device, over 50 of its first steps.")
    title = (
        f"Study {SCALE}, {dataset}: validation loss (1e-3), PSNR, share of the codes that occur among the validation "
        "tokens, and their perplexity at the last step; mean ± standard deviation over n seeds."
    )
    columns = [*KEYS, "n", "steps", "run_steps", *(f"{name}_{what}" for name in COLUMNS for what in ("mean", "std"))]
    columns += [*COSTS, *FACTS]
    return Sheet(f"{SCALE}-{dataset}", title, notes, header, rows, columns, values)


def _show(spread: Spread | None, digits: int, unit: str) -> str:
    if spread is None:
        return ""
    spread_text = f" ± {spread.std:.{digits}f}" if spread.std is not None else ""
    return f"{spread.mean:,.{digits}f}{spread_text}{unit}"


def _notes(dataset: str, lines: list[Line], full: int, runs: list[Found]) -> list[str]:
    notes = []
    if any(line.length < full for line in lines):
        notes.append(
            f"Methods with runs of fewer than {full:,} steps are shown where they ended, and the other methods of that "
            "size also at that step."
        )
    if any(line.length > line.step for line in lines):
        notes.append("'a of b' is the curve of a run of b steps at step a: a schedule over b steps is not over there.")
    if dataset == QUICK:
        notes.append("This is the quick version: a small model on the photographs that come with the package.")
    best: dict[tuple[int | None, int], Line] = {}
    for line in lines:
        mine, key = line.spreads()[0], (line.cell.codebook_size, line.step)
        leader = best[key].spreads()[0] if key in best else None
        if mine is not None and (leader is None or mine.mean < leader.mean):
            best[key] = line
    winners = [f"{line.cell.method} at {size:,} ({step:,} steps)" for (size, step), line in best.items() if size]
    notes.append(f"Lowest mean loss: {', '.join(winners)}.")
    hardware = sorted({run.config["hardware"] for run in runs if run.config.get("hardware")})
    if hardware:
        notes.append(f"Run on {', '.join(hardware)}.")
    return notes
