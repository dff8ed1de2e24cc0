"""Tables: what any of them is, its formats, and what all of them say of their numbers.

What a study shows is in its own folder (paper/table.py, scale/table.py and so on). Runs that are missing, and runs that
do not go together, are refused by name; a partial table leaves them out and says so.
"""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from experiments.records import Record, some

if TYPE_CHECKING:  # the machines that train have no command-line packages
    from experiments.specs import Options

FACTS = ("hardware", "commit")  # the last columns of a CSV
Line = dict[str, Any]  # of a CSV, by its columns


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
        """(self - other) / sqrt(s1^2/n1 + s2^2/n2); None where that is not known.

        Infinite where no run differs from another of its side, but the sides do.
        """
        if self.std is None or other.std is None:
            return None
        apart, error = self.mean - other.mean, math.sqrt(self.std**2 / self.n + other.std**2 / other.n)
        return apart / error if error else math.copysign(math.inf, apart) if apart else 0.0

    def show(self, digits: int) -> str:
        return f"{self.mean:,.{digits}f}" + (f" ± {self.std:.{digits}f}" if self.std is not None else "")


def mean_and_std(spread: Spread | None) -> list[str]:
    """As a CSV has them."""
    return as_text((None, None) if spread is None else (spread.mean, spread.std))


def as_text(numbers: Iterable[float | None], digits: int = 6) -> list[str]:
    """Numbers as a CSV has them; empty where there is none."""
    return ["" if number is None else f"{number:.{digits}g}" for number in numbers]


def mean_and_std_of(name: str, values: Sequence[float], digits: int) -> Line:
    """As two columns of a line; no deviation of one run."""
    spread = Spread.of(values)
    assert spread is not None
    return {f"{name}_mean": round(spread.mean, digits), f"{name}_std": _rounded(spread.std, digits)}


def _rounded(number: float | None, digits: int) -> float | str:
    return "" if number is None else round(number, digits)


def facts(runs: Iterable[Record | Mapping[str, Any]]) -> dict[str, str]:
    """What the runs were trained on, and with which commits: the columns FACTS."""
    told = _told(runs)
    return {
        name: " ".join(dict.fromkeys(str(each.get(name) or "")[:most] for each in told))
        for name, most in zip(FACTS, (None, 7))
    }


def ran_on(runs: Iterable[Record | Mapping[str, Any]]) -> list[str]:
    """The same as a note, where it is known."""
    hardware = sorted({each["hardware"] for each in _told(runs) if each.get("hardware")})
    return [f"Run on {', '.join(hardware)}."] if hardware else []


def _told(runs: Iterable[Record | Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """What records say first: of the trainer's runs, and of those that are cells."""
    return [run.config if isinstance(run, Record) else run for run in runs]


def differing(told: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Of (name, what is said of it) the names of which different things are said, and these."""
    found: dict[str, set[str]] = {}
    for name, said in told:
        found.setdefault(name, set()).add(said)
    return {name: sorted(said) for name, said in found.items() if len(said) > 1}


def check_whole(where: str, options: Options, problems: dict[str, list[str]], anything: bool) -> list[str]:
    """Refuse a table of which something is lacking; notes that say what, where a partial one was asked for."""
    said = [f"{what}: {some(names)}" for what, names in problems.items() if names]
    if said and not options.partial:
        raise IncompleteTable(
            f"the table {where} is not whole; {'; '.join(said)}. Without --render-only what is missing is run; "
            "--partial shows what is there"
        )
    if not anything:
        raise IncompleteTable("; ".join([f"there is no finished run of {where}", *said]))
    return [f"PARTIAL: {problem}." for problem in said]


def span(numbers: Sequence[int]) -> str:
    """`3`, or `2 to 3` where they differ."""
    least, most = min(numbers), max(numbers)
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


# Formats


@dataclass(frozen=True)
class Table:
    """What a table shows.

    title, notes    the caption: what the figures are, then a sentence each on what a reader must know
    header, rows    for people: what all rows share is in the title, ours beside the paper's
    columns, values for programs: the columns of the CSV file
    """

    name: str
    title: str
    notes: list[str]
    header: list[str]
    rows: list[list[str]]
    columns: list[str]
    values: list[list[str]]

    @property
    def caption(self) -> str:
        return " ".join([self.title, *self.notes])


def terminal(table: Table) -> str:
    """With lines between the columns, as wide as it needs to be."""
    from rich import box
    from rich.console import Console
    from rich.table import Table as Drawn

    drawn = Drawn(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, header_style="bold")
    for name, texts in zip(table.header, zip(*table.rows)):
        stacked = "\n".join(name.rsplit(" ", 1))  # "loss ours" as two lines: numbers are narrower than their names
        drawn.add_column(stacked, justify="right" if any(map(_is_number, texts)) else "left", no_wrap=True)
    for row in table.rows:
        drawn.add_row(*row)
    wide = Console(file=io.StringIO(), width=500, force_terminal=Console().is_terminal)
    wide.print(drawn)
    assert isinstance(wide.file, io.StringIO)
    lines = [line.rstrip() for line in wide.file.getvalue().splitlines()]
    return "\n".join([table.title, "\n".join(lines).strip("\n"), *table.notes]) + "\n"


def markdown(table: Table) -> str:
    """A pipe table below its title, the notes below it."""
    right = [any(map(_is_number, texts)) for texts in zip(*table.rows)]
    rule = ["--:" if to_the_right else "---" for to_the_right in right]
    lines = ["| " + " | ".join(row) + " |" for row in (table.header, rule, *table.rows)]
    notes = [f"- {note}" for note in table.notes]
    return "\n".join([f"**{table.title}**", "", *lines, *([""] if notes else []), *notes]) + "\n"


def as_csv(table: Table) -> str:
    """The columns for programs; nothing but rows, so the caption is not in it."""
    return lines_as_csv([dict(zip(table.columns, row)) for row in table.values], table.columns)


def lines_as_csv(lines: Sequence[Line], columns: Sequence[str] = ()) -> str:
    """Lines with these columns, or with those of the first; numbers in full."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns or list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def latex(table: Table) -> str:
    """A table environment (with booktabs' rules)."""
    columns = "".join("r" if any(map(_is_number, texts)) else "l" for texts in zip(*table.rows))
    rows = [" & ".join(map(_escape, row)) + r" \\" for row in (table.header, *table.rows)]
    return "\n".join(
        [
            r"\begin{table}",
            rf"\caption{{{_escape(table.caption)}}}",
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            rows[0],
            r"\midrule",
            *rows[1:],
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


FORMATS: dict[str, Callable[[Table], str]] = {
    "terminal": terminal,
    "markdown": markdown,
    "csv": as_csv,
    "latex": latex,
}

LATEX = {"\\": r"\textbackslash{}", "±": r"$\pm$", "²": r"$^2$", "<": "$<$", ">": "$>$", "~": r"\textasciitilde{}"}
LATEX |= {character: "\\" + character for character in "&%$#_{}"}


def _escape(text: str) -> str:
    return "".join(LATEX.get(character, character) for character in text)


def _is_number(text: str) -> bool:
    return text[:1].isdigit() or text[:2] in ("+0", "-0") or (text[:1] in "+-" and text[1:2].isdigit())
