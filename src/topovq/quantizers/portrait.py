"""A live quantizer looked at: its codes by color, how far neighbors are apart, how often each code is chosen.

Nothing here moves a code, and `drift` of `health()` is not asked for: looking changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from topovq.codebook import Codebook
from topovq.drawing import cells, code_colors, draw_colors, frame, places, value_colors
from topovq.metrics import neighbor_distances
from topovq.missing import needs
from topovq.panel import panel, picture
from topovq.quantizers.neural_gas import GAS, GasCodebook

SHOWN = 4  # codebooks drawn in a notebook's panel
TITLES = {
    "codes": "codes, colored by principal components",
    "u_matrix": "U-matrix: distance to neighboring codes",
    "hits": "hits: vectors per batch, lately",
}


def code_values(book: Codebook) -> dict[str, np.ndarray]:
    """By the names of TITLES: colors uint8 [K, 3], distances float [K], hits float [K]."""
    codes_KD = book.codes.detach()
    return {
        "codes": code_colors(codes_KD),
        "u_matrix": neighbor_distances(codes_KD, book.neighborhood.grid).numpy(),
        "hits": book.hits.detach().float().cpu().numpy(),
    }


def map_pixels(book: Codebook, pixels: int = 256) -> dict[str, np.ndarray]:
    """The same as pictures uint8 [H, W, 4], about `pixels` wide; hits by their logarithm."""
    values = code_values(book)
    colors = {
        "codes": values["codes"],
        "u_matrix": value_colors(values["u_matrix"]),
        "hits": value_colors(np.log1p(values["hits"])),
    }
    return {name: draw_colors(colors_K3, book.neighborhood.grid, pixels) for name, colors_K3 in colors.items()}


def plot(books: Sequence[Codebook]) -> Any:
    """Draw all three of each codebook, a row each; returns matplotlib's axes, [books, 3], or [3] for one."""
    with needs("train"):
        import matplotlib.pyplot as plt
    grid = books[0].neighborhood.grid
    xy_K2 = places(grid)
    width, height = xy_K2.max(0) + 1
    size = (13, len(books) * min(12.0, max(2.0, 3.8 * height / width)))
    _, axes = plt.subplots(len(books), 3, figsize=size, squeeze=False, layout="constrained")
    for row, book in zip(axes, books):
        xy_K2 = places(book.neighborhood.grid)
        hexagonal = book.neighborhood.grid.topology == "hexagonal"
        for ax, (name, values) in zip(row, code_values(book).items()):
            cells(ax, xy_K2, hexagonal, values / 255 if name == "codes" else values)
            frame(ax, xy_K2, TITLES[name])
    return axes[0] if len(books) == 1 else axes


def html_panel(name: str, books: Sequence[Codebook]) -> str:
    """What a notebook shows of a quantizer of these codebooks."""
    book = books[0]
    around = book.neighborhood
    step = book.step.detach().cpu()
    reach = "" if around.kind == "none" else f", {float(around.width(step)):.3g} cells wide now"
    neighborhood = "ride" if book.ride else GAS if isinstance(book, GasCodebook) else around.kind + reach
    several = f"{len(books)} codebooks of " if len(books) > 1 else ""
    facts = {
        "codes": f"{several}{book.size:,} of {book.codes.shape[1]} dimensions",
        "map": f"{' x '.join(map(str, around.grid.shape))} {around.grid.topology}",
        "neighborhood": neighborhood,
        "updates": f"{int(step):,}",
    }
    if step:
        facts["in use lately"] = f"{sum(b.usage().item() for b in books) / len(books):.1%}"
        facts["perplexity"] = f"{sum(b.perplexity().item() for b in books) / len(books):,.1f}"
    pictures = []
    for number, shown in enumerate(books[:SHOWN]):
        of = f"codebook {number}: " if len(books) > 1 else ""
        pictures.append([picture(pixels, of + TITLES[kind]) for kind, pixels in map_pixels(shown).items()])
    if len(books) > SHOWN:
        facts["drawn"] = f"the first {SHOWN} codebooks"
    return panel(name, facts, pictures)
