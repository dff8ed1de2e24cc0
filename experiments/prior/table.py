"""The study `prior` from records, as a table and as a figure: what the tokens of a codebook cost to predict.

A row is one head on the tokens of one codebook, its numbers the means over the seeds that were run. What nobody has run
yet is named below the table. Runs of one row that saw other images are refused.

    python -m experiments.prior.table records/prior --out docs/results

writes two more tables for every data set whose samples were looked at: token-errors-DATA.csv and compression-DATA.csv,
of what tokens.py measures.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.figures.style import canvas, style
from experiments.prior.cells import Book, Cell, cells, quick_cells
from experiments.prior.run import STUDY, run_cells
from experiments.prior.tokens import ERROR_COLUMNS, FORMS, SIZE_COLUMNS, as_csv
from experiments.records import by_seeds, finished, of_study, some
from experiments.runs import missing_cells
from experiments.specs import QUICK, Options
from experiments.tables import FACTS, Spread, Table, as_text, check_whole, differing, facts, ran_on
from topovq.storage import write_atomic
from topovq.view.pictures import COLORS

ASKED = ("data", "codebook", "K", "head", "smoothing", "n", "bits_per_token", "head_parameters", "ms", "memory_gib")
MORE = ("steps", "bits_per_token_std", "bits_per_image", "psnr", "used", "best_step", "steps_to_loss")
SAMPLED = ("images_per_second", "fd_vgg", "fd_vgg_reconstructions", "fd_vgg_photographs")
COLUMNS = (*ASKED, *MORE, *SAMPLED, "curve", *FACTS)
HEADINGS = ("data", "codebook", "K", "head", "smoothing", "steps", "n", "bits a token", "head", "ms", "GiB", "PSNR")
ALIKE = ("train_images", "val_images", "codes")
NEAR = 1.02  # times the best bits of row/column: the loss that `steps_to_loss` counts the steps to
TOKENS = 64  # of an image
VGG_FILE = "lpips_vgg_fp16.safetensors"  # in the folder of the data
LOOKS = {  # of the figure: color, marker
    "KSOM": (COLORS["KSOM"], "D"),
    "EMA-VQ": (COLORS["EMA-VQ"], "o"),
    "vqp": ("#4c6fb1", "^"),
    "FSQ": ("#8a6fb0", "v"),
    "LFQ": ("#8c8c86", "s"),
}


@dataclass(frozen=True)
class Row:
    """A head on the tokens of a codebook, and the records of its seeds."""

    cell: Cell
    records: list[dict[str, Any]]
    sampled: dict[str, Any]  # what was measured of its samples, where it was

    @property
    def bits(self) -> Spread:
        found = Spread.of([min(row["bits"] for row in record["rows"]) for record in self.records])
        assert found is not None
        return found

    def mean(self, name: str) -> float | None:
        values = [record[name] for record in self.records if record[name] is not None]
        return sum(values) / len(values) if values else None

    @property
    def best_step(self) -> float:
        best = [min(record["rows"], key=lambda row: row["bits"])["step"] for record in self.records]
        return sum(best) / len(best)

    @property
    def curve(self) -> str:
        """Bits at each look, `step:bits` after `step:bits`, the means over seeds."""
        looks = zip(*(record["rows"] for record in self.records))
        return " ".join(f"{each[0]['step']}:{sum(r['bits'] for r in each) / len(each):.4f}" for each in looks)

    def steps_to(self, bits: float) -> float | None:
        """Steps until so few bits, the mean over seeds; None where some seed does not get there."""
        first = [next((row["step"] for row in record["rows"] if row["bits"] <= bits), None) for record in self.records]
        known = [step for step in first if step is not None]
        return sum(known) / len(known) if len(known) == len(first) else None


def wanted(options: Options) -> list[Cell]:
    found = quick_cells() if options.dataset == QUICK else cells()
    if options.codebooks is not None:
        found = [cell for cell in found if cell.book.K in options.codebooks]
    return found


def run_missing(options: Options, say: Callable[[str], object]) -> None:
    """Train what no record tells of, one run after the other, on this machine."""
    todo = missing_cells(wanted(options), find(options), options.dataset == QUICK, say)
    out, vgg = options.runs / STUDY, options.data_path / VGG_FILE if options.data_path is not None else None
    if vgg is not None and not vgg.is_file():
        say(f"there is no {vgg}, so there will be no FD-VGG")
        vgg = None
    run_cells(todo, out, options.data_path, vgg=vgg, cache=out / "tokenizers", say=say)


def find(options: Options) -> dict[str, dict[str, Any]]:
    return finished(STUDY, (options.runs, *options.records), Cell.of)


def find_sampled(folders: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """The records of samples by the id of their cell, the newest of each."""
    told = [record for _, record in of_study(STUDY, folders) if "sampled" in record]
    return {Cell.of(record["cell"]).id: record for record in told}


def rows_of(options: Options) -> tuple[list[Row], list[str]]:
    """The rows that have a record, and the names of cells that have none."""
    found, lacking = by_seeds(wanted(options), find(options))
    looked_at = find_sampled((options.runs, *options.records))
    shown = [
        Row(cell, records, looked_at.get(cell.id, {}).get("sampled", {})) for cell, records in found.items() if records
    ]
    return shown, [cell.name for cell in lacking]


def make_prior_table(options: Options) -> Table:
    shown, lacking = rows_of(options)
    notes = check_whole(STUDY, options, {"mixed": _mixed(shown)}, bool(shown))
    if lacking:
        notes.append(f"Not measured yet: {some(lacking)}.")
    return Table(
        name=STUDY if options.dataset != QUICK else f"{STUDY}-{QUICK}",
        title="Study prior: bits a token of a causal transformer over 8 x 8 tokens, the best of 20 validations, mean ± "
        "standard deviation over n seeds.",
        notes=[*notes, *_notes(shown)],
        header=list(HEADINGS),
        rows=[_for_people(row) for row in shown],
        columns=list(COLUMNS),
        values=[_for_programs(row, _goal(row, shown)) for row in shown],
    )


def asked(table: Table) -> Table:
    """What `--format csv` prints: the columns that were asked for, of the runs that were not cut short."""
    steps = [int(row[COLUMNS.index("steps")]) for row in table.values]
    whole = [row[: len(ASKED)] for row, number in zip(table.values, steps) if number == max(steps)]
    return replace(table, columns=list(ASKED), values=whole)


def _mixed(rows: Sequence[Row]) -> list[str]:
    """Codebooks whose tokens the runs did not share."""
    told = ((row.cell.book.name, " + ".join(f"{record[n]:,}" for n in ALIKE)) for row in rows for record in row.records)
    return [f"{book} has {' and '.join(found)} images and codes" for book, found in differing(told).items()]


def _goal(row: Row, rows: Sequence[Row]) -> float | None:
    """NEAR times the bits of row/column on the same tokens, with as many steps and no smoothing."""
    plain = replace(row.cell, head="row/column", smoothing=False)
    return next((NEAR * other.bits.mean for other in rows if other.cell == plain), None)


def _for_people(row: Row) -> list[str]:
    cell, size = row.cell, row.mean("head_parameters") or 0
    key = [cell.book.data, cell.book.codebook, f"{cell.book.K:,}", cell.head, "yes" if cell.smoothing else "no"]
    memory = row.mean("memory_gib")
    cost = [f"{size / 1e6:.2f} M", f"{row.mean('ms'):.1f}", "" if memory is None else f"{memory:.1f}"]
    return [*key, f"{cell.steps:,}", str(len(row.records)), row.bits.show(3), *cost, f"{row.mean('psnr'):.2f}"]


def _for_programs(row: Row, goal: float | None) -> list[str]:
    cell = row.cell
    key = [cell.book.data, cell.book.codebook, str(cell.book.K), cell.head, "yes" if cell.smoothing else "no"]
    numbers = [row.bits.mean, row.mean("head_parameters"), row.mean("ms"), row.mean("memory_gib"), float(cell.steps)]
    numbers += [row.bits.std, TOKENS * row.bits.mean, row.mean("psnr"), row.mean("used"), row.best_step]
    numbers.append(None if goal is None else row.steps_to(goal))
    numbers += [row.sampled.get(name) for name in SAMPLED]
    return [*key, str(len(row.records)), *as_text(numbers, 10), row.curve, *facts(row.records).values()]


def _retrained(rows: Sequence[Row]) -> list[str]:
    """Codebooks that were trained more than once, so that their priors do not have the same tokens."""
    seen: dict[str, dict[str, float]] = {}
    for row in rows:
        for record in row.records:
            seen.setdefault(row.cell.book.name, {})[record.get("tokens_id", "")] = record["psnr"]
    return [
        f"{book} was trained {len(found)} times, to {' and '.join(f'{psnr:.2f}' for psnr in found.values())} dB: not "
        "all of its rows have the same tokens."
        for book, found in seen.items()
        if len(found) > 1
    ]


def _notes(rows: Sequence[Row]) -> list[str]:
    """Where flat wins, and what the columns mean."""
    wins, compared = [], 0
    for row in rows:
        if row.cell.head not in ("row/column", "own") or row.cell.smoothing:
            continue
        flat = next((other for other in rows if other.cell == replace(row.cell, head="flat")), None)
        if flat is None:
            continue
        compared += 1
        if flat.bits.mean < row.bits.mean:
            wins.append(f"{row.cell.book.name} by {100 * (1 - flat.bits.mean / row.bits.mean):.1f}%")
    notes = []
    if compared:
        said = "; ".join(wins) if wins else "nowhere"
        notes.append(f"Where a flat head needs fewer bits than row/column (or own), of {compared} codebooks: {said}.")
    for row in rows:
        if row.sampled:
            told = row.sampled
            text = f"{told['images']:,} samples of {row.cell.book.name} {row.cell.head} took {told['seconds']:.1f} s"
            if "fd_vgg" in told:
                others = (told["fd_vgg_reconstructions"], told["fd_vgg_photographs"])
                text += f"; FD-VGG to training images {told['fd_vgg']:.1f} (reconstructions {others[0]:.1f}, other "
                text += f"photographs {others[1]:.1f})"
            notes.append(f"{text}.")
    notes += _retrained(rows)
    notes.append("`bits` is the first third of a token's bits, then the others. `shuffled` codes have no order.")
    return [*notes, *ran_on(record for row in rows for record in row.records)]


def draw_prior(table: Table) -> Any:
    """Two panels. PSNR against the bits of an image: for each codebook, over its sizes, by the head with the fewest
    bits; and the way to few bits with and without smoothing. None where there is no such pair of runs."""
    rows = [dict(zip(table.columns, row)) for row in table.values]
    smoothed = [row for row in rows if row["smoothing"] == "yes"]
    if not smoothed:
        return None
    pair = max(smoothed, key=lambda row: (int(row["K"]), int(row["steps"])))
    data = pair["data"]
    caption = (
        f"{data}, seeds a point: {' or '.join(sorted({row['n'] for row in rows}))}. Left: each point is a size of the "
    )
    caption += "codebook, with the head that needs the fewest bits; up and left is better. Right: validation bits of "
    caption += f"row/column with {int(pair['K']):,} codes."
    with style():
        figure, (left, right) = canvas(2, "What an image costs, and how fast a prior learns it", caption)
        for codebook, (color, marker) in LOOKS.items():
            place: dict[int, tuple[float, float]] = {}
            for row in rows:
                if (row["data"], row["codebook"]) == (data, codebook):
                    here = (float(row["bits_per_image"]), float(row["psnr"]))
                    place[int(row["K"])] = min(place.get(int(row["K"]), here), here)
            if place:
                bits, decibels = zip(*(place[size] for size in sorted(place)))
                left.plot(bits, decibels, color=color, marker=marker, markersize=5, linewidth=1.8, label=codebook)
        alike = ("data", "codebook", "K", "head")
        for row in rows:
            if all(row[name] == pair[name] for name in alike):
                looks = [look.split(":") for look in row["curve"].split()]
                label = f"{'smoothed' if row['smoothing'] == 'yes' else 'one-hot'}, {int(row['steps']):,} steps"
                dash = "-" if row["smoothing"] == "yes" else "--"
                right.plot(
                    [int(step) for step, _ in looks], [float(b) for _, b in looks], dash, linewidth=1.8, label=label
                )
        left.set(xlabel="bits an image", ylabel="PSNR (dB)")
        right.set(xlabel="step", ylabel="bits a token")
        for ax in (left, right):
            ax.legend()
    return figure


# What was measured of the tokens of models with samples


def errors_of(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows of token-errors-DATA.csv, of one tokenizer."""
    facts = _book_facts(record)
    rows = record["sampled"].get("errors", [])
    for row in rows:
        tokens = record["sampled"]["error_tokens"]
        lost = rows[0]["psnr"] - row["psnr"]
        yield {**facts, "codebook": Cell.of(record["cell"]).book.codebook, "tokens": tokens, **row, "psnr_lost": lost}


def sizes_of(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows of compression-DATA.csv: what the prior needs is its validation bits. A form that no quality brings to the
    tokens' PSNR has its own; records of before have none."""
    told = record["sampled"]["sizes"]
    sizes = {**told, "prior": record["sampled"]["bits_per_token"] * told["tokens_per_pixel"]}
    facts = {**_book_facts(record), "images": told["images"]}
    for form in FORMS:
        psnr = told.get(f"{form}_psnr", told["psnr"])
        yield {**facts, "form": form, "bits_per_pixel": sizes[form], "psnr": psnr}


def _book_facts(record: dict[str, Any]) -> dict[str, Any]:
    book = Cell.of(record["cell"]).book
    known = {name: record.get(name) or "" for name in FACTS}
    return {"data": book.data, "K": book.K, "images": record["sampled"]["error_images"], **known}


def write_extras(records: Path, out: Path) -> list[Path]:
    """Write both tables of every data set; the files."""
    found = list(find_sampled([records]).values())
    if not found:
        raise FileNotFoundError(f"no record of samples of the study prior is below {records}")
    written = []
    for data in sorted({Cell.of(record["cell"]).book.data for record in found}):
        mine = [record for record in found if Cell.of(record["cell"]).book.data == data]
        ours = [record for record in mine if Cell.of(record["cell"]).book.codebook == "KSOM"]
        for name, columns, rows in (
            ("token-errors", ERROR_COLUMNS, [row for record in mine for row in errors_of(record)]),
            ("compression", SIZE_COLUMNS, [row for record in ours for row in sizes_of(record)]),
        ):
            path = out / f"{name}-{data}.csv"
            write_atomic(path, as_csv(columns, rows).encode())
            written.append(path)
    return written


def pictures(records: Path) -> dict[str, Path]:
    """The pictures of samples that lie beside records and that pages show, by their names there."""
    found = {f"prior-{kind}": records / f"{kind}-KSOM-{Book().K}.webp" for kind in ("samples", "nearest")}
    return {name: path for name, path in found.items() if path.is_file()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, help="folder with the records of the study")
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="folder of the CSVs")
    asked = parser.parse_args()
    print(*write_extras(asked.records, asked.out), sep="\n")


if __name__ == "__main__":
    main()
