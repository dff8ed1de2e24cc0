"""The maps of a model, one by one: their places, their codes decoded, and drawings of them.

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

from topovq.drawing import draw, enlarge
from topovq.drawing import places as places  # here, too, for those who draw a model's maps
from topovq.grid import Grid
from topovq.metrics import neighbor_distances as neighbor_distances
from topovq.metrics import neighbors as neighbors
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


def map_picture(model: Tokenizer, maps: Sequence[Chart], which: int, usual: Sequence[int] | None = None) -> np.ndarray:
    """Every code of map `which` decoded, at its place: uint8 [H, W, 4]."""
    if not maps:
        raise ValueError(f"the codes of quantizer {model.config['quantizer']!r} have no places, so there is no map")
    grid = maps[which].grid
    return draw(enlarge(tiles(model, maps, which, usual), 24 if grid.topology == "hexagonal" else 1), grid)
