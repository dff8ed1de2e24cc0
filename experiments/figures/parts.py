"""The figures as data: which runs each is drawn from, and where these are looked for (draw.py draws them).

Curves are drawn from records alone, wherever they lie; pictures and measures need the models in the runs' folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.figures.curves import Look
from experiments.records import Record, Records
from experiments.specs import QUICK, SCALE, SETTINGS, Blocks, Cell, Options, blocks_of, cells, once
from topovq.tokenizer.models import check_name
from topovq.tokenizer.training import TrainConfig
from topovq.view.pictures import COLORS

FIGURES = {
    "initialization": "validation loss for both initial counts, with and without updates of empty clusters",
    "perplexity": "perplexity over training, EMA-VQ and KSOM",
    "early": "training loss of the first 1,500 steps for both initial counts, EMA-VQ",
    "utilization": "perplexity of single training batches, EMA-VQ and KSOM",
    "neighborhoods": "the neighborhoods on a map and how they shrink (needs no runs)",
    "map": "the codebook map of a VQ-VAE, KSOM and EMA-VQ side by side",
    "maps2": "the codebook maps of a VQ-VAE-2, the other level held at one code",
    "shifts": "images decoded from tokens moved by -3 to 3 places, KSOM above EMA-VQ",
    "shifts-wide": "the same from -10 to 10",
    "shift-psnr": "measured: PSNR of images decoded from moved tokens over the offset",
    "topography": "measured: topographic error, and the distance of neighboring codes over that of any two",
    "scale-map": "of the study `scale`: a map of 16,384 codes, and how often each is used, KSOM and EMA-VQ",
}
MEASURED = ("shift-psnr", "topography")
BLUE, VIOLET, GRAY, YELLOW = "#3f6fb5", "#7a4fa3", "#8c8c8c", "#c9a227"
SCALE_MAP = "scale-map"
MAPPED = 16_384  # codes of the largest map that is drawn: 128 x 128
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


def figures_of(dataset: str) -> list[str]:
    """The paper's figures that can be drawn for a data set: its models have one level or two."""
    check_name("data set of the figures", dataset, SETTINGS)
    other = "map" if SETTINGS[dataset].model == "vqvae2" else "maps2"
    return [name for name in FIGURES if name != SCALE_MAP and (name != other or dataset == QUICK)]


def panels(name: str, dataset: str, blocks: Blocks | None = None) -> dict[str, list[Part]]:
    """The parts of a figure, panel by panel."""
    blocks = blocks_of("main", dataset, blocks)
    check_name("figure", name, FIGURES)
    if name == SCALE_MAP:
        known = {cell.codebook_size or 0 for cell in cells(SCALE, dataset)}
        size = max(size for size in known if size <= MAPPED)
        of_method = {cell.method: cell for cell in cells(SCALE, dataset, [size])}
        looks = {"ksom": "KSOM", "ema": "EMA-VQ"}
        return {"": [Part(Look(label, COLORS[label]), of_method[method]) for method, label in looks.items()]}
    if name not in figures_of(dataset):
        levels = "two levels of a VQ-VAE-2" if name == "maps2" else "one level of a VQ-VAE"
        has = ", ".join(other for other in SETTINGS if name in figures_of(other))
        raise ValueError(f"the figure {name!r} shows the {levels}: dataset={dataset!r} must be one of {has}")
    if name == "neighborhoods":
        return {}
    if name == "initialization":
        return {
            "EMA-VQ": _initializations(dataset, "ema", blocks),
            "KSOM, hard": _initializations(dataset, "ksom", blocks),
        }
    twins = [
        Part(Look("KSOM", COLORS["KSOM"]), _cell(dataset, "ksom", blocks)),
        Part(Look("EMA-VQ", COLORS["EMA-VQ"]), _cell(dataset, "ema", blocks)),
    ]
    if name == "early":
        zero = _cell(dataset, "ema", blocks, "0")
        return {"": [replace(twins[1], look=Look("N = 1", COLORS["EMA-VQ"])), Part(Look("N = 0", BLUE), zero)]}
    if name in ("perplexity", "utilization"):
        others = {"gaussian": BLUE, "exponential": VIOLET}
        ksom, ema = twins
        others_parts = [
            Part(Look(f"KSOM, {kind}", color), replace(ksom.cell, neighborhood=kind)) for kind, color in others.items()
        ]
        return {"": [ema, replace(ksom, look=Look("KSOM, hard", COLORS["KSOM"])), *others_parts]}
    return {"": [replace(part, two_levels=name == "maps2" and dataset == QUICK) for part in twins]}


def _initializations(dataset: str, method: str, blocks: Blocks) -> list[Part]:
    """The four ways to start and to update; EMA-VQ's with N = 0 a second time, since there seeds differ."""
    parts = [Part(Look("N = 1", COLORS["EMA-VQ" if method == "ema" else "KSOM"]), _cell(dataset, method, blocks))]
    zero = _cell(dataset, method, blocks, "0")
    if method == "ema":
        parts += [Part(Look("N = 0", BLUE), zero), Part(Look("N = 0, other seeds", VIOLET), zero, second=True)]
    else:
        parts.append(Part(Look("N = 0", BLUE), zero))
    for count, color in (("1", YELLOW), ("0", GRAY)):
        parts.append(
            Part(Look(f"N = {count}, empty not updated", color, "--"), _cell(dataset, method, blocks, count, "no"))
        )
    return parts


def _cell(dataset: str, method: str, blocks: Blocks, count_init: str = "1", update_empty: str = "yes") -> Cell:
    """EMA-VQ, or the paper's KSOM: hard, 2-D, tau 0.1."""
    place = ("none", "", "") if method == "ema" else ("hard", "2", "0.1")
    return Cell("main", dataset, method, *place, count_init, update_empty, blocks=blocks)


def needs(name: str, options: Options) -> list[TrainConfig]:
    """The runs that a figure is drawn from, each once: curves of as many seeds as the tables, pictures of one."""
    if name in TRACED:
        return []  # of paper/run.py
    number = options.seeds_of("main") if name in FROM_RECORDS else 1
    if name in MEASURED and options.seeds is not None:
        number = options.seeds
    return once(
        part.config(seed, options.steps, options.data_path, options.batch_size)
        for parts in panels(name, options.dataset, options.blocks).values()
        for part in parts
        for seed in part.seeds(number)
    )
