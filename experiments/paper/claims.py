"""The paper's claims, each with our figure and a verdict that follows from it by a rule (claim_list.py).

A verdict is `same`, `differs` or `cannot tell`, which it always is of one seed. Of two means one is the greater if they
are more than two standard errors apart. Where runs are missing our figure is NOT_RUN. Tables beside the claims:
    speedup     steps to within 10% and 20%, KSOM's against EMA-VQ's, with a 95% interval by resampling seeds
    early       EMA-VQ with counts from 0: how many runs fail
    precision   the cells of `main` in float32
    smoothness  the order of maps by tau, from what was measured of models (measured.py)
    moved       PSNR after tokens were moved on the map and by their numbers
    beyond      the softmax KSOM and neural gas
    levels      what each level of a model uses, at 256x256
    blocks      KSOM `hard` with our blocks, and with what the authors' code does otherwise
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from experiments.paper.groups import EARLY_SEEDS, EMA, GAS, HARD, SHORT, SOFT, ZERO, smooth_cells
from experiments.paper.measured import read_failed, read_measured
from experiments.paper.table import Row, rows_of, settled
from experiments.records import Record, Records, resolved
from experiments.specs import SEEDS, Blocks, Cell, Dataset, Options, cells
from experiments.tables import Line, Spread, facts, mean_and_std_of

NOT_RUN = "not run yet"
SAME, DIFFERS, UNKNOWN = "same", "differs", "cannot tell"
RESAMPLES = 10_000
ERRORS = 2.0  # standard errors that two means must be apart
FAILED = 1.5  # times the loss of counts from 1: a run that ends above has failed
LARGE: tuple[Dataset, ...] = ("faces", "imagenet")
FACES = ("celebahq", "afhq")  # the sets of faces, whose losses' mean is the loss
LENGTHS: dict[Blocks, dict[str, Any]] = {"plain": SHORT, "paper": {}}  # our short runs, and the paper's
MOST_SEEDS = 5
LEVEL_KEYS = ("method", "neighborhood", "count_init", "update_empty")
Answer = tuple[str, int, str]  # our figure, of how many runs a cell, the verdict


@dataclass(frozen=True)
class Claim:
    section: str
    claim: str
    place: str
    paper: str
    answer: Callable[[Evidence], Answer]
    link: str


class Evidence:
    """What records and measures tell."""

    def __init__(self, folder: Path, records: Records) -> None:
        self.folder, self.records = folder, records
        self.tables: dict[tuple[str, Blocks | None], list[Row]] = {}

    @cached_property
    def measured(self) -> dict[str, Line]:
        return read_measured([self.folder])

    def rows(self, table: str, blocks: Blocks | None = None, **key: str) -> list[Row]:
        """The rows of a table of CIFAR-10 with these key columns, as the table has them, or with these blocks."""
        if (table, blocks) not in self.tables:
            options = settled(table, Options("cifar10", render_only=True, blocks=blocks), self.records)
            self.tables[table, blocks] = rows_of(table, replace(options, partial=True), self.records)[0]
        found = [row for row in self.tables[table, blocks] if row.runs]
        return [row for row in found if all(getattr(row.cell, name) == key[name] for name in key)]

    def row(self, table: str, **key: str) -> Row:
        (found,) = self.rows(table, None, **key)
        return found

    def runs(self, cell: Cell, most: int, **length: Any) -> list[Record]:
        """The runs of a cell that are there."""
        return self.records.all_finished(cell.config(seed, **length) for seed in range(most))

    def lost(self, cell: Cell) -> int:
        """How many of the early runs of a cell ended in NaN."""
        failed = read_failed([self.folder])
        return sum(resolved(cell.config(seed)).run_id in failed for seed in range(EARLY_SEEDS))

    def of_models(self, cell: Cell, most: int = 10) -> list[Line]:
        """What was measured of a cell's models."""
        return [self.measured[run.config["id"]] for run in self.runs(cell, most) if run.config["id"] in self.measured]


def loss(row: Row) -> Spread:
    found = row.ours()["loss"]
    assert found is not None
    return found


def steps(row: Row, ratio: float) -> list[float]:
    return [run.steps_to(ratio) / 1e3 for run in row.runs]


def greater(more: Sequence[float], less: Sequence[float]) -> str:
    """The verdict on a claim that the first have the greater mean."""
    errors = [Spread.of(values) for values in (more, less)]
    assert errors[0] is not None
    assert errors[1] is not None
    apart = errors[0].standard_errors_from(errors[1])
    return UNKNOWN if apart is None or abs(apart) <= ERRORS else SAME if apart > 0 else DIFFERS


def joined(verdicts: Iterable[str]) -> str:
    """The verdict on a claim of several parts."""
    found = set(verdicts)
    return DIFFERS if DIFFERS in found else UNKNOWN if UNKNOWN in found else SAME


def perplexities(run: Record) -> list[float]:
    """Perplexities over a training: of training batches where the record has them, else of the validation images."""
    traced = [value for line in run.traces() for value in line["perplexities"][0]]
    return traced or [line["perplexity"] for line in run.validations()]


def speedup(ema: list[float], ksom: list[float]) -> tuple[float, float, float]:
    """(Share of EMA-VQ's steps that KSOM saves, and the 95% interval of that), in percent; seeds are resampled."""
    pick = np.random.default_rng(0)
    means = [pick.choice(np.array(values), (RESAMPLES, len(values))).mean(1) for values in (ema, ksom)]
    low, high = np.quantile(100 * (1 - means[1] / means[0]), [0.025, 0.975])
    return 100 * (1 - fmean(ksom) / fmean(ema)), float(low), float(high)


def speedups(evidence: Evidence) -> list[Line]:
    ema = evidence.row("main", method="ema")
    lines = []
    for row in evidence.rows("main", method="ksom"):
        for percent in (10, 20):
            ours = [steps(each, 1 + percent / 100) for each in (ema, row)]
            saved, low, high = speedup(*ours)
            lines.append({
                "neighborhood": row.cell.neighborhood, "within_percent": percent, "blocks": row.cell.blocks,
                "n": min(ema.n, row.n), "ema_steps_k": round(fmean(ours[0]), 2),
                "ksom_steps_k": round(fmean(ours[1]), 2), "saved_percent": round(saved, 1),
                "low_percent": round(low, 1), "high_percent": round(high, 1), **facts([*ema.runs, *row.runs]),
            })  # fmt: skip
    return lines


def early(evidence: Evidence) -> list[Line]:
    """EMA-VQ with both initial counts: the paper's blocks where every seed of a series is there, else plain ones."""
    tried = len(evidence.runs(ZERO, EARLY_SEEDS)) + evidence.lost(ZERO)
    paper = tried >= EARLY_SEEDS and bool(evidence.runs(EMA, EARLY_SEEDS))
    cells = [cell if paper else replace(cell, blocks="plain") for cell in (EMA, ZERO)]
    found = [evidence.runs(cell, EARLY_SEEDS) for cell in cells]
    usual = fmean(run.best for run in found[0])
    lines = []
    for cell, runs in zip(cells, found):
        lines.append({
            "count_init": cell.count_init, "blocks": cell.blocks, "n": len(runs) + evidence.lost(cell),
            "failed": sum(run.best > FAILED * usual for run in runs) + evidence.lost(cell),
            **mean_and_std_of("loss", [1e3 * run.best for run in runs], 2),
            "worst": round(1e3 * max(run.best for run in runs), 2), **facts(runs),
        })  # fmt: skip
    return lines


def precision(evidence: Evidence) -> list[Line]:
    """The cells of `main` in float32 beside the same in bf16."""
    lines = []
    for cell in (EMA, HARD, replace(HARD, neighborhood="gaussian")):
        float32 = evidence.runs(replace(cell, precision="fp32"), 3)
        bf16 = evidence.runs(cell, 10)
        if float32 and bf16:
            line: Line = {"method": cell.method, "neighborhood": cell.neighborhood, "n": len(float32)}
            for name, runs in (("bf16", bf16), ("float32", float32)):
                line |= mean_and_std_of(name, [1e3 * run.best for run in runs], 2)
            lines.append({**line, **facts([*float32, *bf16])})
    return lines


def topographic_errors(evidence: Evidence, cell: Cell) -> list[float]:
    return [found["topography"][0]["topographic_error"] for found in evidence.of_models(cell)]


def smoothness(evidence: Evidence) -> list[Line]:
    lines = []
    for cell in smooth_cells(["hard", "gaussian", "exponential"]):
        orders = [found["topography"][0] for found in evidence.of_models(cell)]
        if orders:
            line: Line = {"neighborhood": cell.neighborhood, "grid_dim": cell.grid_dim, "tau": cell.tau}
            line["n"] = len(orders)
            for name in ("topographic_error", "topographic_product", "neighbor_ratio"):
                line |= mean_and_std_of(name, [order[name] for order in orders], 4)
            lines.append({**line, **facts(evidence.runs(cell, 10))})
    return lines


def moved(evidence: Evidence) -> list[Line]:
    """Over the seeds: PSNR to the unmoved reconstruction, by which way and how far tokens were moved."""
    lines = []
    for cell in (EMA, HARD):
        shifts = [score for found in evidence.of_models(cell) for score in found["shifts"]]
        for by, offset in dict.fromkeys((score["by"], abs(score["offset"])) for score in shifts):
            same = [s["to_reconstruction"] for s in shifts if (s["by"], abs(s["offset"])) == (by, offset)]
            n = len(evidence.of_models(cell))
            lines.append({"method": cell.method, "by": by, "places": offset, "n": n, "psnr": round(fmean(same), 2)})
    return lines


def beyond(evidence: Evidence) -> list[Line]:
    """Rules that the paper names without a figure, beside its own."""
    lines = []
    for cell in (EMA, HARD, GAS, *SOFT):
        runs = evidence.runs(cell, 10)
        if runs:
            name = cell.method if cell in SOFT else cell.neighborhood
            softmax = [1e3 * found["softmax"] for found in evidence.of_models(cell) if "softmax" in found]
            lines.append({
                "method": name, "n": len(runs), **mean_and_std_of("loss", [1e3 * run.best for run in runs], 2),
                "with_softmax": round(fmean(softmax), 2) if softmax else "",
                "perplexity": round(fmean(run.validations()[-1]["perplexity"] for run in runs), 1), **facts(runs),
            })  # fmt: skip
    return lines if {"none", "hard"} < {line["method"] for line in lines} else []


def authors_blocks(evidence: Evidence) -> list[Line]:
    """Our blocks, and what the authors' code does otherwise, one at a time, beside the same seeds as they are."""
    cell = replace(HARD, blocks="plain")
    others = {"residual blocks of the authors' code": HARD, "float32": replace(cell, precision="fp32")}
    lines = []
    for name, other in others.items():
        for seed in range(SEEDS["plain"]):
            run, usual = (evidence.records.finished(each.config(seed)) for each in (other, cell))
            if run is not None and usual is not None:
                found = {"loss": round(1e3 * run.best, 3), "loss_as_it_is": round(1e3 * usual.best, 3)}
                found |= {"steps20_k": run.steps_to(1.2) / 1e3, "steps20_k_as_it_is": usual.steps_to(1.2) / 1e3}
                lines.append({"change": name, "seed": seed, **found, **facts([run])})
    return lines


def levels(evidence: Evidence) -> list[Line]:
    """At 256x256: what each level of a model uses at the last step."""
    lines = []
    for dataset in LARGE:
        for blocks, length in LENGTHS.items():
            every = [cell for table in ("main", "robustness") for cell in cells(table, dataset, blocks=blocks)]
            named = {tuple(getattr(cell, name) for name in LEVEL_KEYS): cell for cell in every}
            named[("ride", "", "", "")] = Cell("main", dataset, "ride", blocks=blocks)
            for cell in named.values():
                lines += [line for run in evidence.runs(cell, MOST_SEEDS, **length) for line in _levels_of(cell, run)]
    return lines


def _levels_of(cell: Cell, run: Record) -> list[Line]:
    last = run.validations()[-1]
    known = {"dataset": cell.dataset, **{name: getattr(cell, name) for name in LEVEL_KEYS}}
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


def _of_sets(run: Record) -> Line:
    """The losses of the two sets of faces where their mean is lowest; of other data nothing."""
    best = min(run.validations(), key=lambda seen: seen["loss"])
    return {f"loss_{part}": round(1e3 * best[f"loss_{part}"], 3) if f"loss_{part}" in best else "" for part in FACES}


def answers(claims: Iterable[Claim], evidence: Evidence) -> Iterable[Line]:
    for claim in claims:
        ours, n, verdict = claim.answer(evidence)
        named = {"section": claim.section, "claim": claim.claim, "place": claim.place, "paper": claim.paper}
        yield {**named, "ours": ours, "seeds": n or "", "verdict": verdict if n != 1 else UNKNOWN, "link": claim.link}
