"""Pictures of models, pixel by pixel: their maps, and images whose tokens were moved; and both as numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from experiments.plots import DPI, INK, LETTER, LINE, MARGIN, PALE, TEXT, style, wrapped
from topovq.grid import Grid
from topovq.metrics import BLOCK, not_neighbors, to_psnr, topographic_error
from topovq.tokenizer.atlas import LEVEL_NAMES, charts, draw, map_picture
from topovq.tokenizer.models import Tokenizer, Tokens, as_levels, codes_of
from topovq.tokenizer.training.evaluate import count_tokens
from topovq.view.pictures import COLORS, codebook_map, moved
from topovq.view.report import with_channels
from topovq.view.report.images import sheet

# Where the paper fixes a level, as (row, column) on its 16 x 32 map; on other maps the same shares of the sides.
FIXED = ((0, 0), (15, 18), (3, 27))
PAPER_SHAPE = (16, 32)
NEVER = torch.tensor([150.0, 20.0, 20.0], dtype=torch.float64)  # the color of a code that does not occur
BATCH = 256  # images that are encoded at a time
NEAR, WIDE = range(-3, 4), range(-10, 11)  # offsets
PIXELS = 2**19  # decoded at a time


@dataclass(frozen=True)
class Panel:
    """A picture uint8 [H, W, 3 or 4] drawn `times` its size, with names over its columns and beside its rows.

    Names are (pixel of the picture, text) pairs; `color` is that of the title.
    """

    picture: np.ndarray
    times: int = 1
    title: str = ""
    columns: Sequence[tuple[float, str]] = ()
    rows: Sequence[tuple[float, str, str]] = ()  # with the text's color
    color: str = INK

    @property
    def width(self) -> int:
        return int(self.picture.shape[1]) * self.times

    @property
    def height(self) -> int:
        return int(self.picture.shape[0]) * self.times

    @property
    def above(self) -> int:
        return LINE * (bool(self.title) + bool(self.columns)) + 8

    @property
    def left(self) -> int:
        return round(max((len(text) for _, text, _ in self.rows), default=0) * LETTER * 1.15) + 12 * bool(self.rows)


def plate(rows: Sequence[Sequence[Panel]], title: str, caption: str) -> Any:
    """Panels in rows, a title above and a caption below: a figure in which a picture's pixel is whole pixels."""
    from matplotlib.figure import Figure

    with style():
        gap = MARGIN
        widths = [sum(panel.left + panel.width for panel in row) + gap * (len(row) - 1) for row in rows]
        above = [max(panel.above for panel in row) for row in rows]
        heights = [over + max(panel.height for panel in row) for over, row in zip(above, rows)]
        width = max(*widths, round(len(title) * LETTER * 1.5), 640) + 2 * MARGIN
        text = wrapped(caption, width - 2 * MARGIN)
        head, foot = round(LINE * 1.4), LINE * (text.count("\n") + 1) + 8
        height = 2 * MARGIN + head + sum(heights) + gap * len(rows) + foot
        figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI)

        def write(x: float, y: float, words: str, **how: Any) -> None:
            usual: dict[str, Any] = {"va": "top", "ha": "left", "fontsize": TEXT}
            figure.text(x / width, 1 - y / height, words, **usual | how)

        write(MARGIN, MARGIN, title, fontsize=TEXT + 2.5, weight="bold")
        top = MARGIN + head
        for row, over, tall in zip(rows, above, heights):
            left = MARGIN
            for panel in row:
                left += panel.left
                under = top + over
                axes = figure.add_axes(
                    (left / width, 1 - (under + panel.height) / height, panel.width / width, panel.height / height)
                )
                axes.imshow(panel.picture, interpolation="none", aspect="auto")
                axes.set_axis_off()
                if panel.title:
                    write(left, top, panel.title, fontsize=TEXT + 0.5, weight="bold", color=panel.color)
                for x, words in panel.columns:
                    write(left + x * panel.times, under - 6, words, ha="center", va="bottom", fontsize=TEXT - 0.5)
                for y, words, color in panel.rows:
                    write(left - 10, under + y * panel.times, words, ha="right", va="center", color=color)
                left += panel.width + gap
            top += tall + gap
        write(MARGIN, top, text, color=PALE, linespacing=1.3)
        return figure


def shrink(images_BCHW: Tensor, most: int) -> Tensor:
    """uint8 images made smaller by a whole number of times, by averages, until no side is over `most`."""
    times = -(-max(images_BCHW.shape[2:]) // most)
    return images_BCHW if times == 1 else avg_pool2d(images_BCHW.float(), times).round().to(images_BCHW.dtype)


# Maps


def draw_map(models: Mapping[str, Tokenizer], caption: str) -> Any:
    """The map of each VQ-VAE, side by side."""
    panels = []
    for name, model in models.items():
        picture = codebook_map(model)
        panels.append(Panel(picture, _times(picture.shape[1], 720), name, color=COLORS.get(name, INK)))
    codes = charts(next(iter(models.values())))[0].grid.size
    return plate([panels], f"A codebook of {codes} codes, each decoded, at its place on the map", caption)


def draw_maps2(models: Mapping[str, Tokenizer], caption: str) -> Any:
    """The maps of each VQ-VAE-2: the bottom's with every top token at one code, and the reverse."""
    rows = []
    for name, model in models.items():
        maps = charts(model)
        if len(maps) != 2:
            raise ValueError(
                f"the model of {name} has {len(maps)} maps; expected the two of a VQ-VAE-2: top and bottom"
            )
        for fixed, varied in ((0, 1), (1, 0)):
            row = []
            for place in FIXED:
                rows_, columns = maps[fixed].grid.shape
                at = (place[0] * rows_ // PAPER_SHAPE[0], place[1] * columns // PAPER_SHAPE[1])
                code = min(at[0] * columns + at[1], maps[fixed].grid.size - 1)  # the end of the last row may be empty
                at = divmod(code, columns)
                usual = [code] * 2
                picture = map_picture(model, maps, varied, usual)
                title = f"{name}: {maps[varied].name} codes, {maps[fixed].name} fixed at {at}"
                row.append(Panel(picture, _times(picture.shape[1], 512), title, color=COLORS.get(name, INK)))
            rows.append(row)
    return plate(rows, "The two codebooks of a VQ-VAE-2, decoded with the other level held at one code", caption)


def draw_scale_map(models: Mapping[str, Tokenizer], counts: Mapping[str, Tensor], caption: str) -> Any:
    """The map of each VQ-VAE, and below it how often each code occurs."""
    decoded, used = [], []
    for name, model in models.items():
        picture, chart = codebook_map(model), charts(model)[0]
        color, never = COLORS.get(name, INK), int((counts[name] == 0).sum())
        decoded.append(Panel(picture, _times(picture.shape[1], 512), f"{name}: every code decoded", color=color))
        side = 24 if chart.grid.topology == "hexagonal" else 1
        use = draw(use_picture(counts[name][:, None, None].expand(-1, side, side)), chart.grid)
        title = f"{name}: how often it occurs ({never:,} never)"
        used.append(Panel(use, _times(use.shape[1], decoded[-1].width), title, color=color))
    codes = charts(next(iter(models.values())))[0].grid.size
    caption += " Below: red codes do not occur; the others are the brighter the more often they do, on a log scale."
    return plate([decoded, used], f"A codebook of {codes:,} codes and its use", caption)


def use_picture(counts: Tensor) -> np.ndarray:
    """uint8 [..., 3]: red where a code does not occur, else from dark to white with the logarithm of its count."""
    logs = torch.log1p(counts.double().cpu())
    light = 40 + 215 * logs / logs.max().clamp(min=1e-12)
    picture = torch.where((counts.cpu() > 0)[..., None], light[..., None].expand(*counts.shape, 3), NEVER)
    return picture.round().to(torch.uint8).numpy()


def token_counts(model: Tokenizer, images_BCHW: Tensor) -> Tensor:
    """How often each code of a VQ-VAE occurs among the tokens of images: int64 [K]."""
    size, device = codes_of(model.quantizers), model.mean_C11.device
    counts = [count_tokens(model.encode(batch.to(device)), size)[0].cpu() for batch in images_BCHW.split(BATCH)]
    return torch.stack(counts).sum(0)


def _times(width: int, wanted: int) -> int:
    """How many times a picture is enlarged to be about `wanted` pixels wide."""
    return max(1, round(wanted / width))


# Moved tokens


def draw_shifts(models: Mapping[str, Tokenizer], images_BCHW: Tensor, offsets: Sequence[int], caption: str) -> Any:
    """For every choice of levels, each image and below each other what the models make of its moved tokens."""
    most, least = (128, 96) if len(offsets) < 10 else (128, 64)
    first = next(iter(models.values()))
    rows = []
    for choice in level_choices(first):
        strips = [shifted_strip(model, images_BCHW, offsets, choice) for model in models.values()]
        for index, image in enumerate(with_channels(images_BCHW, first)):
            shown = [shrink(strip[index], most) for strip in strips]
            side = shown[0].shape[-1]
            times, gap = max(1, round(least / side)), 2
            centers = [column * (side + gap) + side / 2 for column in range(len(offsets))]
            names = [(row * (side + gap) + side / 2, name, COLORS.get(name, INK)) for row, name in enumerate(models)]
            rows.append(
                [
                    Panel(sheet([[shrink(image[None], most)[0]]]), times, columns=[(side / 2, "image")] * (index == 0)),
                    Panel(
                        sheet([list(strip) for strip in shown], gap),
                        times,
                        f"{choice} moved by" if index == 0 else "",
                        [(x, label(offset)) for x, offset in zip(centers, offsets)] if index == 0 else (),
                        names,
                    ),
                ]
            )
    return plate(rows, "Images after their tokens were moved on the map", caption)


def shifted_strip(model: Tokenizer, images_BCHW: Tensor, offsets: Sequence[int], choice: str) -> Tensor:
    """uint8 [B, offsets, C, H, W]: every image with the tokens of `choice` moved by every offset."""
    levels = level_choices(model)[choice]
    tokens = model.encode(with_channels(images_BCHW, model).to(model.mean_C11.device))
    return torch.stack([model.decode(moved(model, tokens, offset, levels)).cpu() for offset in offsets], 1)


def label(offset: int) -> str:
    return f"{offset:+d}".replace("-", "−") if offset else "0"


@dataclass(frozen=True)
class ShiftScore:
    """PSNR in dB, over all pixels of all images, of what the moved tokens decode to."""

    moved: str  # which tokens: a key of `level_choices`
    offset: int  # places along every axis of the map
    to_reconstruction: float  # infinity where nothing moved
    to_original: float
    images: int


def level_choices(model: Tokenizer) -> dict[str, tuple[int, ...]]:
    """Which tokens may be moved: all of them and, where there are several levels, each level alone."""
    every = tuple(range(len(model.quantizers)))
    if len(every) == 1:
        return {"all tokens": every}
    names = LEVEL_NAMES.get(len(every), tuple(f"level {level}" for level in every))
    together = "both levels" if len(every) == 2 else "all levels"
    return {together: every} | {f"{name} alone": (level,) for level, name in enumerate(names)}


def moved_by_index(model: Tokenizer, tokens: Tokens, offset: int, levels: Sequence[int]) -> Tokens:
    """Tokens of `levels` whose numbers are `offset` higher, as if codes lay on a line; those at its ends stay there."""
    parts = list(as_levels(tokens))
    for level in levels:
        parts[level] = (parts[level] + offset).clamp(0, model.quantizers[level].codebook_size - 1)
    return parts[0] if len(parts) == 1 else tuple(parts)


def shift_scores(
    model: Tokenizer,
    images_BCHW: Tensor,
    offsets: Iterable[int],
    advance: Callable[[], object] = lambda: None,
    moved: Callable[[Tokenizer, Tokens, int, Sequence[int]], Tokens] = moved,
) -> list[ShiftScore]:
    """Scores of uint8 images for every choice of levels and every offset, each image encoded once.

    `moved` gives the tokens at an offset: on the map, or `moved_by_index`. `advance` is called after every choice and
    offset of every batch: see `batches`.
    """
    offsets, choices = list(offsets), level_choices(model)
    device = model.mean_C11.device
    errors = torch.zeros(len(choices), len(offsets), 2, dtype=torch.float64)
    for batch in batches(images_BCHW):
        batch = batch.to(device)
        tokens = model.encode(batch)
        plain = model.decode(tokens)
        for row, levels in enumerate(choices.values()):
            for column, offset in enumerate(offsets):
                ours = (model.decode(moved(model, tokens, offset, levels)) if offset else plain).double()
                for which, theirs in enumerate((plain, batch)):
                    errors[row, column, which] += float((ours - theirs).square().sum())
                advance()
    errors /= images_BCHW.numel()
    scores = []
    for row, name in enumerate(choices):
        for column, offset in enumerate(offsets):
            to_reconstruction, to_original = map(to_psnr, errors[row, column].tolist())
            scores.append(ShiftScore(name, offset, to_reconstruction, to_original, len(images_BCHW)))
    return scores


def batches(images_BCHW: Tensor) -> Sequence[Tensor]:
    """The images in as many parts as `shift_scores` takes them in."""
    return images_BCHW.split(max(1, PIXELS // images_BCHW[0, 0].numel()))


# Order on the map


@dataclass(frozen=True)
class Topography:
    """The order of one map; neighbors are those of the paper's hard neighborhood (the eight around a place in 2-D)."""

    level: str
    topographic_error: float  # share of encoder outputs whose two closest codes are not neighbors
    chance_error: float  # its value where codes lie on the map in any order
    neighbor_ratio: float  # mean distance of the codes of neighbors over that of any two codes: 1 without order
    vectors: int


def topographies(model: Tokenizer, images_BCHW: Tensor) -> list[Topography]:
    """The order of each of a model's maps, for the encoder outputs of uint8 images."""
    found = []
    for chart, x_ND in zip(charts(model), encoder_outputs(model, images_BCHW), strict=True):
        error = float(topographic_error(x_ND, chart.codes_KD.float(), chart.grid))
        ratio, near = neighbor_ratio(chart.codes_KD, chart.grid)
        found.append(Topography(chart.name, error, 1 - near, ratio, len(x_ND)))
    return found


@torch.no_grad()
def encoder_outputs(model: Tokenizer, images_BCHW: Tensor) -> list[Tensor]:
    """float32 [N, D] a level, coarsest first: the vectors that the quantizers see for these images."""
    quantizers: Any = model.quantizers
    for quantizer in quantizers:
        if getattr(quantizer, "heads", 0) != 1:
            raise ValueError(f"{type(quantizer).__name__} has several codes a place; only one can be looked at here")
    seen: list[list[Tensor]] = [[] for _ in quantizers]

    def keep(level: int) -> Any:
        def hook(quantizer: Any, inputs: tuple[Tensor, ...]) -> None:
            seen[level].append(quantizer.project_in(inputs[0].movedim(1, -1)).flatten(0, -2).float())

        return hook

    hooks = [quantizer.register_forward_pre_hook(keep(level)) for level, quantizer in enumerate(quantizers)]
    try:
        for batch in batches(images_BCHW):
            model.encode(batch.to(model.mean_C11.device))
    finally:
        for hook in hooks:
            hook.remove()
    return [torch.cat(parts) for parts in seen]


def neighbor_ratio(codes_KD: Tensor, grid: Grid) -> tuple[float, float]:
    """(Mean distance of the codes of neighbors over that of any two codes, share of any two that are neighbors)."""
    size = len(codes_KD)
    if size < 2:
        raise ValueError(f"{size} codes have no neighbors: expected at least 2")
    codes_KD, every = codes_KD.double(), torch.arange(size, device=codes_KD.device)
    near_total = all_total = 0.0
    near_number = 0
    for rows in every.split(max(1, BLOCK // size)):
        apart = torch.cdist(codes_KD[rows], codes_KD, compute_mode="donot_use_mm_for_euclid_dist")
        near = ~not_neighbors(rows[:, None], every[None], grid) & (rows[:, None] != every)
        near_total += float(apart[near].sum())
        near_number += int(near.sum())
        all_total += float(apart.sum())  # a code is at distance 0 from itself
    pairs = size * (size - 1)
    return (near_total / near_number) / (all_total / pairs), near_number / pairs
