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
from topovq.som.batch import BatchEstimator
from topovq.som.checks import check_number
from topovq.som.learn import divided
from topovq.som.passes import Passes, TablePasses
from topovq.som.questions import Errors, Ranks
from topovq.som.start import even_places, initial_codes
from topovq.som.stats import Stats

AXES = 4  # principal components over which the start spreads


class NeuralGas(BatchEstimator):
    """Codes that learn by rank: the interface of `SelfOrganizingMap`, without a map.

    n_codes            None: 5 sqrt(N), and at most half as many as there are samples
    range, range_end   lambda in the first and the last pass; None is half the number of codes
    learning_rate, learning_rate_end   of `partial_fit`, whose running averages they weigh
    metric, init, max_iter, tol, device, n_jobs, random_state: as in `SelfOrganizingMap`

    Fitted: codes_ [K, D], edges_ [E, 2], labels_ [N], quantization_error_, n_iter_, n_features_in_, and for each pass
    quantization_errors_.
    """

    edges_: np.ndarray

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
        passes = self._passes(X, sample_weight, reset=True)
        with self._threads():
            self._fit(passes)
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
        passes = TablePasses([table], [self._weights(sample_weight, X, table)])
        with self._threads():
            if first:
                self._begin(passes)
            beta = float(self._schedule(self.learning_rate, self.learning_rate_end)(torch.tensor(self.n_iter_)))
            stats = passes.added(self._question(passes))
            stats_KC = torch.cat([stats["sums"], stats["weights"]], 1)
            if self._running is not None:
                stats_KC = torch.lerp(torch.from_numpy(self._running).to(stats_KC), stats_KC, beta)
            self._running = stats_KC.cpu().numpy()
            self.codes_ = divided(stats_KC, self._codes(passes)).cpu().numpy()
            self._record(float(stats["error"] / stats["weight"]))
            self._finish(passes)
        return self

    def _question(self, passes: Passes) -> Ranks:
        """What the next pass asks: sums [K, D] and weights [K, D] of all samples, each by its rank for the code."""
        count = len(self.codes_)
        start = count / 2 if self.range is None else float(self.range)
        reach = float(self._schedule(max(start, self.range_end), self.range_end)(torch.tensor(self.n_iter_)))
        h_K = torch.exp(-torch.arange(count, device=passes.device, dtype=torch.float64) / reach).to(passes.dtype)
        return Ranks(self._codes(passes), self.metric, h_K)

    def _moved(self, stats: Stats, codes_KD: Tensor) -> Tensor:
        return divided(torch.cat([stats["sums"], stats["weights"]], 1), codes_KD)

    def _first_codes(self, passes: Passes) -> Tensor:
        count = _default_codes(passes.distinct()) if self.n_codes is None else int(self.n_codes)
        places_KM = even_places(count, min(AXES, passes.dim))
        return initial_codes(self.init, passes, places_KM, check_random_state(self.random_state))

    def _finish(self, passes: Passes) -> None:
        labels: list[np.ndarray] | None = [] if passes.keeps_labels else None
        pairs: list[Tensor] = []
        errors = passes.added(Errors(self._codes(passes), self.metric, labels=labels, pairs=pairs))
        if labels is not None:
            self.labels_ = np.concatenate(labels)
        edges_E2 = torch.cat(pairs).unique(dim=0)
        self.edges_ = edges_E2[edges_E2[:, 0] != edges_E2[:, 1]].numpy()
        self.quantization_error_ = float(errors["error"] / errors["weight"])

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
