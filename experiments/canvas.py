"""Figures on paper: the style they share, plates of pictures pixel by pixel, and files that are whole or not there."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn.functional import avg_pool2d

from topovq.storage import write_atomic

DPI = 150
TEXT = 9.0  # points
LINE = round(TEXT * DPI / 72 * 1.45)  # pixels a line of text takes
LETTER = TEXT * DPI / 72 * 0.53  # pixels a letter takes, about
MARGIN = 24
WIDTH = 11.0  # inches, of plots
INK, PALE = "#222222", "#777777"
# Text stays text in an SVG, and the same figure gives the same file.
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "topovq",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": TEXT,
    "axes.titlesize": TEXT + 1,
    "axes.labelsize": TEXT,
    "legend.fontsize": TEXT - 0.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": PALE,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.grid": True,
    "grid.color": "#e4e4e0",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "legend.frameon": False,
}


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


def style() -> Any:
    """The context in which figures are made and saved."""
    import matplotlib

    return matplotlib.rc_context(STYLE)


def canvas(panels: int, title: str, caption: str) -> tuple[Any, list[Any]]:
    """A figure with so many axes side by side, a title above and a caption below; within `style`."""
    from matplotlib.figure import Figure

    width = WIDTH if panels > 1 else WIDTH * 0.8
    figure = Figure(figsize=(width, 5.0), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=TEXT + 2.5, weight="bold")
    figure.supxlabel(wrapped(caption, width * DPI - 2 * MARGIN), x=0.01, ha="left", fontsize=TEXT, color=PALE)
    return figure, list(figure.subplots(1, panels, squeeze=False)[0])


def plate(rows: Sequence[Sequence[Panel]], title: str, caption: str) -> Any:
    """Panels in rows, a title above and a caption below: a figure in which a picture's pixel is whole pixels."""
    from matplotlib.figure import Figure

    with style():
        return _plate(Figure, rows, title, caption)


def _plate(make: Any, rows: Sequence[Sequence[Panel]], title: str, caption: str) -> Any:
    gap = MARGIN
    widths = [sum(panel.left + panel.width for panel in row) + gap * (len(row) - 1) for row in rows]
    above = [max(panel.above for panel in row) for row in rows]
    heights = [over + max(panel.height for panel in row) for over, row in zip(above, rows)]
    width = max(*widths, round(len(title) * LETTER * 1.5), 640) + 2 * MARGIN
    text = wrapped(caption, width - 2 * MARGIN)
    head, foot = round(LINE * 1.4), LINE * (text.count("\n") + 1) + 8
    height = 2 * MARGIN + head + sum(heights) + gap * len(rows) + foot
    figure = make(figsize=(width / DPI, height / DPI), dpi=DPI)

    def write(x: float, y: float, words: str, **how: Any) -> None:
        figure.text(x / width, 1 - y / height, words, **{"va": "top", "ha": "left", "fontsize": TEXT} | how)

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


def wrapped(caption: str, pixels: float) -> str:
    """A caption in lines of at most so many pixels."""
    return textwrap.fill(caption, max(40, int(pixels / LETTER)))


def shrink(images_BCHW: Tensor, most: int) -> Tensor:
    """uint8 images made smaller by a whole number of times, by averages, until no side is over `most`."""
    times = -(-max(images_BCHW.shape[2:]) // most)
    return images_BCHW if times == 1 else avg_pool2d(images_BCHW.float(), times).round().to(images_BCHW.dtype)


def save(figure: Any, out: Path, name: str) -> list[Path]:
    """Write the figure as out/name.png and out/name.svg."""
    paths = []
    for kind, metadata in (("png", {}), ("svg", {"Date": None})):
        buffer = io.BytesIO()
        with style():
            figure.savefig(buffer, format=kind, dpi=DPI, metadata=metadata)
        path = out / f"{name}.{kind}"
        write_atomic(path, buffer.getvalue())
        paths.append(path)
    return paths
