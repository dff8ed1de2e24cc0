"""Codebooks as maps: every code decoded, at its place, KSOM beside EMA-VQ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from topovq.atlas import charts, map_picture
from topovq.models import Tokenizer
from topovq.pictures import COLORS, codebook_map
from topovq.studies.canvas import INK, Panel, plate

# Where the paper fixes a level, as (row, column) on its 16 x 32 map; on other maps the same shares of the sides.
FIXED = ((0, 0), (15, 18), (3, 27))
PAPER_SHAPE = (16, 32)
LEVELS = ("top", "bottom")


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
                usual = [at[0] * columns + at[1]] * 2
                picture = map_picture(model, maps, varied, usual)
                title = f"{name}: {LEVELS[varied]} codes, {LEVELS[fixed]} fixed at {at}"
                row.append(Panel(picture, _times(picture.shape[1], 512), title, color=COLORS.get(name, INK)))
            rows.append(row)
    return plate(rows, "The two codebooks of a VQ-VAE-2, decoded with the other level held at one code", caption)


def _times(width: int, wanted: int) -> int:
    """How many times a picture is enlarged to be about `wanted` pixels wide."""
    return max(1, round(wanted / width))
