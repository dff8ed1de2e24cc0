"""What a fit asks of the rows: each question takes a block of them, and gives sums that add up over the blocks.

Legend: N rows x of a block with weights weight_N, D features, K codes w; a missing value counts nowhere.
A question is made of plain numbers and tensors, so that it can be sent to another process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from topovq import metrics
from topovq.grid import Grid
from topovq.neighborhood import Neighborhood
from topovq.som.stats import Stats
from topovq.som.tables import Table

Question = Callable[[Table, Tensor], Any]  # Stats, where it is to be added up


@dataclass
class Moments:
    """How many rows, their weight, and the sums [D] of their values and of the weights of the values that are there."""

    def __call__(self, table: Table, weight_N: Tensor) -> Stats:
        sums_D, seen_D = table.totals(weight_N.double())
        return Stats(rows=_rows(table), weight=weight_N.double().sum(), sums=sums_D, seen=seen_D)


@dataclass
class Spread:
    """Sums [D] of squared distances from the mean."""

    mean_D: Tensor

    def __call__(self, table: Table, weight_N: Tensor) -> Stats:
        squares_D = torch.zeros(table.dim, dtype=torch.float64, device=table.device)
        for rows, x in table.centered_blocks(self.mean_D.to(table.device)):  # in float64, as the mean is
            squares_D += weight_N[rows].double() @ x.square()
        return Stats(squares=squares_D)


@dataclass
class Covariance:
    """Sum of the outer products of rows from the mean, [D, D]; of their coordinates in `basis` [D, R] if given."""

    mean_D: Tensor
    basis_DR: Tensor | None = None

    def __call__(self, table: Table, weight_N: Tensor) -> Stats:
        size = table.dim if self.basis_DR is None else self.basis_DR.shape[1]
        products = torch.zeros(size, size, dtype=torch.float64, device=table.device)
        for rows, x in table.centered_blocks(self.mean_D.to(weight_N)):
            x = x if self.basis_DR is None else x @ self.basis_DR.to(x)
            products += x.T @ (x * weight_N[rows, None])
        return Stats(products=products)


@dataclass
class Images:
    """What the covariance makes of a basis, [D, R]: a step of subspace iteration."""

    mean_D: Tensor
    basis_DR: Tensor

    def __call__(self, table: Table, weight_N: Tensor) -> Stats:
        images_DR = torch.zeros(self.basis_DR.shape, dtype=torch.float64, device=table.device)
        for rows, x in table.centered_blocks(self.mean_D.to(weight_N)):
            images_DR += x.T @ (weight_N[rows, None] * (x @ self.basis_DR.to(x)))
        return Stats(images=images_DR)


@dataclass
class Members:
    """What the batch rule of a map needs: see Stats."""

    codes_KD: Tensor
    metric: str

    def __call__(self, table: Table, weight_N: Tensor) -> Stats:
        index_N, distance_N = table.closest(self.codes_KD.to(weight_N), self.metric)
        stats_KC = table.statistics(index_N, weight_N, len(self.codes_KD))
        return Stats(
            sums=stats_KC[:, : table.dim],
            weights=stats_KC[:, table.dim :],
            error=weight_N.double() @ distance_N.double(),
            weight=weight_N.double().sum(),
            rows=_rows(table),
        )


@dataclass
class Ranks:
    """What the batch rule of a neural gas needs: as Members, but each row counts for every code, by h_K of its rank."""

    codes_KD: Tensor
    metric: str
    h_K: Tensor

    def __call__(self, table: Table, weight_N: Tensor) -> Stats:
        codes_KD, h_K = self.codes_KD.to(weight_N), self.h_K.to(weight_N)
        stats_KC = torch.zeros(len(codes_KD), 2 * table.dim, dtype=torch.float64, device=table.device)
        error = torch.zeros((), dtype=torch.float64, device=table.device)
        for rows, distance_NK in table.distance_blocks(codes_KD, self.metric):
            order_NK = distance_NK.argsort(dim=1, stable=True)
            h_NK = torch.empty_like(distance_NK, dtype=table.dtype).scatter_(1, order_NK, h_K.expand(len(order_NK), -1))
            h_NK *= weight_N[rows, None]
            x = torch.from_numpy(table.dense(rows)).to(table.device)
            seen = ~x.isnan()
            stats_KC += h_NK.T @ torch.cat([x.masked_fill(~seen, 0), seen.to(x.dtype)], 1)
            error += weight_N[rows].double() @ distance_NK.amin(1)
        return Stats(
            sums=stats_KC[:, : table.dim],
            weights=stats_KC[:, table.dim :],
            error=error,
            weight=weight_N.double().sum(),
            rows=_rows(table),
        )


@dataclass
class Closest:
    """The closest code of each row, int64 [N], and its distance [N] if asked for."""

    codes_KD: Tensor
    metric: str
    distances: bool = False

    def __call__(self, table: Table, weight_N: Tensor) -> tuple[Tensor, Tensor | None]:
        codes_KD = self.codes_KD.to(weight_N)
        index_N = table.closest(codes_KD, self.metric)[0]
        return index_N, table.distance_to(codes_KD, index_N, self.metric) if self.distances else None


@dataclass
class Errors:
    """How well codes fit: sums of distances, and of weights where the two closest codes are no neighbors; hits [K].

    grid    of the codes; without one no codes are neighbors
    labels  a list that takes the closest code of each row, block by block; None where they are not wanted
    pairs   a list that takes the two closest codes of rows, [n, 2], each pair once for a block
    """

    codes_KD: Tensor
    metric: str
    grid: Grid | None = None
    labels: list[np.ndarray] | None = field(default=None, repr=False)
    pairs: list[Tensor] | None = field(default=None, repr=False)

    def __call__(self, table: Table, weight_N: Tensor) -> Stats:
        codes_KD = self.codes_KD.to(weight_N)
        size = len(codes_KD)
        weight_N = weight_N.double()
        if size == 1 or (self.grid is None and self.pairs is None):  # nobody asks for the second
            first_N = second_N = table.closest(codes_KD, self.metric)[0]
        else:
            first_N, second_N = table.closest_two(codes_KD, self.metric).unbind(1)
        if self.labels is not None:
            self.labels.append(first_N.cpu().numpy())
        distance_N = table.distance_to(codes_KD, first_N, self.metric).double()
        if self.pairs is not None:
            both_N2 = torch.stack([first_N, second_N], 1)[weight_N > 0]
            self.pairs.append(both_N2.sort(dim=1).values.unique(dim=0).cpu())
        apart_N = (first_N != second_N) if self.grid is None else metrics.not_neighbors(first_N, second_N, self.grid)
        return Stats(
            error=weight_N @ distance_N,
            apart=weight_N @ apart_N.double(),
            weight=weight_N.sum(),
            hits=torch.bincount(first_N, weight_N, minlength=size),
        )


@dataclass
class Distortion:
    """Sum over rows and codes of the squared distance, by how far the code is on the map from the closest one."""

    codes_KD: Tensor
    metric: str
    neighborhood: Neighborhood
    step: int

    def __call__(self, table: Table, weight_N: Tensor) -> Stats:
        codes_KD, grid = self.codes_KD.to(weight_N), self.neighborhood.grid
        first_N = table.closest(codes_KD, self.metric)[0]
        total = torch.zeros((), dtype=torch.float64, device=table.device)
        for rows, distance_NK in table.distance_blocks(codes_KD, self.metric):
            apart_NK = grid.distance(first_N[rows, None].cpu(), torch.arange(grid.size))
            reach_NK = self.neighborhood.weight(apart_NK, self.step).to(distance_NK)
            total += weight_N[rows].double() @ (reach_NK * distance_NK.square()).sum(1)
        return Stats(distortion=total)


def _rows(table: Table) -> Tensor:
    return torch.tensor(table.n, dtype=torch.float64, device=table.device)
