"""Straight ways on a map."""

from __future__ import annotations

import torch

from topovq.grid import Grid

MOST_STOPS = 48


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
