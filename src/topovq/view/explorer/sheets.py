"""All codes of a map on one picture, and straight ways on a map."""

from __future__ import annotations

import numpy as np
import torch

from topovq.grid import Grid
from topovq.view.explorer.schemas import Sheet
from topovq.view.report.images import data_uri

MOST_STOPS = 48


def sheet_of(tiles_Kss3: np.ndarray) -> Sheet:
    """Tiles uint8, code by code, in rows on a square."""
    number, side = tiles_Kss3.shape[:2]
    columns = int(np.ceil(number**0.5))
    rows = -(-number // columns)
    page = np.zeros((rows * columns, side, side, 3), np.uint8)
    page[:number] = tiles_Kss3
    whole = page.reshape(rows, columns, side, side, 3).swapaxes(1, 2).reshape(rows * side, columns * side, 3)
    return Sheet(image=data_uri(whole), columns=columns, side=side)


def line(grid: Grid, start: int, end: int) -> list[int]:
    """The places on the straight way from `start` to `end`, both included, the short way round on axes that wrap.

    Steps are at most one place along each axis; of a way of more than `MOST_STOPS` places, evenly spaced ones.
    """
    a, b = grid.coords(torch.tensor([start, end])).double()
    delta = b - a
    for axis, (n, wraps) in enumerate(zip(grid.shape, grid.wrap)):
        if wraps:
            delta[axis] = (delta[axis] + n // 2) % n - n // 2
    stops = min(int(delta.abs().max()) + 1, MOST_STOPS)
    share = torch.linspace(0, 1, stops, dtype=torch.float64)[:, None]
    coords = torch.round(a + share * delta).long() % torch.tensor(grid.shape)
    stops_N = grid.full.index(coords)
    # Where the last row is empty the way goes through the one before.
    return torch.where(stops_N < grid.size, stops_N, stops_N - grid.shape[-1]).tolist()
