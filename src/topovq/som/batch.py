"""BatchEstimator: the batch rule as a pair of steps, whatever holds the rows.

`statistics(X)` says what some rows mean for the codes, and `update(stats)` moves the codes. Statistics add up, so the
rows may be anywhere: `fit` does nothing else, pass by pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from topovq.som.codes import CodesEstimator
from topovq.som.passes import Passes, Scaling, check_columns, check_weight
from topovq.som.questions import Question
from topovq.som.stats import Asked, Stats

# What a fit says of its codes, which is not true of those after another update
MEASURED = (
    "labels_", "hits_", "edges_", "quantization_error_", "topographic_error_", "code_clusters_", "code_labels_",
    "class_shares_", "classes_",
)  # fmt: skip


class BatchEstimator(CodesEstimator):
    """Codes that move once in a pass over all rows."""

    max_iter: int
    n_iter_: int
    _running: np.ndarray | None  # sums and weights of `partial_fit`, so that it goes on from call to call

    def start(self, X: Any, sample_weight: Any = None) -> Self:
        """Put the codes where a fit of X starts, and go no further: `statistics` and `update` do the passes."""
        self._check_parameters()
        passes = self._passes(X, sample_weight, reset=True)
        with self._threads():
            self._begin(passes)
        return self

    def statistics(self, X: Any, sample_weight: Any = None) -> Stats:
        """What the rows of X say about the codes as they are; those of several parts add up to those of all.

        som.start(some)
        for _ in range(som.max_iter):
            som.update(sum(som.statistics(part) for part in parts))
        """
        passes = self._fitted_passes(X, sample_weight)
        with self._threads():
            return passes.added(self._question(passes)).of(Asked.about(self.codes_, self.n_iter_))

    def update(self, stats: Stats) -> Self:
        """Move the codes by one pass of the batch rule, of which `statistics` said this about all rows.

        Statistics are good for one update: after it the codes are others. The radius (of a neural gas, the range)
        falls until pass `max_iter`; passes beyond have its end value, so go on as long as the error falls. What was
        measured of the codes before, such as `labels_` and `hits_`, is dropped.
        """
        check_is_fitted(self, "codes_")
        if not isinstance(stats, Stats):
            raise TypeError(f"{stats!r:.80} is no Stats: expected what statistics(X) gives")
        count, dim = self.codes_.shape
        found = {name: tuple(stats[name].shape) for name in ("sums", "weights") if name in stats}
        if found.get("sums") != (count, dim) or found.get("weights") not in ((count, 1), (count, dim)):
            raise ValueError(f"{stats} is not of {count} codes of {dim} features: expected what statistics(X) gives")
        if stats.asked is not None and not stats.asked.like(Asked.about(self.codes_, self.n_iter_)):
            raise ValueError(
                f"these statistics are of other codes (after {stats.asked.passes} passes; the map's had "
                f"{self.n_iter_}): take statistics(X) anew after each update"
            )
        check_weight(stats)
        for name in [name for name in MEASURED if name in vars(self)]:
            delattr(self, name)
        self._running = None
        self._move(stats)
        return self

    def _move(self, stats: Stats) -> None:
        self.codes_ = self._moved(stats, torch.from_numpy(self.codes_).to(stats["sums"].device)).cpu().numpy()
        self._record(float(stats["error"] / stats["weight"]))

    def _fit(self, passes: Passes, say: Callable[[str], None] = lambda title: None) -> None:
        """The start and all passes, then what is measured of the codes."""
        self._begin(passes)
        while self.n_iter_ < self.max_iter and not self._converged():
            self._move(passes.added(self._question(passes)))
            say(f"pass {self.n_iter_}, quantization error {self.quantization_errors_[-1]:.4g}")
        self._finish(passes)

    def _begin(self, passes: Passes) -> None:
        """Everything a fit starts from; what an earlier fit left is forgotten."""
        self._forget()
        check_columns(passes, getattr(self, "feature_names_in_", None))
        if getattr(self, "standardize", False):
            scaling = Scaling(passes.mean_D, passes.deviation())
            passes.standardize(scaling)
            self.mean_, self.scale_ = scaling.mean_D.cpu().numpy(), scaling.scale_D.cpu().numpy()
        self._running = None
        self.n_iter_ = 0
        self.quantization_errors_ = np.empty(0)
        self.codes_ = self._first_codes(passes).cpu().numpy()

    def _record(self, error: float) -> None:
        """One pass is done, whose codes had this error before."""
        self.quantization_errors_ = np.append(self.quantization_errors_, error)
        self.n_iter_ += 1

    # What the estimators say

    def _check_parameters(self) -> None:
        raise NotImplementedError

    def _first_codes(self, passes: Passes) -> Tensor:
        raise NotImplementedError

    def _question(self, passes: Passes) -> Question:
        """What the next pass asks of the rows; Members, or a kin of it."""
        raise NotImplementedError

    def _finish(self, passes: Passes) -> None:
        """Measure the codes: one more pass."""
        raise NotImplementedError

    def _moved(self, stats: Stats, codes_KD: Tensor) -> Tensor:
        """New codes, from what the pass said about these."""
        raise NotImplementedError
