"""The learning rules on a table of data: batch, mini-batch with running averages, and online.

Legend: K codes w, A(t) the neighborhood matrix, S and C the weighted sums of the members of each code and their weights
(tables.py), beta the learning rate. Time t runs from 0 and counts passes over the data; it may be a fraction.
    batch       w = (A^T S) / (A^T C)
    mini-batch  m = (1 - beta) m + beta A^T S;  N = (1 - beta) N + beta A^T C;  w = m / N
    online      w_k += beta A[k*, k] (x - w_k), one sample at a time
Each agrees with its plain form in rules.py and codebook.py; here they take weights, missing values and sparse data.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from topovq.grid import Grid
from topovq.neighborhood import Neighborhood, Schedule
from topovq.ops.smooth import smooth
from topovq.som.stats import Stats
from topovq.som.tables import Table


def smoothed(stats_KC: Tensor, neighborhood: Neighborhood, t: float) -> Tensor:
    """A(t)^T stats."""
    step = torch.tensor(t, dtype=torch.float64, device=stats_KC.device)
    sums, last = smooth(stats_KC[:, :-1], stats_KC[:, -1], neighborhood, step)
    return torch.cat([sums, last[:, None]], 1)


def divided(stats_KC: Tensor, codes_KD: Tensor) -> Tensor:
    """New codes S / C; a code, or a feature of one, that received no weight to speak of stays where it is."""
    dim = codes_KD.shape[1]
    sums_KD, weights = stats_KC[:, :dim], stats_KC[:, dim:]
    reached = weights > torch.finfo(weights.dtype).tiny * 1e8  # below, a quotient has lost its digits
    return torch.where(reached, sums_KD / weights.where(reached, 1), codes_KD).to(codes_KD.dtype)


def batch(stats: Stats, codes_KD: Tensor, neighborhood: Neighborhood, t: float) -> Tensor:
    """New codes after one pass, from what it said about the old ones."""
    return divided(smoothed(torch.cat([stats["sums"], stats["weights"]], 1), neighborhood, t), codes_KD)


def minibatch(
    table: Table, weight_N: Tensor, codes_KD: Tensor, running_KC: Tensor, neighborhood: Neighborhood, t: float,
    beta: float, metric: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(new codes, new running averages, distance [N] to the old codes) after one batch."""
    index_N, distance_N = table.closest(codes_KD, metric)
    stats_KC = table.statistics(index_N, weight_N, len(codes_KD))
    running_KC = torch.lerp(running_KC, smoothed(stats_KC, neighborhood, t), beta)
    return divided(running_KC, codes_KD), running_KC, distance_N


def first_average(codes_KD: Tensor, batch_weight: float, missing: bool) -> Tensor:
    """Running averages that agree with the codes, and weigh as much as one batch spread evenly over them."""
    codes_KD = codes_KD.double()
    weights = codes_KD.new_full((len(codes_KD), codes_KD.shape[1] if missing else 1), batch_weight / len(codes_KD))
    return torch.cat([codes_KD * weights, weights], 1)


class Online:
    """The online rule: one sample at a time, NumPy on buffers that are made once."""

    def __init__(self, codes_KD: np.ndarray, grid: Grid, kind: str, metric: str) -> None:
        self.w_DK = np.ascontiguousarray(codes_KD.T)
        self.kind, self.metric, self.periods = kind, metric, grid.periods
        self.position_MK = np.ascontiguousarray(grid.positions().numpy().T).astype(self.w_DK.dtype)
        self.buffer_DK = np.empty_like(self.w_DK)
        self.score_K, self.weight_K, self.delta_K = (np.empty_like(self.w_DK[0]) for _ in range(3))

    def learn(self, x_ND: np.ndarray, weight_N: np.ndarray, width_N: np.ndarray, beta_N: np.ndarray) -> np.ndarray:
        """Take the samples in order; returns each one's distance to its closest code at that time."""
        distance_N = np.empty(len(x_ND))
        holes_N = np.isnan(x_ND).any(1)
        widths, betas, weights, holes = width_N.tolist(), beta_N.tolist(), weight_N.tolist(), holes_N.tolist()
        for i, x_D in enumerate(x_ND):
            if weights[i] == 0:
                distance_N[i] = 0
            elif holes[i]:
                distance_N[i] = self._learn_seen(x_D, widths[i], betas[i], weights[i])
            else:
                distance_N[i] = self._learn_one(self.w_DK, self.buffer_DK, x_D, widths[i], betas[i], weights[i])
        return distance_N

    def _learn_seen(self, x_D: np.ndarray, width: float, beta: float, weight: float) -> float:
        seen = ~np.isnan(x_D)
        w = self.w_DK[seen]
        distance = self._learn_one(w, np.empty_like(w), x_D[seen], width, beta, weight)
        self.w_DK[seen] = w
        return distance * math.sqrt(len(x_D) / len(w)) if self.metric == "euclidean" else distance

    def _learn_one(
        self, w_DK: np.ndarray, buffer_DK: np.ndarray, x_D: np.ndarray, width: float, beta: float, weight: float
    ) -> float:
        score_K, weight_K = self.score_K, self.weight_K
        np.subtract(x_D[:, None], w_DK, out=buffer_DK)
        if self.metric == "euclidean":  # from the differences, which the update needs in any case
            np.einsum("dk,dk->k", buffer_DK, buffer_DK, out=score_K)
        else:
            np.matmul(-x_D, w_DK, out=score_K)
            if self.metric == "cosine":
                np.einsum("dk,dk->k", w_DK, w_DK, out=weight_K)
                np.sqrt(weight_K, out=weight_K)
                np.maximum(weight_K, np.finfo(w_DK.dtype).tiny, out=weight_K)
                np.divide(score_K, weight_K, out=score_K)
        winner = int(score_K.argmin())
        lowest = float(score_K[winner])
        self._neighbors(winner, width)
        np.multiply(weight_K, beta, out=weight_K)
        if weight != 1:  # as many presentations of the sample: 1 - (1 - beta A)^weight
            weight_K[:] = 1 - (1 - weight_K) ** weight
        np.multiply(buffer_DK, weight_K, out=buffer_DK)
        np.add(w_DK, buffer_DK, out=w_DK)
        if self.metric == "euclidean":
            return math.sqrt(lowest)
        return lowest if self.metric == "dot" else 1 + lowest / max(float(np.linalg.norm(x_D)), 1e-300)

    def _neighbors(self, winner: int, width: float) -> None:
        """Row A[k*, :] into weight_K."""
        weight_K, delta_K = self.weight_K, self.delta_K
        if self.kind == "none":
            weight_K[:] = 0
            weight_K[winner] = 1
            return
        for axis, (position_K, period) in enumerate(zip(self.position_MK, self.periods)):
            np.subtract(position_K, position_K[winner], out=delta_K)
            if math.isfinite(period):
                np.abs(delta_K, out=delta_K)
                np.minimum(delta_K, period - delta_K, out=delta_K)
            np.multiply(delta_K, delta_K, out=delta_K)
            if axis:
                np.add(weight_K, delta_K, out=weight_K)
            else:
                weight_K[:] = delta_K
        if self.kind == "hard":
            np.less_equal(weight_K, (width + 1e-6) ** 2, out=weight_K, casting="unsafe")
        elif self.kind == "gaussian":
            np.multiply(weight_K, -1 / width**2, out=weight_K)
            np.exp(weight_K, out=weight_K)
        else:
            np.sqrt(weight_K, out=weight_K)
            np.multiply(weight_K, -1 / width, out=weight_K)
            np.exp(weight_K, out=weight_K)


def values(schedule: Schedule, t_N: np.ndarray) -> np.ndarray:
    """A schedule at many times [N]."""
    return schedule(torch.from_numpy(t_N)).numpy()
