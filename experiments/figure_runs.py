"""The runs of a figure: found by their configuration, or missed by name; their models and their images."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.figure_parts import Part
from experiments.library import Found, Library
from experiments.rows import mixtures, some
from topovq.distributed import pick_device
from topovq.tokenizer.data import Source
from topovq.tokenizer.models import Tokenizer
from topovq.tokenizer.training import load_run, open_data
from topovq.view.report import with_channels

MOST_SEEDS = 32  # looked for where no number is asked for


@dataclass(frozen=True)
class Search:
    """What a figure is asked to be, and the records in which its runs are looked for."""

    name: str
    dataset: str
    steps: int | None
    seeds: int | None
    batch_size: int | None
    quick: bool
    partial: bool
    library: Library
    where: str

    def number(self, part: Part) -> int:
        """How many seeds the figure has: those asked for, else those there are of this part."""
        if self.seeds is not None:
            return self.seeds
        return sum(self._find(part, seed) is not None for seed in range(MOST_SEEDS))

    def runs(self, part: Part, number: int) -> list[Found]:
        """The runs of a part for so many seeds: all of them where a number was asked for, else at least one."""
        wanted = part.seeds(max(1, number))
        found = {seed: self._find(part, seed) for seed in wanted}
        lacking = [seed for seed, run in found.items() if run is None]
        enough = not lacking if self.seeds is not None else len(lacking) < len(wanted) or part.second
        if not enough and not self.partial:
            raise FileNotFoundError(self.missing(part, lacking[0]))
        return [run for run in found.values() if run is not None]

    def of_one_seed(self, parts: Sequence[Part]) -> tuple[int, dict[str, Found]]:
        """The first seed of which every part has its run, and these runs by their labels."""
        for seed in range(MOST_SEEDS):
            found = {part.look.label: run for part in parts if (run := self._find(part, seed)) is not None}
            if len(found) == len(parts):
                return seed, found
        lacking = next(part for part in parts if self._find(part, 0) is None)
        raise FileNotFoundError(self.missing(lacking, 0))

    def _find(self, part: Part, seed: int) -> Found | None:
        return self.library.finished(part.config(seed, self.steps, batch_size=self.batch_size))

    def missing(self, part: Part, seed: int) -> str:
        config = part.config(seed, self.steps, batch_size=self.batch_size)
        near = self.library.instead(config)
        command = ["topovq reproduce", self.name, *(["--quick"] if self.quick else ["--dataset", self.dataset])]
        options = {"--steps": self.steps, "--batch-size": self.batch_size, "--seeds": self.seeds}
        for option, value in options.items():
            command += [option, str(value)] if value is not None else []
        return (
            f"the figure {self.name!r} needs the run {config.run_id} ({part.cell.name}, seed {seed}, {config.steps:,} "
            f"steps), which is not in {self.where}"
            + (f" ({near})" if near else "")
            + f"; `{' '.join(command)}` makes it"
        )


@dataclass(frozen=True)
class Images:
    """Where a figure's images are from."""

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


def check_alike(runs: Iterable[Found]) -> None:
    """Refuse runs whose data sets were not the same: no configuration speaks of what lay in a folder."""
    mixed = mixtures(runs)
    if mixed:
        raise ValueError(f"these runs are not one experiment: {some(mixed)}")


def load(run: Found) -> Tokenizer:
    """The model of a run, on the GPU where there is one."""
    return load_run(run.path.parent).to(pick_device("auto"))
