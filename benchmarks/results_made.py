"""What docs/results.md is made from: the records, and the measures of models as `topovq reproduce` wrote them."""

from __future__ import annotations

import csv
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from pathlib import Path

from benchmarks.measured import ROOT
from experiments.library import Found, Library
from experiments.rows import Row, rows_of
from experiments.sheet import Sheet
from experiments.specs import SETTINGS, Cell, cells
from experiments.table import make_table

SHOWN = {
    "cifar10": ("sensitivity", "main", "robustness", "ablation", "gradient"),
    "celebahq_afhq": ("main", "robustness"),
    "imagenet": ("main", "robustness"),
}
MOST_SEEDS = 32  # looked for


@dataclass(frozen=True)
class Made:
    """A table, what it was made with, and the command that prints it."""

    table: str
    dataset: str
    seeds: int
    steps: int | None
    batch_size: int | None
    partial: bool
    rows: list[Row]
    sheet: Sheet

    @property
    def command(self) -> str:
        words = ["topovq reproduce", self.table]
        words += [f"--dataset {self.dataset}"] if self.dataset != "cifar10" else []
        words.append(f"--seeds {self.seeds}")
        words += [f"--steps {self.steps}"] if self.steps is not None else []
        words += [f"--batch-size {self.batch_size}"] if self.batch_size is not None else []
        return " ".join([*words, "--render-only", *(["--partial"] if self.partial else []), "--format markdown"])

    def row(self, *key: str) -> Row:
        """The row of a method, a neighborhood and so on, in the order of the table's key columns."""
        (found,) = [row for row in self.rows if set(key) <= set(_named(row.cell))]
        return found

    def loss(self, *key: str) -> float:
        return self.mean("loss", *key)

    def mean(self, measure: str, *key: str) -> float:
        spread = self.row(*key).ours()[measure]
        assert spread is not None
        return spread.mean


def _named(cell: Cell) -> list[str]:
    return [cell.method, cell.neighborhood, f"N={cell.count_init}", f"empty={cell.update_empty}"]


@dataclass(frozen=True)
class Source:
    """Records in a folder, and beside the page the CSV files of what was measured and the pictures."""

    records: Path = ROOT / "records"
    docs: Path = ROOT / "docs"
    _made: dict[tuple[str, str], Made | None] = field(default_factory=dict)

    @cached_property
    def library(self) -> Library:
        return Library([self.records])

    def length(self, dataset: str) -> tuple[int | None, int | None] | None:
        """Steps and batch of the runs there are of a data set: the paper's (None) for CIFAR-10, else those that most
        runs have; None where there is no run."""
        if dataset == "cifar10":
            return None, None
        setting = SETTINGS[dataset]
        found = Counter(
            (run.config["steps"], run.config["batch_size"])
            for run in self.library.all()
            if run.finished and (run.config["data"], run.config["model"]) == (setting.data, setting.model)
        )
        return max(found, key=lambda length: (found[length], length)) if found else None

    def made(self, table: str, dataset: str = "cifar10") -> Made | None:
        """A table with as many seeds as most of those rows have that no table before it has; None if none was run."""
        if (table, dataset) not in self._made:
            self._made[table, dataset] = self._make(table, dataset)
        return self._made[table, dataset]

    def _make(self, table: str, dataset: str) -> Made | None:
        length = self.length(dataset)
        if length is None:
            return None
        tables = SHOWN[dataset]
        before = {cell.config(0).run_id for other in tables[: tables.index(table)] for cell in cells(other, dataset)}
        chosen = cells(table, dataset)
        seeds = {cell: self._seeds(cell, *length) for cell in chosen}
        own = Counter(seeds[cell] for cell in chosen if cell.config(0).run_id not in before and seeds[cell])
        if not own:
            return None
        number = max(own, key=lambda seen: (own[seen], seen))
        partial = min(found for cell, found in seeds.items() if found or not cell.pending) < number
        steps, batch_size = length
        sheet = make_table(
            table, dataset, self.library, seeds=number, steps=steps, batch_size=batch_size, partial=partial
        )
        rows, _ = rows_of(chosen, self.library, number, steps, batch_size, partial=partial)
        rows = [row for row in rows if row.runs]
        return Made(table, dataset, number, steps, batch_size, partial, rows, sheet)

    def _seeds(self, cell: Cell, steps: int | None, batch_size: int | None) -> int:
        return len(self.seeds_of(cell, steps, batch_size))

    def seeds_of(self, cell: Cell, steps: int | None = None, batch_size: int | None = None) -> list[Found]:
        """The cell's finished runs from seed 0 on, up to the first that is missing."""
        every = (self.library.finished(cell.config(seed, steps, None, batch_size)) for seed in range(MOST_SEEDS))
        return [run for run in takewhile(lambda run: run is not None, every) if run is not None]

    def tables(self, dataset: str) -> list[Made]:
        return [made for table in SHOWN[dataset] if (made := self.made(table, dataset)) is not None]

    def runs(self, dataset: str) -> list[Found]:
        """Every run that a table of the data set rests on, once."""
        runs = [run for made in self.tables(dataset) for row in made.rows for run in row.runs]
        return list({run.path: run for run in runs}.values())

    def measured(self, name: str, dataset: str) -> list[dict[str, str]]:
        """The rows of a measure's CSV file; none where there is no such file."""
        path = self.docs / "results" / f"{name}-{dataset}.csv"
        if not path.exists():
            return []
        with open(path, newline="") as file:
            return list(csv.DictReader(file))

    def picture(self, name: str, dataset: str) -> Path | None:
        """A figure's picture beside the page, where there is one."""
        found = [
            path for suffix in ("png", "webp") if (path := picture_path(self.docs, name, dataset, suffix)).exists()
        ]
        if len(found) > 1:
            raise ValueError(f"there are {found[0]} and {found[1]}: one of them is old, remove it")
        return found[0] if found else None


def picture_path(docs: Path, name: str, dataset: str, suffix: str) -> Path:
    """Where a figure's picture lies: those of CIFAR-10 do not name it."""
    words = ["results", name.replace("-", "_"), *([] if dataset == "cifar10" else [dataset])]
    return docs / f"{'_'.join(words)}.{suffix}"
