"""What all figures share: their style, a title above and a caption below, and how they are written."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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


def wrapped(caption: str, pixels: float) -> str:
    """A caption in lines of at most so many pixels."""
    return textwrap.fill(caption, max(40, int(pixels / LETTER)))


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


def size_axis(ax: Any, sizes: Sequence[int]) -> None:
    """The sizes of codebooks along the x-axis."""
    ax.set_xscale("log", base=2)
    ax.set_xticks(sizes, [f"{size:,}" for size in sizes])
    ax.minorticks_off()
    ax.set_xlabel("codes in the codebook")


def draw_seeds(ax: Any, x: Any, values_ST: Any, scale: float = 1, **look: Any) -> None:
    """Thin lines of single seeds where there are several; their mean is drawn by whoever calls."""
    for values_T in values_ST if len(values_ST) > 1 else ():
        ax.plot(x, values_T * scale, linewidth=0.6, alpha=0.35, **look)
