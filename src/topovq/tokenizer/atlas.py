"""The maps of a model, one by one: their places, their codes decoded, how far neighbors are apart, and drawings.

A model has a map for every level, and for every head or residual stage of a level. Each is a `Chart`; an image's tokens
are then one plane int64 [B, h, w] a chart, whatever the model.
Legend: K codes of D dimensions, s pixels per token, C channels.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from topovq.grid import Grid
from topovq.tokenizer.models import Tokenizer, Tokens, as_levels

BLOCK = 2**20  # pixels decoded at a time
LEVEL_NAMES = {1: ("map",), 2: ("top", "bottom")}


@dataclass(frozen=True)
class Chart:
    """One map of a model: its level (0 the coarsest), its stage within the level, its codes and their places."""

    name: str
    level: int
    stage: int | None  # None where the level has one token a place
    shape: tuple[int, int]  # tokens of one image
    side: int  # pixels a token stands for
    grid: Grid
    codes_KD: Tensor


def charts(model: Tokenizer) -> list[Chart]:
    """The maps of `model`, coarsest level first; none where the codes have no places (experiments/peers.py)."""
    found = []
    for level, (quantizer, shape) in enumerate(zip(model.quantizers, model.token_shapes)):
        label = LEVEL_NAMES.get(len(model.quantizers), ())[level : level + 1] or (f"level {level}",)
        size = (int(shape[0]), int(shape[1]))
        many = len(shape) == 3
        for stage, book in enumerate(quantizer.maps):
            found.append(
                Chart(
                    f"{label[0]}, stage {stage}" if many else label[0],
                    level,
                    stage if many else None,
                    size,
                    model.image_size // size[0],
                    book.neighborhood.grid,
                    book.codes.detach(),
                )
            )
    return found


def to_planes(tokens: Tokens) -> list[Tensor]:
    """Tokens as the model gives them -> one plane [B, h, w] a chart."""
    return [plane for level in as_levels(tokens) for plane in (level.unbind(-1) if level.ndim == 4 else (level,))]


def from_planes(planes: Sequence[Tensor], maps: Sequence[Chart]) -> Tokens:
    """The reverse of `to_planes`; where there are no maps, a plane is a level."""
    levels = [] if maps else list(planes)
    for _, group in itertools.groupby(zip(maps, planes, strict=bool(maps)), key=lambda pair: pair[0].level):
        pairs = list(group)
        levels.append(pairs[0][1] if pairs[0][0].stage is None else torch.stack([plane for _, plane in pairs], -1))
    return levels[0] if len(levels) == 1 else tuple(levels)


def fields(model: Tokenizer, maps: Sequence[Chart], which: int, codes_N: Tensor, usual: Sequence[int]) -> Tensor:
    """uint8 [N, C, 3 s0, 3 s0]: an image all of whose tokens on map `which` are one code, for each of `codes_N`.

    The tokens of the other maps are `usual`, one code a map.
    """
    pixels = 3 * model.stride
    codes_N = codes_N.to(maps[which].codes_KD.device)
    images = []
    for chunk in codes_N.split(max(1, BLOCK // pixels**2)):
        planes = []
        for number, chart in enumerate(maps):
            tokens = chunk if number == which else torch.full_like(chunk, usual[number])
            planes.append(tokens[:, None, None].expand(-1, pixels // chart.side, pixels // chart.side))
        images.append(model.decode(from_planes(planes, maps)).cpu())
    return torch.cat(images)


def tiles(model: Tokenizer, maps: Sequence[Chart], which: int, usual: Sequence[int] | None = None) -> Tensor:
    """Every code of map `which` decoded, uint8 [K, C, s, s]: what it is in the middle of an image of itself.

    `usual` are the codes of the other maps (default: those in the middle of each).
    """
    chart = maps[which]
    usual = [c.grid.size // 2 for c in maps] if usual is None else usual
    middle = 3 * model.stride // chart.side // 2 * chart.side
    every = fields(model, maps, which, torch.arange(chart.grid.size), usual)
    return every[:, :, middle : middle + chart.side, middle : middle + chart.side]


def neighbors(grid: Grid) -> Tensor:
    """int64 [K, n]: the places next to each place (one unit away), -1 where there is none."""
    every = torch.arange(grid.size)
    found = []
    for offset in itertools.product((-1, 0, 1), repeat=grid.ndim):
        # On an axis of two places both ways lead to the same one.
        if not any(offset) or any((n == 1 and o) or (n == 2 and o < 0) for n, o in zip(grid.shape, offset)):
            continue
        there = grid.full.shift(every, offset, wrap=True)
        near = (grid.full.distance(every, there) < 1 + 1e-9) & (there != every) & (there < grid.size)
        found.append(torch.where(near, there, -1))
    return torch.stack(found, 1) if found else torch.full((grid.size, 1), -1)


def neighbor_distances(codes_KD: Tensor, grid: Grid) -> Tensor:
    """The U-matrix, float32 [K]: mean Euclidean distance of a code to the codes next to it; 0 for a lone one."""
    near_Kn, codes_KD = neighbors(grid), codes_KD.float().cpu()
    total_K, number_K = torch.zeros(grid.size), torch.zeros(grid.size)
    for near_K in near_Kn.unbind(1):
        there = near_K >= 0
        apart_K = torch.linalg.vector_norm(codes_KD - codes_KD[near_K.clamp(min=0)], dim=1)
        total_K += torch.where(there, apart_K, 0.0)
        number_K += there
    return total_K / number_K.clamp(min=1)


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
    return y + x / np.sqrt(3) <= 1 / np.sqrt(3) + 1e-9


def enlarge(cells: Tensor | np.ndarray, least: int) -> np.ndarray:
    """Pictures uint8 [K, C, s, s] -> [K, S, S, 3] of at least `least` pixels, each repeated; gray fills all three."""
    array = np.asarray(cells).transpose(0, 2, 3, 1)
    times = max(1, -(-least // array.shape[1]))
    return np.broadcast_to(array, (*array.shape[:3], 3)).repeat(times, 1).repeat(times, 2)


def map_picture(model: Tokenizer, maps: Sequence[Chart], which: int, usual: Sequence[int] | None = None) -> np.ndarray:
    """Every code of map `which` decoded, at its place: uint8 [H, W, 4]."""
    if not maps:
        raise ValueError(f"the codes of quantizer {model.config['quantizer']!r} have no places, so there is no map")
    grid = maps[which].grid
    return draw(enlarge(tiles(model, maps, which, usual), 24 if grid.topology == "hexagonal" else 1), grid)
