"""Smoothed targets: the Gaussian around places of a map, axis by axis (head.py says what heads do with it)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from topovq.grid import ROW_HEIGHT, Grid

NEVER = -1e30  # a logit of no probability; an infinite one times a weight of 0 would be NaN
NARROWEST = 1e-6  # cells: a neighborhood of width 0 is the token itself


class Neighbors:
    """The Gaussian around places of a map, axis by axis."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.hexagonal = grid.topology == "hexagonal"

    def weights(self, axis: int, coords: Sequence[Tensor], drawn: Sequence[Tensor], width: Tensor) -> Tensor:
        """q_a [..., n] over the places of `axis`, around coords[axis] [...]; `drawn` are those on the axes before."""
        side, place = self.grid.shape[axis], coords[axis]
        every = torch.arange(side, device=place.device)
        delta = (every - place[..., None]).float()
        if self.hexagonal and axis == 1:
            delta = delta + 0.5 * (drawn[0] % 2 - coords[0] % 2).float()[..., None]
        delta = delta.abs()
        if self.grid.wrap[axis]:
            delta = torch.minimum(delta, side - delta)
        if self.hexagonal and axis == 0:
            delta = delta * ROW_HEIGHT
        logits = -((delta / width.float().clamp(min=NARROWEST)) ** 2)
        if axis == 1 and self.grid.size < self.grid.places:  # the last row is partly empty
            logits = logits.masked_fill(drawn[0][..., None] * side + every >= self.grid.size, NEVER)
        return logits.softmax(-1)


def check_width(width: Tensor | float) -> None:
    """Refuse a width of smoothed targets that is NaN or negative; one on a GPU is not looked at."""
    if isinstance(width, Tensor):
        if torch.compiler.is_compiling() or width.device.type != "cpu":
            return
        fits = bool((width >= 0).all())
    else:
        fits = width >= 0
    if not fits:
        raise ValueError(f"width={width!r} must be at least 0: cells of the map over which targets are smoothed")
