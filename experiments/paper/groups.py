"""The runs behind the paper's claims, in groups, those of most value first.

Groups overlap where tables share cells: a run that an earlier group has is done once. Within a group all cells of a
seed come before the next seed, so that a table can be drawn from what is there when the time is over.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from experiments.specs import Cell, Dataset, cells, once
from topovq.tokenizer.training import TrainConfig

TRACE_EVERY = 20  # steps, as in the authors' figures
EARLY_SEEDS = 20
TAUS = ("1", "0.1", "0.01")
SHORT: dict[str, Any] = {"steps": 10_000, "batch_size": 32}  # at 256x256, what was run before

CIFAR: dict[str, Any] = {"dataset": "cifar10", "blocks": "paper"}
EMA = Cell("main", method="ema", neighborhood="none", count_init="1", update_empty="yes", **CIFAR)
HARD = replace(EMA, method="ksom", neighborhood="hard", grid_dim="2", tau="0.1")
ZERO = replace(EMA, count_init="0")  # the common fault
GAS = replace(HARD, neighborhood="gas")
SOFT = [replace(HARD, method=name, neighborhood="hard") for name in ("soft-0.01", "soft-0.0001")]


@dataclass(frozen=True)
class Group:
    """Runs that one claim or table rests on."""

    name: str
    configs: list[TrainConfig]
    seconds: float
    """Of a GPU (an H200) for one run, about, where as many run at once as fill it."""
    measured: tuple[str, ...] = ()
    """What is measured of the models (measured.py)."""


def smooth_cells(kinds: Sequence[str]) -> list[Cell]:
    """Maps of one and two dimensions with every tau."""
    every = [(kind, grid_dim, tau) for kind in kinds for grid_dim in ("1", "2") for tau in TAUS]
    return [replace(HARD, neighborhood=kind, grid_dim=grid_dim, tau=tau) for kind, grid_dim, tau in every]


def groups() -> list[Group]:
    """Those on CIFAR-10."""
    robust = cells("robustness")
    ours = [cell for cell in robust if cell.neighborhood in ("gaussian", "exponential")]
    float32 = [replace(cell, precision="fp32") for cell in cells("main") if cell.neighborhood != "exponential"]
    return [
        Group("main", _runs(cells("main"), range(10)), 16, ("topography", "shifts")),
        Group("robustness", _runs([cell for cell in robust if cell not in ours], range(10)), 16),
        Group("sensitivity", _runs(cells("sensitivity"), range(10)), 16),
        Group("gradient", _runs(cells("gradient"), range(5)), 18),
        Group("ablation", _runs(cells("ablation"), range(5)), 16, ("topography",)),
        Group("float32", _runs(float32, range(3)), 30),
        Group("early", _runs([ZERO], range(EARLY_SEEDS)), 16),
        Group("smoothness", _runs(smooth_cells(["hard"]), range(5)), 16, ("topography",)),
        Group("soft", _runs(SOFT, range(3)), 60, ("topography",)),
        Group("gas", _runs([GAS], range(5)), 90, ("topography",)),
        Group("robustness-others", _runs(ours, range(10)), 16),
        Group("smoothness-others", _runs(smooth_cells(["gaussian", "exponential"]), range(5)), 16, ("topography",)),
    ]


def traced(cell: Cell) -> bool:
    """Whether the cell is among those whose course is kept, wherever it stands: records are to stay small."""
    kept = (*cells("main", cell.dataset), ZERO, GAS, *SOFT)
    return any(replace(cell, table=other.table) == other for other in kept)


def large_groups() -> list[Group]:
    """Those at 256x256: faces first, then ImageNet."""
    made = []

    def add(name: str, dataset: Dataset, chosen: Iterable[Cell], seeds: Iterable[int]) -> None:
        made.append(Group(f"{name}-{dataset}", _runs(chosen, seeds), 360, ("topography", "shifts")))

    def main(dataset: Dataset) -> list[Cell]:
        return [cell for cell in cells("main", dataset) if cell.neighborhood in ("none", "hard")]

    def worst(dataset: Dataset) -> list[Cell]:
        return [cell for cell in cells("robustness", dataset) if (cell.count_init, cell.update_empty) == ("0", "no")]

    sets: tuple[Dataset, ...] = ("faces", "imagenet")
    add("main", sets[0], main(sets[0]), range(2))
    add("main", sets[1], main(sets[1]), range(1))
    for dataset in sets:
        add("worst", dataset, worst(dataset), range(1))
    # Two of three KSOM runs on ImageNet lost the top level: the same again, and with the rule recommended now.
    lost = [cell for cell in cells("main", sets[1], blocks="plain") if cell.neighborhood == "exponential"]
    lost += [replace(cell, blocks="plain") for cell in worst(sets[1]) if cell.method == "ksom"]
    cure = [Cell("main", sets[1], "ride", blocks="plain")]
    made.append(Group("lost-imagenet", _runs([*lost, *cure], range(2), **SHORT), 45, ("topography",)))
    for dataset in sets:
        add("robustness", dataset, cells("robustness", dataset), range(1))
    for dataset in sets:
        add("more-seeds", dataset, main(dataset), range(3))
    return made


def _runs(chosen: Iterable[Cell], seeds: Iterable[int], **length: Any) -> list[TrainConfig]:
    chosen = list(chosen)
    every = [(cell, cell.config(seed, **length)) for seed in seeds for cell in chosen]
    return once(replace(config, trace_every=TRACE_EVERY) if traced(cell) else config for cell, config in every)
