"""The directive `results`: a table of a page, drawn from its CSV file when the pages are built.

    ```{results} /results/main-cifar10.csv
    :where: method=ema,ksom; steps=30000
    :names: ema=EMA-VQ
    loss | {ours_loss_mean:.2f} ± {ours_loss_std:.2f}
    ```

A line is a column: its heading, and a format string over the CSV's columns, whose ` ± ` part is left out where a value
is empty. With `across` the rows that agree in the columns `by` become one, whose values go by those of the columns
`across`: `{ms[ema]:.2f}`; rows that agree in both are averaged. `sort` names the columns that rows are ordered by.
The caption ends with n, hardware, torch and commit.
Between several formats of a column stands ` least `: the cell then shows the smallest of those that were measured.
Where the file does not exist yet, or no row of it is chosen, the text of `missing` stands in its place; columns that
nobody has measured yet are then left out. Without `missing` such a column is an error.
"""

from __future__ import annotations

import csv
import os
import re
from pathlib import Path
from statistics import fmean
from typing import Any

from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

MOST_ROWS = 10  # a longer table is for a program: link its file
# What the caption says, and the columns that may hold it
FACTS = {
    "n = {}": ("n",),
    "{}": ("hardware", "gpu", "cpu"),
    "torch {}": ("version_torch", "torch"),
    "commit {}": ("commit",),
}

WORDS = re.compile("^[^\\W\\d]|[a-z]{4}")  # in a column that is not of numbers, whose cells may be several lines
Row = dict[str, Any]


def read(path: str) -> list[Row]:
    """The rows of a file, numbers as numbers; empty values are left out."""
    with open(path, newline="") as file:
        return [{name: _value(name, text) for name, text in row.items() if text} for row in csv.DictReader(file)]


def _value(name: str, text: str) -> Any:
    try:
        return text if name in ("commit", "run") else int(text) if text.lstrip("-").isdigit() else float(text)
    except ValueError:
        return text


def pairs(text: str) -> dict[str, str]:
    """`a=b; c=d` as a dict."""
    found = dict(part.rsplit("=", 1) for part in text.split(";") if part.strip())
    return {name.strip(): value.strip() for name, value in found.items()}


def chosen(rows: list[Row], where: dict[str, str]) -> list[Row]:
    """The rows whose columns have one of the values, between commas; a comma inside a value is `\\,`."""
    known = dict.fromkeys(name for row in rows for name in row)
    for name, values in where.items():
        if name not in known:
            raise ValueError(f"no row has a column {name!r}; there are {', '.join(known) or 'no rows'}")
        kept = [value.strip().replace("\\,", ",") for value in re.split(r"(?<!\\),", values)]
        rows = [row for row in rows if str(row.get(name, "")) in kept]
    return rows


def merged(rows: list[Row], by: list[str], across: list[str]) -> list[Row]:
    """One row for all that agree in `by`; every other column is a dict by the value of `across`."""
    groups: dict[tuple[Any, ...], dict[str | int, list[Row]]] = {}
    for row in rows:
        key, at = tuple(row.get(name) for name in by), " ".join(str(row[name]) for name in across)
        groups.setdefault(key, {}).setdefault(int(at) if at.isdigit() else at, []).append(row)  # as in a format string
    made = []
    for key, group in groups.items():
        new: Row = {name: value for name, value in zip(by, key) if value is not None}
        for name in {name for same in group.values() for row in same for name in row} - set(by):
            found = {at: [row[name] for row in same if name in row] for at, same in group.items()}
            new[name] = {at: _mean(values) for at, values in found.items() if values}
        made.append(new)
    return made


def _mean(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 or isinstance(values[0], str) else fmean(values)


def ordered(rows: list[Row], by: list[str]) -> list[Row]:
    """The rows by the values of these columns, as they come where there are none."""
    for name in by:
        if any(name not in row for row in rows):
            raise ValueError(f"rows cannot be sorted by {name!r}, which some of them do not have")
    return sorted(rows, key=lambda row: [row[name] for name in by])


def cell(form: str, row: Row, names: dict[str, str]) -> str:
    if " least " in form:
        measured = [text for part in form.split(" least ") if (text := cell(part.strip(), row, names))]
        return min(measured, key=lambda text: float(text.split()[0].replace(",", "")), default="")
    parts = []
    for part in form.split(" ± "):
        try:
            parts.append(part.format(**row))
        except (KeyError, TypeError):  # nothing was measured
            break
    text = re.sub(r"(?<=\d)\.(?!\w)", "", " ± ".join(parts))  # "378." of #.3g
    return names.get(text, text)


def measured(headings: list[str], body: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """The columns in which something is."""
    kept = [at for at, texts in enumerate(zip(*body)) if any(texts)]
    return [headings[at] for at in kept], [[row[at] for at in kept] for row in body]


def facts(rows: list[Row]) -> str:
    said = []
    for form, columns in FACTS.items():
        name = next((name for name in columns if any(name in row for row in rows)), None)
        if name is not None:
            told = [str(row[name]) for row in rows if row.get(name)]
            values = [part[:7] for text in told for part in text.split()] if name == "commit" else told
            said.append(form.format(", ".join(dict.fromkeys(values))))
    return "; ".join(said)


class Results(SphinxDirective):
    required_arguments = 1
    has_content = True
    options_known = ("caption", "where", "names", "by", "across", "sort")
    option_spec = dict.fromkeys(options_known, directives.unchanged_required)
    option_spec["missing"] = directives.unchanged  # may be empty: what stands above says it

    def run(self) -> list[nodes.Node]:
        _, path = self.env.relfn2path(self.arguments[0])
        self.env.note_dependency(path)
        option, missing = self.options.get, self.options.get("missing")
        if missing is not None and not Path(path).exists():
            return self._parsed([missing])
        try:
            rows = chosen(read(path), pairs(option("where", "")))
            rows = [row for row in rows if row.get("n") != 0] if missing is not None else rows
            if missing is not None and not rows:
                return self._parsed([missing])
            columns = [[part.strip() for part in line.split("|", 1)] for line in self.content if line.strip()]
            shown = merged(rows, option("by", "").split(), option("across").split()) if option("across") else rows
            shown = ordered(shown, option("sort", "").split())
            if not 0 < len(shown) <= MOST_ROWS:
                raise ValueError(f"{len(shown)} rows are left; a table on a page has 1 to {MOST_ROWS}: change `where`")
            names = pairs(option("names", ""))
            body = [[cell(form, row, names) for _, form in columns] for row in shown]
            headings, body = measured([heading for heading, _ in columns], body)
            if (empty := {heading for heading, _ in columns} - set(headings)) and missing is None:
                raise ValueError(f"nothing is in the columns {', '.join(empty)}; there are {', '.join(rows[0])}")
        except (OSError, ValueError) as error:
            raise self.error(f"{self.arguments[0]}: {error}") from error
        sides = ["---" if any(WORDS.search(text) for text in texts) else "--:" for texts in zip(*body)]
        link = os.path.relpath(path, Path(self.env.doc2path(self.env.docname)).parent)
        caption = f"{option('caption', '')} ({facts(rows)}; [CSV]({link}))".replace("(; ", "(")
        lines = [headings, sides, *body]
        text = [*(f"| {' | '.join(line)} |" for line in lines), "", caption.strip()]
        return self._parsed(text)

    def _parsed(self, text: list[str]) -> list[nodes.Node]:
        node = nodes.container(classes=["results"])
        self.state.nested_parse(StringList(text, self.env.docname), self.content_offset, node)
        return [node]


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("results", Results)
    return {"parallel_read_safe": True}
