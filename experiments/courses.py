"""Figures of single training batches, from the `trace` lines of records: the early loss, and codes in use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.parts import MOST_SEEDS, Part, Search
from experiments.plots import Curve, Look, draw_losses, draw_perplexities
from experiments.runs import Record

EARLY = 1_500  # steps of the early figure, as the authors'
LEVELS = {1: ("",), 2: ("top codes", "bottom codes")}


def draw_course(search: Search, parts: Sequence[Part]) -> Any:
    """The figure `early` or `utilization`, of every seed whose record has the course of its training."""
    found = {part.look: [run for run in _runs(search, part) if traces(run)] for part in parts}
    lacking = [look.label for look, runs in found.items() if not runs]
    if lacking:
        raise FileNotFoundError(
            f"the figure {search.name!r} needs records that tell of single batches, and there is none of "
            f"{', '.join(lacking)}; `python -m experiments.paper_run --only main early` trains such runs"
        )
    first = next(iter(found.values()))[0].config
    caption = f"VQ-VAE on {first['data']}, every {traces(first_run(found))[0]['every']} steps, one batch a point."
    if search.name == "early":
        curves = [course(look, runs, None, EARLY) for look, runs in found.items()]
        return draw_losses({"": curves}, "The first steps", f"{caption} N is the initial count.", "training")
    levels = LEVELS[len(traces(first_run(found))[0]["perplexities"])]
    panels = {name: [course(look, runs, i) for look, runs in found.items()] for i, name in enumerate(levels)}
    return draw_perplexities(panels, first["codebook_size"], "Codes in use in training batches", caption)


def first_run(found: dict[Look, list[Record]]) -> Record:
    return next(iter(found.values()))[0]


def _runs(search: Search, part: Part) -> list[Record]:
    return [run for seed in range(MOST_SEEDS) if (run := search.find(part, seed)) is not None]


def traces(run: Record) -> list[dict[str, Any]]:
    return [line for line in run.lines if line["event"] == "trace"]


def course(look: Look, runs: Sequence[Record], level: int | None, until: int | None = None) -> Curve:
    """The loss of single batches, or the perplexity of a level's codes in them."""
    rows, steps = [], np.array([])
    for run in runs:
        lines = traces(run)
        steps = np.concatenate([line["first"] + line["every"] * np.arange(len(line["losses"])) for line in lines])
        values = [
            value for line in lines for value in (line["losses"] if level is None else line["perplexities"][level])
        ]
        rows.append([float("nan") if value is None else value for value in values])
    kept = steps <= (until or steps.max())
    return Curve(look, steps[kept], np.array(rows)[:, kept])
