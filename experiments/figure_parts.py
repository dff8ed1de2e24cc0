"""What the figures are made of, as data: their panels, and for each method or setting the runs that show it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from experiments.figure_curves import Look
from experiments.specs import QUICK, SCALE, SETTINGS, Cell, cells
from topovq.tokenizer.models import check_name
from topovq.tokenizer.training import TrainConfig
from topovq.view.pictures import COLORS

FIGURES = {
    "initialization": "validation loss for both initial counts, with and without updates of empty clusters",
    "perplexity": "perplexity over training, EMA-VQ and KSOM",
    "neighborhoods": "the neighborhoods on a map and how they shrink (needs no runs)",
    "map": "the codebook map of a VQ-VAE, KSOM and EMA-VQ side by side",
    "maps2": "the codebook maps of a VQ-VAE-2, the other level held at one code",
    "shifts": "images decoded from tokens moved by -3 to 3 places, KSOM above EMA-VQ",
    "shifts-wide": "the same from -10 to 10",
    "shift-psnr": "measured: PSNR of images decoded from moved tokens over the offset",
    "topography": "measured: topographic error, and the distance of neighboring codes over that of any two",
    "scale-map": "of the study `scale`: a map of 16,384 codes, and how often each is used, KSOM and EMA-VQ",
}
FROM_RECORDS = ("initialization", "perplexity")  # the others, but for `neighborhoods`, are drawn from models
MEASURED = ("shift-psnr", "topography")
BLUE, VIOLET, GRAY, YELLOW = "#3f6fb5", "#7a4fa3", "#8c8c8c", "#c9a227"
SCALE_MAP = "scale-map"
MAPPED = 16_384  # codes of the largest map that is drawn: 128 x 128
QUICK_SIZE = 64  # of the images of the quick VQ-VAE-2


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


def figures_of(dataset: str) -> list[str]:
    """The paper's figures that can be drawn for a data set: its models have one level or two."""
    check_name("data set of the figures", dataset, SETTINGS)
    other = "map" if SETTINGS[dataset].model == "vqvae2" else "maps2"
    return [name for name in FIGURES if name != SCALE_MAP and (name != other or dataset == QUICK)]


def panels(name: str, dataset: str) -> dict[str, list[Part]]:
    """The parts of a figure, panel by panel."""
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
        return {"EMA-VQ": _initializations(dataset, "ema"), "KSOM, hard": _initializations(dataset, "ksom")}
    twins = [
        Part(Look("KSOM", COLORS["KSOM"]), _cell(dataset, "ksom")),
        Part(Look("EMA-VQ", COLORS["EMA-VQ"]), _cell(dataset, "ema")),
    ]
    if name == "perplexity":
        others = {"gaussian": BLUE, "exponential": VIOLET}
        ksom, ema = twins
        others_parts = [
            Part(Look(f"KSOM, {kind}", color), replace(ksom.cell, neighborhood=kind)) for kind, color in others.items()
        ]
        return {"": [ema, replace(ksom, look=Look("KSOM, hard", COLORS["KSOM"])), *others_parts]}
    return {"": [replace(part, two_levels=name == "maps2" and dataset == QUICK) for part in twins]}


def _initializations(dataset: str, method: str) -> list[Part]:
    """The four ways to start and to update; EMA-VQ's with N = 0 a second time, since there seeds differ."""
    parts = [Part(Look("N = 1", COLORS["EMA-VQ" if method == "ema" else "KSOM"]), _cell(dataset, method))]
    zero = _cell(dataset, method, "0")
    if method == "ema":
        parts += [Part(Look("N = 0", BLUE), zero), Part(Look("N = 0, other seeds", VIOLET), zero, second=True)]
    else:
        parts.append(Part(Look("N = 0", BLUE), zero))
    for count, color in (("1", YELLOW), ("0", GRAY)):
        parts.append(Part(Look(f"N = {count}, empty not updated", color, "--"), _cell(dataset, method, count, "no")))
    return parts


def _cell(dataset: str, method: str, count_init: str = "1", update_empty: str = "yes") -> Cell:
    """EMA-VQ, or the paper's KSOM: hard, 2-D, tau 0.1."""
    place = ("none", "", "") if method == "ema" else ("hard", "2", "0.1")
    return Cell("main", dataset, method, *place, count_init, update_empty)
