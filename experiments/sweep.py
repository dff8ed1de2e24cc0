"""Runs of a study: what is missing is run, what was cut off is resumed, what is done is skipped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.library import Library, resolved
from topovq.tokenizer.training import Interrupted, RunResult, TrainConfig, train_all


def folder_of(config: TrainConfig, runs: Path) -> Path:
    """Where a study's run lives: RUNS/ID."""
    return runs / resolved(config).run_id


def in_folders(configs: Iterable[TrainConfig], runs: Path) -> list[TrainConfig]:
    """The runs, each once, with their folders, to be resumed where they were cut off."""
    placed = {folder_of(config, runs): config for config in configs}
    return [replace(config, out=folder, resume=True) for folder, config in placed.items()]


def missing(configs: Iterable[TrainConfig], library: Library) -> list[TrainConfig]:
    """Those without a finished record."""
    return [config for config in configs if library.finished(config) is None]


def run_all(
    configs: Sequence[TrainConfig], runs: Path, *, jobs: int | None = None, quiet: bool = False, source: Any = None
) -> list[RunResult]:
    """Train those that RUNS does not hold finished, several at once; after a stop, the same call goes on."""
    try:
        return train_all(in_folders(configs, runs), jobs=jobs, quiet=quiet, source=source)
    except Interrupted as stopped:
        raise Interrupted(
            stopped.exit_code - 128, f"stopped, with checkpoints in {runs}: the same command continues"
        ) from stopped
