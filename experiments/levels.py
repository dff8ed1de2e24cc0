"""At 256x256, what each level of a model uses at the last step: rows of docs/results/levels.csv."""

from __future__ import annotations

from typing import Any

from experiments.paper import SHORT
from experiments.runs import Record, Records, facts
from experiments.specs import Blocks, Cell, Dataset, cells

LARGE: tuple[Dataset, ...] = ("celebahq_afhq", "imagenet")
FACES = ("celebahq", "afhq")  # the sets of faces, whose losses' mean is the loss
LENGTHS: dict[Blocks, dict[str, Any]] = {"plain": SHORT, "paper": {}}  # our short runs, and the paper's
MOST_SEEDS = 5
NAMES = ("method", "neighborhood", "count_init", "update_empty")


def levels(records: Records) -> list[dict[str, Any]]:
    lines = []
    for dataset in LARGE:
        for blocks, length in LENGTHS.items():
            every = [cell for table in ("main", "robustness") for cell in cells(table, dataset, blocks=blocks)]
            named = {tuple(getattr(cell, name) for name in NAMES): cell for cell in every}
            named[("ride", "", "", "")] = Cell("main", dataset, "ride", blocks=blocks)
            for cell in named.values():
                found = [records.finished(cell.config(seed, **length)) for seed in range(MOST_SEEDS)]
                lines += [line for run in found if run is not None for line in _lines(cell, run)]
    return lines


def _lines(cell: Cell, run: Record) -> list[dict[str, Any]]:
    last = run.validations()[-1]
    known = {"dataset": cell.dataset, **{name: getattr(cell, name) for name in NAMES}}
    known |= {"blocks": cell.blocks, "steps": run.config["steps"], "seed": run.config["seed"]}
    return [
        {
            **known,
            "best_loss": round(1e3 * run.best, 3),
            **_of_sets(run),
            "level": name,
            "used_percent": round(100 * last[f"usage_{level}"], 3),
            "perplexity": round(last[f"perplexity_{level}"], 1),
            **facts([run]),
        }
        for level, name in enumerate(("top", "bottom"))
    ]


def _of_sets(run: Record) -> dict[str, Any]:
    """The losses of the two sets of faces where their mean is lowest; of other data nothing."""
    best = min(run.validations(), key=lambda seen: seen["loss"])
    return {f"loss_{part}": round(1e3 * best[f"loss_{part}"], 3) if f"loss_{part}" in best else "" for part in FACES}
