"""Codebooks as maps: every code decoded, at its place, KSOM beside EMA-VQ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.canvas import INK, Panel, plate
from topovq.metrics import code_counts
from topovq.tokenizer.atlas import charts, draw, map_picture, to_planes
from topovq.tokenizer.models import Tokenizer
from topovq.view.pictures import COLORS, codebook_map

# Where the paper fixes a level, as (row, column) on its 16 x 32 map; on other maps the same shares of the sides.
FIXED = ((0, 0), (15, 18), (3, 27))
PAPER_SHAPE = (16, 32)
LEVELS = ("top", "bottom")
NEVER = torch.tensor([150.0, 20.0, 20.0], dtype=torch.float64)  # the color of a code that does not occur
BATCH = 256


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
                title = f"{name}: {LEVELS[varied]} codes, {LEVELS[fixed]} fixed at {at}"
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
    size = charts(model)[0].grid.size
    counts_K = torch.zeros(size, dtype=torch.int64)
    for batch in images_BCHW.split(BATCH):
        counts_K += code_counts(to_planes(model.encode(batch.to(model.mean_C11.device)))[0].cpu(), size)
    return counts_K


def _times(width: int, wanted: int) -> int:
    """How many times a picture is enlarged to be about `wanted` pixels wide."""
    return max(1, round(wanted / width))
