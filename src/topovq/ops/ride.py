"""ride: how codes move along with their neighborhood on the map, and how dead ones come back beside busy ones.

Legend: K codes w, D dimensions; S, c the sums and counts of a batch; n running counts, m running sums; t the step
(codebook.py has the equations).

Neighbors share what moved them through points that lie RIDE_SPACING cells apart on the map. P [K, points] are the hats
around these, 1 at a point and falling to 0 at the next one along each axis: a code has a share in the points around
its place, and its shares add up to 1. A = P P^T is symmetric, reaches less than two spacings, and costs two visits of
2^axes points a code, however wide it is.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from topovq.grid import ROW_HEIGHT, Grid
from topovq.neighborhood import (
    ENOUGH,
    GAIN,
    LONGEST_WAIT,
    MOST_SPREAD,
    NEAR,
    PULL,
    PULL_SPAN,
    RIDE_SPACING,
    TRIES,
    WAIT,
    WAIT_VECTORS,
)
from topovq.ops.use import CHOSEN, NEVER, waited

LEAST_COUNT = 1e-20  # running count below which a code has no mean of its own


def pull_at(step: Tensor, decay: float) -> Tensor:
    """lam, the pull to the neighbors at `step`, float64, 0-dim: PULL times a code's own pull, over GAIN."""
    pull = PULL * (1 - decay) / GAIN / (1 + step.double() / PULL_SPAN).sqrt()
    return pull.clamp(max=1)


def ride(codes_KD: Tensor, sums_KD: Tensor, counts_K: Tensor, grid: Grid, step: Tensor, decay: float) -> Tensor:
    """u [K, D], how far each code rides: GAIN times the mean, over vectors x of a batch with winners j, weighted by
    A_jk, of (x - w_j) + lam (w_j - w_k). Where the weights add up to less than ENOUGH, it is their sum over ENOUGH."""
    pull = pull_at(step, decay).to(codes_KD)
    moved_KD = sums_KD - (1 - pull) * counts_K[:, None] * codes_KD
    moved_KD = torch.where(counts_K[:, None] > 0, moved_KD, 0)  # a code that is not finite tells its neighbors nothing
    around_KC = through_points(torch.cat([moved_KD, counts_K[:, None]], 1), grid)
    weight_K1 = around_KC[:, -1:]
    moved_KD = (around_KC[:, :-1] - pull * weight_K1 * codes_KD) / weight_K1.clamp(min=ENOUGH)
    return torch.where(weight_K1 > 0, GAIN * moved_KD, 0)


class Axis(NamedTuple):
    """The points along an axis of the map, in the units of `Grid.positions`; a single one has all of every code."""

    first: float
    spacing: float
    points: int


@lru_cache(maxsize=256)
def axes_of(grid: Grid) -> tuple[Axis, ...]:
    """An open axis has points beyond its ends, so that they are as far apart as anywhere; a ring has a whole number."""
    hexagonal = grid.topology == "hexagonal"
    axes = []
    for axis, (n, period) in enumerate(zip(grid.shape, grid.periods)):
        extent = (n - 1) * ROW_HEIGHT if hexagonal and axis == 0 else n - 1.0
        if hexagonal and axis == 1 and grid.shape[0] > 1:
            extent += 0.5  # odd rows lie half a cell further
        if math.isfinite(period):
            points = max(1, round(period / RIDE_SPACING))
            axes.append(Axis(0.0, period / points, points))
        elif extent == 0:
            axes.append(Axis(0.0, 1.0, 1))
        else:
            points = math.ceil(extent / RIDE_SPACING) + 1
            axes.append(Axis((extent - (points - 1) * RIDE_SPACING) / 2, RIDE_SPACING, points))
    return tuple(axes)


def shares(grid: Grid) -> tuple[Tensor, Tensor]:
    """P: (points int64 [C, K], shares float64 [C, K]) of each code, C corners of the cell that its place is in."""
    position_KA = grid.positions(torch.arange(grid.size))
    ends = []
    for axis, (axis_points, wraps) in enumerate(zip(axes_of(grid), grid.wrap)):
        first, spacing, points = axis_points
        if points == 1:
            every_K = torch.zeros(grid.size, dtype=torch.int64)
            ends.append([(every_K, torch.ones(grid.size, dtype=torch.float64))])
            continue
        along_K = (position_KA[:, axis] - first) / spacing
        before_K = along_K.floor().long()
        before_K = before_K if wraps else before_K.clamp(max=points - 2)
        ahead_K = along_K - before_K
        ends.append([(before_K % points, 1 - ahead_K), ((before_K + 1) % points, ahead_K)])
    corners, parts = [], []
    for corner in product(*ends):
        index_K, share_K = torch.zeros(grid.size, dtype=torch.int64), torch.ones(grid.size, dtype=torch.float64)
        for (point_K, part_K), axis_points in zip(corner, axes_of(grid)):
            index_K, share_K = index_K * axis_points.points + point_K, share_K * part_K
        corners.append(index_K)
        parts.append(share_K)
    return torch.stack(corners), torch.stack(parts)


@lru_cache(maxsize=16)
def _shares_on(grid: Grid, device: torch.device) -> tuple[Tensor, Tensor]:
    index_CK, share_CK = shares(grid)
    return index_CK.to(device), share_CK.to(device)


def through_points(stats_KC: Tensor, grid: Grid) -> Tensor:
    """A^T stats: gathered at the points, and given back."""
    index_CK, share_CK = _shares_on(grid, stats_KC.device)
    share_CK = share_CK.to(stats_KC.dtype)
    points_PC = stats_KC.new_zeros(math.prod(axis.points for axis in axes_of(grid)), stats_KC.shape[1])
    for index_K, share_K in zip(index_CK, share_CK):
        points_PC.index_add_(0, index_K, share_K[:, None] * stats_KC)
    around_KC = torch.zeros_like(stats_KC)
    for index_K, share_K in zip(index_CK, share_CK):
        around_KC.addcmul_(share_K[:, None], points_PC[index_K])
    return around_KC


def revive_on_map(
    codes_KD: Tensor, sums_KD: Tensor, counts_K: Tensor, idle_K: Tensor, frozen_K: Tensor,
    batch_KD: Tensor, batch_K: Tensor, step: Tensor, grid: Grid, cosine: bool,
) -> None:  # fmt: skip
    """Put dead codes beside busy ones, in place: the last part of an update, from its sums and counts alone.

    A code that waited too long asks up to TRIES places at random distances, mostly near. At the first whose code was
    chosen in this batch and is busier than the mean, the two share its running count, and the dead one comes to about
    a vector that chose it. Of those that come to the same place, the last in the codebook's order is heard.
    """
    size = len(counts_K)
    vectors = batch_K.sum()
    wait = (WAIT_VECTORS * size / vectors).clamp(WAIT, LONGEST_WAIT)
    late_K = (vectors > 0) & (waited(idle_K) > wait) & ~frozen_K
    if late_K.device.type == "cpu" and not late_K.any():  # nobody waits for a device here
        return
    hears_K = (batch_K >= CHOSEN) & (counts_K > counts_K.mean())
    place_K = torch.full_like(idle_K, -1, dtype=torch.int64)
    for attempt in reversed(range(TRIES)):
        there_K = asked(grid, step, attempt, counts_K.device)
        place_K = torch.where((there_K >= 0) & hears_K[there_K.clamp(min=0)], there_K, place_K)
    donor_K = place_K.clamp(min=0)
    asks_K = late_K & (place_K >= 0)
    every_K = torch.arange(size, device=counts_K.device)
    heard_K = every_K.new_full((size + 1,), -1).scatter_reduce(0, torch.where(asks_K, donor_K, size), every_K, "amax")
    revived_K = asks_K & (heard_K[donor_K] == every_K)
    chosen_K1 = batch_K[donor_K].clamp(min=CHOSEN)[:, None]
    from_KD = codes_KD[donor_K]
    new_KD = from_KD + chosen_K1.clamp(1, MOST_SPREAD).sqrt() * (batch_KD[donor_K] / chosen_K1 - from_KD)
    new_KD = torch.nn.functional.normalize(new_KD, dim=1) if cosine else new_KD
    share_K = torch.where((heard_K[:size] >= 0) & ~frozen_K, 0.5, 1.0).to(counts_K.dtype)
    counts = torch.where(revived_K, 0.5 * counts_K[donor_K], share_K * counts_K)
    revived_K1 = revived_K[:, None]
    sums_KD.copy_(torch.where(revived_K1, new_KD * counts[:, None], share_K[:, None] * sums_KD))
    codes_KD.copy_(torch.where(revived_K1, new_KD, codes_KD))
    counts_K.copy_(counts)
    idle_K.copy_(torch.where(revived_K, NEVER, idle_K))


def asked(grid: Grid, step: Tensor, attempt: int, device: torch.device) -> Tensor:
    """The place that each code would ask at `step`, int64 [K]; -1 where there is none.

    Its distance is NEAR / sqrt(u), its direction any.
    """
    every_K = torch.arange(grid.size, device=device)
    directions = [
        torch.zeros(grid.size, device=device) if n == 1 else 2 * uniform(every_K, step, 4 * attempt + 1 + axis) - 1
        for axis, n in enumerate(grid.shape)
    ]
    length_K = sum(direction.square() for direction in directions).sqrt()  # type: ignore[union-attr]
    far_K = NEAR / uniform(every_K, step, 4 * attempt).sqrt() / length_K.clamp(min=1e-12)
    return grid.at(grid.positions(every_K) + torch.stack([far_K * direction for direction in directions], -1))


def uniform(every_K: Tensor, step: Tensor | int, draw: int) -> Tensor:
    """Numbers between 0 and 1, float32 [K], that follow from the code, the step and the number of the draw alone.

    So all ranks have the same ones.
    """
    seed = _mixed(torch.as_tensor(step, device=every_K.device) * 4 * TRIES + draw)
    return ((_mixed(every_K ^ seed) >> 8).float() + 0.5) * 2.0**-24


def _mixed(bits: Tensor) -> Tensor:
    """A hash of 32 bits, held in int64."""
    low = 0xFFFFFFFF
    bits = bits & low
    bits = ((bits ^ (bits >> 16)) * 0x7FEB352D) & low
    bits = ((bits ^ (bits >> 15)) * 0x846CA68B) & low
    return bits ^ (bits >> 16)
