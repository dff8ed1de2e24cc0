"""A map drawn: where its places lie on a sheet, colors of its codes, cells as pixels and as matplotlib's polygons.

Legend: K codes of D dimensions, cells of h x w pixels.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from topovq.grid import Grid
from topovq.missing import needs

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# viridis, which matplotlib has: pictures for notebooks and loggers do without it
SCALE = np.array([(68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37)], float)
CLIPPED = 2.0  # percent of the codes at each end whose color is the end of the scale


def places(grid: Grid) -> np.ndarray:
    """Where to draw each place, float64 [K, 2] as (x, y) in widths of a cell.

    Two axes are drawn as they are, a line is broken into rows, of more axes the slices stand below each other.
    """
    if grid.ndim == 2:
        return grid.positions().flip(-1).numpy()
    width = grid.shape[-1] if grid.ndim > 2 else int(np.ceil(grid.size**0.5))
    index = np.arange(grid.size)
    return np.stack([index % width, index // width], 1).astype(np.float64)


def draw(cells_Khw3: np.ndarray, grid: Grid) -> np.ndarray:
    """The map with a picture uint8 [h, w, 3] at each code's place, [H, W, 4]; hexagons where the grid is hexagonal.

    Places without a code are transparent.
    """
    hexagonal = grid.topology == "hexagonal"
    _, height, width, _ = cells_Khw3.shape
    tall = int(np.ceil(height * 2 / np.sqrt(3))) if hexagonal else height
    corner_K2 = places(grid)
    left_K = np.round(corner_K2[:, 0] * width).astype(int)
    top_K = np.round(corner_K2[:, 1] * height).astype(int)
    sheet = np.zeros((top_K.max() + tall, left_K.max() + width, 4), np.uint8)
    mask = _hexagon(tall, width) if hexagonal else np.ones((tall, width), bool)
    rows = np.arange(tall) * height // tall
    for cell, left, top in zip(cells_Khw3, left_K, top_K):
        window = sheet[top : top + tall, left : left + width]
        window[mask] = np.concatenate([cell[rows][mask], np.full((mask.sum(), 1), 255)], 1)
    return sheet


def _hexagon(height: int, width: int) -> np.ndarray:
    """bool [height, width]: the pixels of a hexagon that stands on its tip."""
    y = np.abs((np.arange(height) + 0.5) / height - 0.5)[:, None] * 2 / np.sqrt(3)
    x = np.abs((np.arange(width) + 0.5) / width - 0.5)[None, :]
    inside: np.ndarray = y + x / np.sqrt(3) <= 1 / np.sqrt(3) + 1e-9
    return inside


def enlarge(cells: Tensor | np.ndarray, least: int) -> np.ndarray:
    """Pictures uint8 [K, C, s, s] -> [K, S, S, 3] of at least `least` pixels, each repeated; gray fills all three."""
    array = np.asarray(cells).transpose(0, 2, 3, 1)
    times = max(1, -(-least // array.shape[1]))
    return np.broadcast_to(array, (*array.shape[:3], 3)).repeat(times, 1).repeat(times, 2)


def draw_colors(colors_K3: np.ndarray, grid: Grid, pixels: int = 256) -> np.ndarray:
    """The map with a cell of one color, uint8 [K, 3], at each place: [H, W, 4], about `pixels` wide."""
    places_K2 = places(grid)
    width, height = places_K2.max(0).astype(int) + 1
    side = max(1, round(pixels / width))
    if grid.topology == "hexagonal":
        return draw(enlarge(colors_K3[:, :, None, None], max(side, 8)), grid)  # smaller hexagons have no shape
    sheet = np.zeros((height, width, 4), np.uint8)
    column_K, row_K = places_K2.T.astype(int)
    sheet[row_K, column_K] = np.column_stack([colors_K3, np.full(len(colors_K3), 255)])
    return sheet.repeat(side, 0).repeat(side, 1)


def code_colors(codes_KD: Tensor) -> np.ndarray:
    """uint8 [K, 3]: red, green and blue are the codes' first three principal components. Codes that are alike look
    alike. Codes that are not finite are black."""
    codes_KD = codes_KD.detach().double().cpu()
    finite_K = codes_KD.isfinite().all(1)
    colors_K3 = np.zeros((len(codes_KD), 3), np.uint8)
    kept_ND = codes_KD[finite_K]
    if not len(kept_ND):
        return colors_K3
    centered_ND = kept_ND - kept_ND.mean(0)
    axes_DM = torch.linalg.eigh(centered_ND.T @ centered_ND).eigenvectors.flip(1)[:, :3]
    largest_M = axes_DM.gather(0, axes_DM.abs().argmax(0, keepdim=True))
    along_NM = (centered_ND @ (axes_DM * largest_M.sign())).numpy()  # one of the two signs, the same from step to step
    low_M, high_M = np.percentile(along_NM, [CLIPPED, 100 - CLIPPED], axis=0)
    spread_M = np.where(high_M > low_M, high_M - low_M, np.inf)
    share_N3 = np.full((len(kept_ND), 3), 0.5)
    share_N3[:, : along_NM.shape[1]] = ((along_NM - low_M) / spread_M).clip(0, 1)
    colors_K3[finite_K.numpy()] = (share_N3 * 255).round()
    return colors_K3


def value_colors(values_K: np.ndarray) -> np.ndarray:
    """uint8 [K, 3]: numbers from their smallest (dark) to their largest (bright). Those not finite are black."""
    finite_K = np.isfinite(values_K)
    known = values_K[finite_K]
    low, high = (known.min(), known.max()) if known.size else (0.0, 0.0)
    share_K = np.where(finite_K, (values_K - low) / (high - low) if high > low else 0.0, 0.0)
    steps = np.linspace(0, 1, len(SCALE))
    colors_K3 = np.stack([np.interp(share_K, steps, channel) for channel in SCALE.T], 1)
    return np.where(finite_K[:, None], colors_K3, 0).round().astype(np.uint8)


def cells(ax: Axes, xy_K2: np.ndarray, hexagonal: bool, values: np.ndarray, cmap: str = "viridis") -> Any:
    """Cells at these places on matplotlib's axes, colored by values [K] with a color bar, or by colors [K, 3 or 4]."""
    with needs("train"):
        from matplotlib.collections import PolyCollection
    # Hexagons of unit distance stand on a corner; their corners are 1/sqrt(3) from the center.
    angles = np.pi / 2 + np.arange(6) * np.pi / 3 if hexagonal else np.pi / 4 + np.arange(4) * np.pi / 2
    corners = np.column_stack([np.cos(angles), np.sin(angles)]) * (1 / math.sqrt(3) if hexagonal else math.sqrt(0.5))
    edges = 0.3 if len(xy_K2) <= 4096 else 0.0  # between more cells there is nothing but edge
    drawn = PolyCollection(list(xy_K2[:, None, :] + corners), edgecolors="white" if edges else "face", linewidths=edges)
    if values.ndim == 1:
        drawn.set_array(values)
        drawn.set_cmap(cmap)
        ax.figure.colorbar(drawn, ax=ax, shrink=0.75)
    else:
        drawn.set_facecolor(list(map(tuple, values)))
    ax.add_collection(drawn)
    return drawn


def frame(ax: Axes, xy_K2: np.ndarray, title: str) -> None:
    """Axes around cells at these places: rows go downward, and nothing but a title beside them."""
    (left, top), (right, bottom) = xy_K2.min(0) - 0.65, xy_K2.max(0) + 0.65
    ax.set(xlim=(left, right), ylim=(bottom, top), xticks=[], yticks=[], title=title)
    ax.set_aspect("equal")
    ax.set_frame_on(False)
