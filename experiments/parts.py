"""What a figure is made of, and where its runs are looked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.plots import Look
from experiments.runs import Record, Records
from experiments.specs import QUICK, Cell, Options
from topovq.tokenizer.training import TrainConfig

FROM_RECORDS = ("initialization", "perplexity")  # the others, but for `neighborhoods`, are drawn from models
TRACED = ("early", "utilization")  # or from records of runs with `trace_every`
QUICK_SIZE = 64  # of the images of the quick VQ-VAE-2
MOST_SEEDS = 32  # looked for where no number is asked for


@dataclass(frozen=True)
class Part:
    """One method or setting of a figure: the runs of a cell, which differ in the seed."""

    look: Look
    cell: Cell
    second: bool = False  # not the first seeds but as many after them: the paper's second run
    two_levels: bool = False  # a VQ-VAE-2 where the cell has a VQ-VAE

    def seeds(self, number: int) -> range:
        return range(number, 2 * number) if self.second else range(number)

    def config(
        self, seed: int, steps: int | None = None, data_path: Path | None = None, batch_size: int | None = None
    ) -> TrainConfig:
        config = self.cell.config(seed, steps, data_path, batch_size)
        if not self.two_levels:
            return config
        options = {name: value for name, value in config.model_options.items() if name != "stride"}
        return replace(config, model="vqvae2", image_size=QUICK_SIZE, model_options=options | {"strides": [4, 2]})


@dataclass(frozen=True)
class Search:
    """What a figure is asked to be, and the records in which its runs are looked for."""

    name: str
    options: Options
    folders: Sequence[Path]
    records: Records

    def number(self, part: Part) -> int:
        """How many seeds the figure has: those asked for, else those there are of this part."""
        if self.options.seeds is not None:
            return self.options.seeds
        return sum(self.find(part, seed) is not None for seed in range(MOST_SEEDS))

    def runs(self, part: Part, number: int) -> list[Record]:
        """The runs of a part for so many seeds: all of them where a number was asked for, else at least one."""
        wanted = part.seeds(max(1, number))
        found = {seed: self.find(part, seed) for seed in wanted}
        lacking = [seed for seed, run in found.items() if run is None]
        enough = not lacking if self.options.seeds is not None else len(lacking) < len(wanted) or part.second
        partial = self.options.partial and self.name in FROM_RECORDS  # a picture of one of two models would be none
        if not enough and not partial:
            raise FileNotFoundError(self.missing(part, lacking[0]))
        return [run for run in found.values() if run is not None]

    def of_one_seed(self, parts: Sequence[Part]) -> tuple[int, dict[str, Record]]:
        """The first seed of which every part has its run, and these runs by their labels."""
        for seed in range(MOST_SEEDS):
            found = {part.look.label: run for part in parts if (run := self.find(part, seed)) is not None}
            if len(found) == len(parts):
                return seed, found
        lacking = next(part for part in parts if self.find(part, 0) is None)
        raise FileNotFoundError(self.missing(lacking, 0))

    def _config(self, part: Part, seed: int) -> TrainConfig:
        return part.config(seed, self.options.steps, batch_size=self.options.batch_size)

    def find(self, part: Part, seed: int) -> Record | None:
        return self.records.finished(self._config(part, seed))

    def missing(self, part: Part, seed: int) -> str:
        config, options = self._config(part, seed), self.options
        near = self.records.instead(config)
        command = ["python -m experiments", self.name]
        command += ["--quick"] if options.dataset == QUICK else ["--dataset", options.dataset]
        asked = {"--steps": options.steps, "--batch-size": options.batch_size, "--seeds": options.seeds}
        for option, value in asked.items():
            command += [option, str(value)] if value is not None else []
        return (
            f"the figure {self.name!r} needs the run {config.run_id} ({part.cell.name}, seed {seed}, {config.steps:,} "
            f"steps), which is not in {' or '.join(map(str, self.folders))}"
            + (f" ({near})" if near else "")
            + f"; `{' '.join(command)}` makes it"
        )
