"""Runs: which of them are missing, those of the trainer as one sweep, and their models where they lie."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.records import AnyCell, Facts, Record, Records, resolved
from topovq.distributed import pick_device
from topovq.tokenizer.data import Source
from topovq.tokenizer.models import Tokenizer
from topovq.tokenizer.training import Interrupted, RunResult, TrainConfig, load_run, open_data, train_all
from topovq.view.report import with_channels


def missing(configs: Iterable[TrainConfig], records: Records) -> list[TrainConfig]:
    """Those without a finished record."""
    return [config for config in configs if records.finished(config) is None]


def say_what_is_left(needed: int, left: int, quick: bool, say: Callable[[str], object]) -> None:
    """How many runs are needed, how many of them there are, and a warning where the rest would take long."""
    say(f"{needed} runs are needed; {needed - left} of them are done already")
    if left and not quick and not torch.cuda.is_available():
        say("there is no GPU here: this takes hours a run (--quick makes a small version in minutes)")


def missing_cells(
    needed: Sequence[AnyCell], found: dict[str, Facts], quick: bool, say: Callable[[str], object]
) -> list[AnyCell]:
    """The cells that no record tells of, which are told."""
    todo = [cell for cell in needed if cell.id not in found]
    say_what_is_left(len(needed), len(todo), quick, say)
    return todo


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
