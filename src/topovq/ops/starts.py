"""starts: where codes are put by the first batch: at vectors drawn from it, or as a map that is laid over it.

Legend: N vectors x, K codes w, D dimensions; S, c sums and counts of the vectors closest to each code. All ranks have
the same codes; nothing waits for the device.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from topovq import distributed
from topovq.grid import Grid
from topovq.neighborhood import PASSES, Neighborhood, Schedule
from topovq.ops.accumulate import accumulate
from topovq.ops.direct import plain
from topovq.ops.ride import uniform
from topovq.ops.search import nearest
from topovq.ops.smooth import smooth

FIRST_SHARE = 1 / 4  # first width of the passes, as a share of the map's side
LAST_WIDTH = 0.5  # last one, in cells, or as many as make a disk with about one vector
FINENESS = 10**6  # parts of the way from the first width to LAST_WIDTH
SQUARINGS = 7  # of the covariance: its 128th power is along its first direction
LEAST_SPREAD = 1e-3  # of codes, as a share of the size of the vectors, where those do not differ, and of


def sample_rows(x_ND: Tensor, valid_N: Tensor, count: int, sync: bool) -> tuple[Tensor, Tensor]:
    """(rows [count, D] float32, whether there was any): valid vectors of all ranks, the same on each rank.

    Vectors repeat only where there are fewer than `count`. A rank without a valid vector adds nothing and waits for
    nobody; no rank asks its device anything.
    """
    n = x_ND.shape[0]
    several = sync and distributed.world_size() > 1
    share_R = valid_N.new_zeros(distributed.world_size() if several else 1, dtype=torch.int64)
    here = distributed.rank() if several else 0
    share_R[here] = valid_N.sum()
    if several:
        share_R = distributed.sum_over_ranks(share_R)
    total = share_R.sum()
    start = share_R[:here].sum()
    slot = torch.arange(count, device=x_ND.device)
    # Spread evenly over the vectors of all ranks, of which this rank holds those from `start` on.
    place = torch.where(total > count, slot * total // count, slot % total.clamp(min=1)) - start
    mine = (place >= 0) & (place < share_R[here])
    rows = x_ND.new_zeros(count, x_ND.shape[1], dtype=torch.promote_types(x_ND.dtype, torch.float32))
    if n:
        order_N = torch.where(valid_N, torch.rand(n, device=x_ND.device), 2.0).argsort()
        rows = torch.where(mine[:, None], x_ND[order_N[place.clamp(0, n - 1)]].to(rows.dtype), 0)
    return (distributed.sum_over_ranks(rows) if several else rows), total > 0


def lay_map(
    x_ND: Tensor, valid_N: Tensor, grid: Grid, metric: str, precision: str, sync: bool
) -> tuple[Tensor, Tensor]:
    """(codes [K, D] float32 at least, number of valid vectors, 0-dim): a map laid over the valid vectors of all ranks.

    It starts as a plane through their mean, along the directions in which they differ most, the longest axis of the map
    along the first, as far as their standard deviations. Then come PASSES steps of the batch map, w = A^T S / A^T c,
    while its width shrinks. Codes never coincide, even if all vectors do.
    """
    lattice = (list(grid.shape), list(grid.wrap), grid.topology, grid.size)
    if plain(x_ND, valid_N):
        return _compute(x_ND, valid_N, *lattice, metric, precision, sync)
    codes_KD, vectors = _lay_map(x_ND, valid_N, *lattice, metric, precision, sync)
    return codes_KD, vectors


def _compute(
    x_ND: Tensor,
    valid_N: Tensor,
    shape: list[int],
    wrap: list[bool],
    topology: str,
    size: int,
    metric: str,
    precision: str,
    sync: bool,
) -> tuple[Tensor, Tensor]:
    grid = Grid(tuple(shape), topology=topology, wrap=tuple(wrap), size=size)
    with torch.autocast(x_ND.device.type, enabled=False):
        x_ND = x_ND.to(torch.promote_types(x_ND.dtype, torch.float32))
        x_ND = torch.where(valid_N[:, None], x_ND, 0)
        mean_D, away_KD, vectors = _plane(x_ND, valid_N, grid, sync)
        codes_KD = (mean_D + away_KD).to(x_ND.dtype)
        first = max(LAST_WIDTH, FIRST_SHARE * size ** (1 / grid.ndim))
        shrinks = Neighborhood("gaussian", grid, schedule=Schedule.exponential(first, LAST_WIDTH, FINENESS))
        sparse = LAST_WIDTH * (size / vectors.clamp(min=1)) ** (1 / grid.ndim)
        span = math.log(first / LAST_WIDTH)  # 0 where the map is small: the width does not change then
        last = (first / sparse.clamp(LAST_WIDTH, first)).log() / (span or 1.0)
        for number in range(PASSES):
            step = (FINENESS * last * number / max(1, PASSES - 1)).long()
            codes_KD = F.normalize(codes_KD, dim=1) if metric == "cosine" else codes_KD
            index_N = torch.where(valid_N, nearest(x_ND, codes_KD, metric, precision), -1)
            sums_KD, counts_K = accumulate(x_ND, index_N, size)
            stats_KC = _over_ranks(torch.cat([sums_KD, counts_K[:, None]], 1), sync)
            sums_KD, counts_K = smooth(stats_KC[:, :-1], stats_KC[:, -1], shrinks, step)
            reached_K1 = (counts_K > 1e-12)[:, None]
            codes_KD = torch.where(reached_K1, sums_KD / torch.where(reached_K1, counts_K[:, None], 1), codes_KD)
        return codes_KD + (LEAST_SPREAD * away_KD).to(codes_KD.dtype), vectors


_lay_map = torch.library.custom_op("topovq::lay_map", _compute, mutates_args=())


@_lay_map.register_fake
def _(x_ND: Tensor, valid_N: Tensor, shape: list[int], wrap: list[bool], topology: str, size: int, *_: object) -> (
    tuple[Tensor, Tensor]
):  # fmt: skip
    dtype = torch.promote_types(x_ND.dtype, torch.float32)
    return x_ND.new_empty(size, x_ND.shape[1], dtype=dtype), x_ND.new_empty((), dtype=torch.float64)


def _plane(x_ND: Tensor, valid_N: Tensor, grid: Grid, sync: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(mean [D], how far each code is from it [K, D], number of vectors), float64; x_ND is 0 where it is not valid."""
    d = x_ND.shape[1]
    stats = torch.cat([x_ND.sum(0, dtype=torch.float64), valid_N.sum().double().view(1)])
    stats = _over_ranks(stats, sync)
    vectors = stats[-1].clone()
    mean_D = stats[:-1] / vectors.clamp(min=1)
    centered_ND = torch.where(valid_N[:, None], x_ND - mean_D, 0)
    covariance_DD = _over_ranks(centered_ND.T @ centered_ND, sync) / vectors.clamp(min=1)
    sized = ((covariance_DD.diagonal().sum() + mean_D.square().sum()) / d).sqrt()
    away_KD = torch.zeros(grid.size, d, dtype=torch.float64, device=x_ND.device)
    places = _unit_places(grid, d, x_ND.device)
    for place_K, (direction_D, spread) in zip(places, _directions(covariance_DD, len(places))):
        away_KD += place_K[:, None] * torch.maximum(spread, LEAST_SPREAD * sized + 1e-6) * direction_D
    return mean_D, away_KD, vectors


def _directions(covariance_DD: Tensor, count: int) -> list[tuple[Tensor, Tensor]]:
    """The first directions of the vectors, and their standard deviations along them.

    By powers of the covariance, since an eigenvalue solver waits for the device, and may turn a direction's sign from
    one machine to the next. Directions that differ little in their spread may come mixed, which does no harm here.
    """
    d = len(covariance_DD)
    identity_DD = torch.eye(d, dtype=torch.float64, device=covariance_DD.device)
    left_DD = covariance_DD + (1e-12 * covariance_DD.diagonal().mean() + 1e-30) * identity_DD
    found = []
    for _ in range(count):
        power_DD = left_DD
        for _ in range(SQUARINGS):
            power_DD = power_DD / power_DD.diagonal().sum()
            power_DD = power_DD @ power_DD
        power_DD = power_DD / power_DD.diagonal().sum()
        largest = power_DD.diagonal().argmax().view(1)
        direction_D = F.normalize(power_DD.index_select(1, largest)[:, 0], dim=0)
        found.append((direction_D, (direction_D @ covariance_DD @ direction_D).clamp(min=0).sqrt()))
        others_DD = identity_DD - torch.outer(direction_D, direction_D)
        left_DD = others_DD @ left_DD @ others_DD
    return found


def _unit_places(grid: Grid, d: int, device: torch.device) -> list[Tensor]:
    """Coordinates [K] of the codes on the map with mean 0 and spread 1, at most d, those of the longest axis first.

    An axis that wraps is a circle, if there are dimensions enough. Each code is up to half a cell from its place, so
    that codes differ in each coordinate: where vectors differ along fewer directions than the map has axes, all codes
    would else lie above each other.
    """
    every_K = torch.arange(grid.size, device=device)
    position_KA = grid.positions(every_K)
    axes = sorted((axis for axis, n in enumerate(grid.shape) if n > 1), key=lambda axis: -grid.shape[axis])
    circles = [axis for axis in axes if grid.wrap[axis]][: max(0, d - len(axes))]
    first, second = [], []
    for axis in axes:
        place_K = position_KA[:, axis] + uniform(every_K, 0, axis).double() - 0.5
        if axis in circles:
            angle_K = 2 * math.pi * place_K / grid.periods[axis]
            first.append(angle_K.cos())
            second.append(angle_K.sin())
        else:
            first.append(place_K)
    return [(place_K - place_K.mean()) / place_K.std() for place_K in (first + second)[:d]]


def _over_ranks(tensor: Tensor, sync: bool) -> Tensor:
    return distributed.sum_over_ranks(tensor) if sync else tensor
