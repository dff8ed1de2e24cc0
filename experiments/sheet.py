"""A table as text, and its formats: for the terminal, markdown, CSV, LaTeX."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Sheet:
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


def terminal(sheet: Sheet, console: Console | None = None) -> str:
    """With lines between the columns, as wide as it needs to be."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, header_style="bold")
    for name, texts in zip(sheet.header, zip(*sheet.rows)):
        stacked = "\n".join(name.rsplit(" ", 1))  # "loss ours" as two lines: numbers are narrower than their names
        table.add_column(stacked, justify="right" if any(map(_is_number, texts)) else "left", no_wrap=True)
    for row in sheet.rows:
        table.add_row(*row)
    console = console or Console()
    wide = Console(file=io.StringIO(), width=500, force_terminal=console.is_terminal)
    wide.print(table)
    assert isinstance(wide.file, io.StringIO)
    lines = [line.rstrip() for line in wide.file.getvalue().splitlines()]
    return "\n".join([sheet.title, "\n".join(lines).strip("\n"), *sheet.notes]) + "\n"


def markdown(sheet: Sheet) -> str:
    """A pipe table below its title, the notes below it."""
    right = [any(map(_is_number, texts)) for texts in zip(*sheet.rows)]
    rule = ["--:" if to_the_right else "---" for to_the_right in right]
    lines = ["| " + " | ".join(row) + " |" for row in (sheet.header, rule, *sheet.rows)]
    notes = [f"- {note}" for note in sheet.notes]
    return "\n".join([f"**{sheet.title}**", "", *lines, *([""] if notes else []), *notes]) + "\n"


def as_csv(sheet: Sheet) -> str:
    """The columns for programs; nothing but rows, so the caption is not in it."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([sheet.columns, *sheet.values])
    return text.getvalue()


def latex(sheet: Sheet) -> str:
    """A table environment (with booktabs' rules)."""
    columns = "".join("r" if any(map(_is_number, texts)) else "l" for texts in zip(*sheet.rows))
    rows = [" & ".join(map(_escape, row)) + r" \\" for row in (sheet.header, *sheet.rows)]
    return "\n".join(
        [
            r"\begin{table}",
            rf"\caption{{{_escape(sheet.caption)}}}",
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


FORMATS: dict[str, Callable[[Sheet], str]] = {
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
