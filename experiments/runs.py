"""Runs and the records they leave: found by what was run and never by a name; what is missing is trained.

A record says what happened, of one run or of several; a finished run's folder also holds its model.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.specs import BLOCKS, QUICK, SCALE, Options, cells
from topovq.distributed import pick_device
from topovq.tokenizer.data import Source
from topovq.tokenizer.models import Tokenizer
from topovq.tokenizer.training import Interrupted, RunResult, TrainConfig, load_run, open_data, read_record, train_all
from topovq.tokenizer.training.config import IDENTITY, told_options
from topovq.view.report import with_channels

# Two runs that differ in one of these are different cells; in anything else, one cell run in two ways.
CELL = ("data", "model", "codebook_size", "quantizer", "quantizer_options", "seed")
# What a validation tells of the time since the last look, which a stop cuts short, and not of the model.
PASSING = ("seconds", "images_per_second", "drift", "drift_steps", "ms_per_step", "peak_mib", "train_loss")
ADDED = ("tokens", "tokens_0", "tokens_1", "train_tokens")  # which older records do not tell
FACTS = ("hardware", "commit")  # the last columns of a CSV
REPLACED = "replaced"
NAMED = 6  # problems that a message names before it only counts


def identity(config: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a configuration (resolved, or a record's first line) that identify the run.

    Where the data lay does not: what was found there is in the record's `source_` fields. A value that a record does
    not have is of a time when there was no choice: it is the default.
    """
    values = {}
    for field in fields(TrainConfig):
        if field.name in IDENTITY and field.name != "data_path":
            default = field.default_factory() if field.default_factory is not MISSING else field.default
            values[field.name] = config.get(field.name, default)
    return {**values, "quantizer_options": told_options(config)}


def resolved(config: TrainConfig) -> TrainConfig:
    """With everything filled in; specs name the precision, so that no device has a say in it."""
    return config.resolve("cuda" if config.precision == "bf16" else "cpu")


def _hash(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Record:
    """The record of one run: its configuration, then what happened."""

    path: Path
    lines: list[dict[str, Any]]

    @property
    def config(self) -> dict[str, Any]:
        return self.lines[0]

    @property
    def finished(self) -> bool:
        return self.lines[-1]["event"] == "final" and self.lines[-1]["steps"] == self.config["steps"]

    @property
    def reached(self) -> int:
        """The last step the record tells of."""
        return max((line["step"] for line in self.lines[1:]), default=0)

    def validations(self) -> list[dict[str, Any]]:
        """Its validations without what differs from one time to the next."""
        seen = [line for line in self.lines if line["event"] == "validation"]
        return [{name: value for name, value in line.items() if name not in (*PASSING, *ADDED)} for line in seen]

    def traces(self) -> list[dict[str, Any]]:
        """What it tells of single training batches, where that was asked for."""
        return [line for line in self.lines if line["event"] == "trace"]

    @property
    def losses(self) -> dict[int, float]:
        """Validated step -> loss; one that was not finite (null in the record) is infinite."""
        seen = self.validations()
        losses = {line["step"]: math.inf if line["loss"] is None else float(line["loss"]) for line in seen}
        if not any(map(math.isfinite, losses.values())):
            raise ValueError(f"{self.path}: none of the {len(seen)} validations has a finite loss")
        return losses

    @property
    def best(self) -> float:
        """The lowest loss."""
        return min(self.losses.values())

    def steps_to(self, ratio: float) -> int:
        """The first validated step whose loss is at most `ratio` times the best one (1.1: within 10%)."""
        return next(step for step, loss in self.losses.items() if loss <= ratio * self.best)


class Records:
    """All records in some folders, at any depth (`record.jsonl` of a run's folder, or `NAME.jsonl`).

    Those of runs that were done again, in a folder `replaced` of these, are left out.
    """

    def __init__(self, folders: Iterable[Path]) -> None:
        self.found: dict[str, list[Record]] = {}
        every = ((folder, path) for folder in folders for path in sorted(folder.rglob("*.jsonl")))
        paths = {path.resolve(): path for folder, path in every if REPLACED not in path.relative_to(folder).parts}
        for path in paths.values():
            if _is_record(path):
                record = Record(path, [_over_parts(line) for line in read_record(path)])
                self.found.setdefault(_hash(identity(record.config)), []).append(record)

    def __iter__(self) -> Iterator[Record]:
        return (record for same in self.found.values() for record in same)

    def finished(self, config: TrainConfig) -> Record | None:
        """The finished record of this run; two that disagree are refused."""
        done = [record for record in self._same(config) if record.finished]
        for other in done[1:]:
            if other.validations() != done[0].validations():
                raise ValueError(
                    f"{done[0].path} and {other.path} are records of one run ({resolved(config).run_id}) "
                    "but tell of different validations: move one of them away"
                )
        return done[0] if done else None

    def instead(self, config: TrainConfig) -> str | None:
        """For a run that is not there: what is there of it or nearly is it, in words."""
        cut_off = max(self._same(config), key=lambda record: record.reached, default=None)
        if cut_off is not None:
            return f"{cut_off.path} was cut off at step {cut_off.reached:,}"
        wanted = identity(resolved(config).as_dict())
        best: tuple[int, str] | None = None
        for record in self:
            theirs = identity(record.config)
            other = [name for name in wanted if theirs[name] != wanted[name]]
            if record.finished and not set(other) & set(CELL) and (best is None or len(other) < best[0]):
                values = ", ".join(f"{name}={theirs[name]!r} instead of {wanted[name]!r}" for name in other)
                best = len(other), f"{record.path} has {values}"
        return best[1] if best else None

    def _same(self, config: TrainConfig) -> list[Record]:
        return self.found.get(_hash(identity(resolved(config).as_dict())), [])


def _over_parts(line: dict[str, Any]) -> dict[str, Any]:
    """A line whose loss is the mean of those of the validation sets, where there are several, as the paper's is.

    The loss over the images of all sets together is `loss_pooled`.
    """
    parts = [value for name, value in line.items() if name.startswith("loss_") and value is not None]
    if line["event"] != "validation" or len(parts) < 2:
        return line
    return {**line, "loss": statistics.fmean(parts), "loss_pooled": line["loss"]}


def _is_record(path: Path) -> bool:
    """Whether the first line is a run's configuration; other files of JSON lines may lie about."""
    try:
        with open(path, "rb") as file:
            first = json.loads(file.readline())
    except ValueError:
        return False
    return isinstance(first, dict) and first.get("event") == "config" and "steps" in first


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


def as_text(numbers: Iterable[float | None]) -> list[str]:
    """Numbers as a CSV has them; empty where there is none."""
    return ["" if number is None else f"{number:.6g}" for number in numbers]


def facts(runs: Sequence[Record]) -> dict[str, str]:
    """What the runs were trained on, and with which commits: the columns FACTS."""
    return {
        name: " ".join(dict.fromkeys(str(run.config.get(name) or "")[:most] for run in runs))
        for name, most in zip(FACTS, (None, 7))
    }


def check_alike(runs: Iterable[Record]) -> None:
    """Refuse runs whose data sets were not the same: no configuration speaks of what lay in a folder."""
    mixed = mixtures(runs)
    if mixed:
        raise ValueError(f"these runs are not one experiment: {some(mixed)}")


def mixtures(runs: Iterable[Record]) -> list[str]:
    """What the runs' data sets, which no id speaks of, have different values of: images, normalization, size."""
    values: dict[str, dict[str, list[str]]] = {}
    for run in runs:
        for name, value in run.config.items():
            if name.startswith("source_") and name not in ("source_path", "source_skipped"):
                values.setdefault(name, {}).setdefault(str(value), []).append(run.path.as_posix())
    return [
        f"{name} is " + " and ".join(f"{value} in {len(paths)} ({paths[0]})" for value, paths in found.items())
        for name, found in values.items()
        if len(found) > 1
    ]


def some(problems: Sequence[str]) -> str:
    """The first few of them, and how many more there are."""
    more = len(problems) - NAMED
    return "; ".join(problems[:NAMED]) + (f"; and {more} more" if more > 0 else "")


# Which runs a table is drawn from where nothing is to be run: the paper's residual blocks, if records hold them whole.
# A table has runs of one kind of blocks, and its title names it. Where some seeds of the paper's blocks are still
# missing, it has as many as every cell has. A partial table has the blocks of which there are more runs.

LEAST_SEEDS = {"cifar10": 3}  # of every cell, that make a table of the paper's blocks; of other data sets one


def settled(table: str, options: Options, records: Records) -> Options:
    """The options with `blocks` filled in, and with the number of seeds that there are where none was asked for."""
    if options.blocks is not None or not options.render_only or table == SCALE or options.dataset == QUICK:
        return options
    for asked in (replace(options, blocks=blocks) for blocks in BLOCKS):
        found = min(number for number, pending in _numbers(table, asked, records) if not pending)
        wanted = asked.seeds_of(table)
        least = wanted if options.seeds is not None else LEAST_SEEDS.get(options.dataset, 1)
        if found >= least:
            return replace(asked, seeds=min(found, wanted))
    if not options.partial:
        return replace(options, blocks="paper")  # whose runs are what is missing
    return max((replace(options, blocks=blocks) for blocks in BLOCKS), key=lambda asked: _runs(table, asked, records))


def most_seeds(table: str, options: Options, records: Records) -> int:
    """As many seeds has the cell that has most of them."""
    return max(number for number, _ in _numbers(table, options, records))


def _runs(table: str, options: Options, records: Records) -> int:
    return sum(number for number, _ in _numbers(table, options, records))


def _numbers(table: str, options: Options, records: Records) -> Iterator[tuple[int, bool]]:
    """How many of the first seeds of a cell are there, and whether the table is whole without it."""
    for cell in cells(table, options.dataset, options.codebooks, options.blocks):
        of_seed = (cell.config(seed, options.steps, batch_size=options.batch_size) for seed in count())
        yield next(seed for seed, config in enumerate(of_seed) if records.finished(config) is None), cell.pending


# Training, and models


def missing(configs: Iterable[TrainConfig], records: Records) -> list[TrainConfig]:
    """Those without a finished record."""
    return [config for config in configs if records.finished(config) is None]


def run_all(configs: Sequence[TrainConfig], runs: Path, *, jobs: int | None = None) -> list[RunResult]:
    """Train those that RUNS does not hold finished, each in RUNS/ID, several at once; after a stop the same call goes
    on."""
    placed = {runs / resolved(config).run_id: config for config in configs}
    try:
        return train_all([replace(config, out=folder, resume=True) for folder, config in placed.items()], jobs=jobs)
    except Interrupted as stopped:
        raise Interrupted(
            stopped.exit_code - 128, f"stopped, with checkpoints in {runs}: the same command continues"
        ) from stopped


def load(run: Record) -> Tokenizer:
    """The model of a run, on the GPU where there is one."""
    return load_run(run.path.parent).to(pick_device("auto"))


@dataclass(frozen=True)
class Images:
    """Where a figure's images are from: `source`, or else the data set of the run, which may lie elsewhere now."""

    source: Source | None
    data_path: Path | None

    def take(self, number: int, model: Tokenizer, config: dict[str, Any]) -> Tensor:
        """The first `number` validation images, uint8 as the model takes them; of a data set's parts as many each."""
        if self.source is not None:
            return with_channels(_first(self.source, number), model)
        path = self.data_path or (Path(config["data_path"]) if config["data_path"] else None)
        with open_data(config["data"], path, model.image_size, 0) as source:
            return with_channels(_first(source, number), model)


def _first(source: Source, number: int) -> Tensor:
    sets = source.parts or (None,)
    shares = [(number + i) // len(sets) for i in range(len(sets))]
    taken = [next(iter(source.validation(share, part=part))) for share, part in zip(shares, sets) if share]
    return torch.cat(taken).clone()
