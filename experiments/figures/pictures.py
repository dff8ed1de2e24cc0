"""Pictures of models, pixel by pixel: their maps, and images whose tokens were moved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from experiments.figures.measures import level_choices
from experiments.figures.style import DPI, INK, LETTER, LINE, MARGIN, PALE, TEXT, style, wrapped
from topovq.tokenizer.atlas import charts, draw, map_picture
from topovq.tokenizer.models import Tokenizer, codes_of
from topovq.tokenizer.training.evaluate import count_tokens
from topovq.view.pictures import COLORS, codebook_map, moved
from topovq.view.report import with_channels
from topovq.view.report.images import sheet

# Where the paper fixes a level, as (row, column) on its 16 x 32 map; on other maps the same shares of the sides.
FIXED = ((0, 0), (15, 18), (3, 27))
PAPER_SHAPE = (16, 32)
NEVER = torch.tensor([150.0, 20.0, 20.0], dtype=torch.float64)  # the color of a code that does not occur
BATCH = 256  # images that are encoded at a time


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
