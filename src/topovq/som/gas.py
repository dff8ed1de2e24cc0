"""NeuralGas: codes without a map, each updated by its rank among all codes for a sample.

Legend: N samples x, K codes w, rank_nk = number of codes closer to x_n than w_k, lambda the range.
    batch   w_k = sum_n h(rank_nk) x_n / sum_n h(rank_nk),   h(r) = exp(-r / lambda)
lambda falls over the passes, from `range` to `range_end`; with lambda near 0 this is K-means.
Two codes are joined by an edge if some sample has them as its two closest ones (competitive Hebbian learning).
"""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import torch
from sklearn.utils import check_random_state
from torch import Tensor

from topovq.neighborhood import Schedule
from topovq.som.codes import CodesEstimator, check_number, distinct_samples, weighted_mean
from topovq.som.learn import divided
from topovq.som.start import even_places, initial_codes
from topovq.som.tables import Table

AXES = 4  # principal components over which the start spreads


class NeuralGas(CodesEstimator):
    """Codes that learn by rank: the interface of `SelfOrganizingMap`, without a map.

    n_codes            None: 5 sqrt(N), and at most half as many as there are samples
    range, range_end   lambda in the first and the last pass; None is half the number of codes
    learning_rate, learning_rate_end   of `partial_fit`, whose running averages they weigh
    metric, init, max_iter, tol, device, n_jobs, random_state: as in `SelfOrganizingMap`

    Fitted: codes_ [K, D], edges_ [E, 2], labels_ [N], quantization_error_, n_iter_, n_features_in_, and for each pass
    quantization_errors_.
    """

    edges_: np.ndarray
    n_iter_: int
    _running: np.ndarray | None

    def __init__(
        self,
        n_codes: int | None = None,
        *,
        range: float | None = None,
        range_end: float = 0.1,
        learning_rate: float = 0.5,
        learning_rate_end: float = 0.1,
        metric: str = "euclidean",
        init: Any = "pca",
        max_iter: int = 20,
        tol: float | None = None,
        device: str = "auto",
        n_jobs: int | None = None,
        random_state: Any = None,
    ) -> None:
        self.n_codes = n_codes
        self.range = range
        self.range_end = range_end
        self.learning_rate = learning_rate
        self.learning_rate_end = learning_rate_end
        self.metric = metric
        self.init = init
        self.max_iter = max_iter
        self.tol = tol
        self.device = device
        self.n_jobs = n_jobs
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        """Fit the codes to X [N, D]: an array, a DataFrame, a sparse matrix or a tensor; NaN is a missing value."""
        self._check_parameters()
        table = self._table(X, reset=True)
        weight_N = self._weights(sample_weight, X, table)
        with self._threads():
            codes_KD = self._start(table, weight_N)
            while self.n_iter_ < self.max_iter and not self._converged():
                stats_KC = self._statistics(table, weight_N, codes_KD)
                codes_KD = divided(stats_KC, codes_KD)
            self._finish(table, weight_N, codes_KD)
        return self

    def partial_fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        """One more update, of running averages, from a batch or from each batch of an iterable.

        The schedules go on from call to call, over `max_iter` batches; the first batch gives the start.
        """
        if self._took_batches(X, sample_weight):
            return self
        self._check_parameters()
        first = not hasattr(self, "codes_")
        table = self._table(X, reset=first)
        weight_N = self._weights(sample_weight, X, table)
        with self._threads():
            codes_KD = self._start(table, weight_N) if first else self._codes(table)
            beta = float(self._schedule(self.learning_rate, self.learning_rate_end)(torch.tensor(self.n_iter_)))
            stats_KC = self._statistics(table, weight_N, codes_KD)
            if self._running is not None:
                stats_KC = torch.lerp(torch.from_numpy(self._running).to(stats_KC), stats_KC, beta)
            self._running = stats_KC.cpu().numpy()
            self._finish(table, weight_N, divided(stats_KC, codes_KD))
        return self

    def _statistics(self, table: Table, weight_N: Tensor, codes_KD: Tensor) -> Tensor:
        """Sums [K, D] and weights [K, D] of all samples, each by its rank for the code; one pass is counted."""
        start = len(codes_KD) / 2 if self.range is None else float(self.range)
        reach = float(self._schedule(max(start, self.range_end), self.range_end)(torch.tensor(self.n_iter_)))
        h_K = torch.exp(-torch.arange(len(codes_KD), device=table.device, dtype=torch.float64) / reach).to(weight_N)
        stats_KC = codes_KD.new_zeros(len(codes_KD), 2 * table.dim)
        total = 0.0
        for rows, distance_NK in table.distance_blocks(codes_KD, self.metric):
            order_NK = distance_NK.argsort(dim=1, stable=True)
            h_NK = torch.empty_like(distance_NK, dtype=table.dtype).scatter_(1, order_NK, h_K.expand(len(order_NK), -1))
            h_NK *= weight_N[rows, None]
            part = table.rows(rows)
            x = torch.from_numpy(part.dense(slice(None))).to(table.device)
            seen = ~x.isnan()
            stats_KC += h_NK.T @ torch.cat([x.masked_fill(~seen, 0), seen.to(x.dtype)], 1)
            total += float(weight_N[rows].double() @ distance_NK.amin(1))
        self.quantization_errors_ = np.append(self.quantization_errors_, total / float(weight_N.double().sum()))
        self.n_iter_ += 1
        return stats_KC

    def _start(self, table: Table, weight_N: Tensor) -> Tensor:
        self._forget()
        self._check_columns(table, weight_N)
        self._running = None
        self.n_iter_ = 0
        self.quantization_errors_ = np.empty(0)
        count = _default_codes(distinct_samples(table, weight_N)) if self.n_codes is None else int(self.n_codes)
        places_KM = even_places(count, min(AXES, table.dim))
        return initial_codes(self.init, table, weight_N, places_KM, check_random_state(self.random_state))

    def _finish(self, table: Table, weight_N: Tensor, codes_KD: Tensor) -> None:
        self.codes_ = codes_KD.cpu().numpy()
        if len(codes_KD) == 1:
            index_N, self.edges_ = table.closest(codes_KD, self.metric)[0], np.empty((0, 2), dtype=np.int64)
        else:
            both_N2 = table.closest_two(codes_KD, self.metric)
            index_N = both_N2[:, 0]
            self.edges_ = both_N2[weight_N > 0].sort(dim=1).values.unique(dim=0).cpu().numpy()
        self.labels_ = index_N.cpu().numpy()
        self.quantization_error_ = weighted_mean(table.distance_to(codes_KD, index_N, self.metric), weight_N)

    def _check_parameters(self) -> None:
        check_number("max_iter", self.max_iter, low=1, whole=True)
        check_number("range_end", self.range_end, low=1e-6)
        check_number("learning_rate_end", self.learning_rate_end, low=1e-6, high=1)
        check_number("learning_rate", self.learning_rate, low=self.learning_rate_end, high=1)
        if self.range is not None:
            check_number("range", self.range, low=self.range_end)
        if self.n_codes is not None:
            check_number("n_codes", self.n_codes, low=1, whole=True)
        if self.tol is not None:
            check_number("tol", self.tol, low=0)

    def _schedule(self, start: float, end: float) -> Schedule:
        return Schedule.exponential(start, end, max(1, int(self.max_iter) - 1))


def _default_codes(samples: int) -> int:
    return max(1, min(round(5 * samples**0.5), samples // 2))
