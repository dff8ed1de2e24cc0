"""Numbers and lists in words, for the page of results."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.results_made import Made
from experiments.library import Found
from experiments.rows import Row


def numbers(given: Sequence[float], digits: int, sign: str = "") -> str:
    """`3`, or `2 to 3` where they differ as written."""
    low, high = (f"{value:{sign}.{digits}f}" for value in (min(given), max(given)))
    return low if low == high else f"{low} to {high}"


def values(found: Iterable[Found], name: str, form: str = "") -> str:
    return listed(dict.fromkeys(format(run.config[name], form) for run in found))


def listed(words: Iterable[str]) -> str:
    every = list(words)
    return every[0] if len(every) == 1 else f"{', '.join(every[:-1])} and {every[-1]}"


def verdict(holds: bool) -> str:
    return "the same" if holds else "**not so**"


def anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


def seeds_of(rows: Sequence[dict[str, str]]) -> str:
    number = len({row["seed"] for row in rows})
    return "One seed" if number == 1 else f"Means of {number} seeds"


def best_loss(run: Found) -> float:
    """In 1e-3, as the tables have it."""
    return 1e3 * min(line["loss"] for line in run.validations())


def kind(row: Row) -> tuple[str, str]:
    return row.cell.method, row.cell.neighborhood


def mean(lines: Sequence[dict[str, Any]], name: str) -> float:
    return statistics.fmean(line[name] for line in lines)


def need(made: Made | None) -> Made:
    if made is None:
        raise ValueError(
            "the records lack a table that the page speaks of: sensitivity, main or robustness on CIFAR-10"
        )
    return made
