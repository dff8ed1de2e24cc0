"""GrowingNeuralGas: a graph of codes that grows where its error is largest (Fritzke 1995).

For each sample x, with s1 and s2 the two closest codes:
    the edge s1-s2 is made or made young again, the other edges of s1 grow older by 1, edges over `max_age` go,
    and codes without edges with them;
    error_s1 += |x - w_s1|^2;   w_s1 += rate (x - w_s1);   w_j += neighbor_rate (x - w_j) for neighbors j of s1
Every `insert_every` samples a code is put halfway between the one of largest error and its neighbor of largest error;
all errors fade by `fading` with each sample.
"""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import torch
from sklearn.utils import check_random_state

from topovq.som.checks import check_number, weighted_mean
from topovq.som.codes import CodesEstimator
from topovq.som.passes import TablePasses, check_columns
from topovq.som.tables import Table

NO_EDGE = -1


class GrowingNeuralGas(CodesEstimator):
    """A graph of codes that grows: the interface of `SelfOrganizingMap`, without a map or a fixed number of codes.

    max_codes      the graph stops growing there
    insert_every   samples from one new code to the next
    learning_rate, neighbor_rate   how far the closest code and its neighbors go toward a sample
    max_age        samples of a code after which an edge of it that was not confirmed goes
    split          share of their error that two codes keep when a third is put between them
    fading         how much of every error is forgotten with each sample
    max_iter       passes over the data, each in an order of its own
    device, n_jobs: for `predict` and `transform`; learning goes sample by sample on the CPU

    Samples are events in an order, so there are no sample weights. Distances are Euclidean.
    Fitted: codes_ [K, D], edges_ [E, 2], labels_ [N], quantization_error_, n_iter_, n_features_in_, and for each pass
    quantization_errors_.
    """

    edges_: np.ndarray
    n_iter_: int

    def __init__(
        self,
        max_codes: int = 100,
        *,
        insert_every: int = 100,
        learning_rate: float = 0.1,
        neighbor_rate: float = 0.005,
        max_age: int = 50,
        split: float = 0.5,
        fading: float = 0.005,
        max_iter: int = 10,
        device: str = "auto",
        n_jobs: int | None = None,
        random_state: Any = None,
    ) -> None:
        self.max_codes = max_codes
        self.insert_every = insert_every
        self.learning_rate = learning_rate
        self.neighbor_rate = neighbor_rate
        self.max_age = max_age
        self.split = split
        self.fading = fading
        self.max_iter = max_iter
        self.device = device
        self.n_jobs = n_jobs
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None) -> Self:
        """Grow a graph over X [N, D]: an array, a DataFrame, a sparse matrix or a tensor; NaN is a missing value."""
        self._check_parameters()
        table = self._table(X, reset=True)
        random = check_random_state(self.random_state)
        graph = self._start(table, random)
        for _ in range(self.max_iter):
            self._grow(graph, table, random.permutation(table.n))
        self._finish(graph, table)
        return self

    def partial_fit(self, X: Any, y: Any = None) -> Self:
        """Go on growing with a batch, in the order it has, or with each batch of an iterable."""
        if self._took_batches(X, None):
            return self
        self._check_parameters()
        first = not hasattr(self, "codes_")
        table = self._table(X, reset=first)
        graph = self._start(table, check_random_state(self.random_state)) if first else self._graph()
        self._grow(graph, table, np.arange(table.n))
        self._finish(graph, table)
        return self

    def _start(self, table: Table, random: np.random.RandomState) -> _Graph:
        """Two codes at samples, joined; where there is one sample, both are there."""
        weight_N = torch.ones(table.n, dtype=table.dtype, device=table.device)
        self._forget()
        check_columns(TablePasses([table], [weight_N]), getattr(self, "feature_names_in_", None))
        chosen = random.choice(table.n, 2, replace=table.n < 2)
        codes = table.dense(chosen)
        codes = np.where(np.isnan(codes), table.mean(weight_N).cpu().numpy(), codes)
        graph = _Graph(codes, int(self.max_codes))
        graph.age[0, 1] = graph.age[1, 0] = 0
        self.n_iter_ = 0
        self.quantization_errors_ = np.empty(0)
        self._error, self._seen = graph.error[:2].copy(), 0
        return graph

    def _graph(self) -> _Graph:
        """The graph as the last call left it."""
        graph = _Graph(self.codes_, int(self.max_codes))
        graph.error[: graph.size] = self._error
        for (i, j), age in zip(self.edges_, self._age):
            graph.age[i, j] = graph.age[j, i] = age
        graph.seen = self._seen
        return graph

    def _grow(self, graph: _Graph, table: Table, order_N: np.ndarray) -> None:
        total = 0.0
        block = max(1, 2**20 // table.dim)
        for start in range(0, table.n, block):
            for x_D in table.dense(order_N[start : start + block]):
                total += graph.learn(x_D, self.learning_rate, self.neighbor_rate, self.max_age)
                graph.seen += 1
                if graph.seen % self.insert_every == 0:
                    graph.insert(self.split)
                graph.error[: graph.size] *= 1 - self.fading
        self.quantization_errors_ = np.append(self.quantization_errors_, total / table.n)
        self.n_iter_ += 1

    def _finish(self, graph: _Graph, table: Table) -> None:
        size = graph.size
        self.codes_ = graph.codes[:size].copy()
        self.edges_ = np.argwhere(np.triu(graph.age[:size, :size] != NO_EDGE, 1))
        self._age = graph.age[self.edges_[:, 0], self.edges_[:, 1]]
        self._error, self._seen = graph.error[:size].copy(), graph.seen
        with self._threads():
            codes_KD = self._codes(table)
            index_N = table.closest(codes_KD, self.metric)[0]
            distance_N = table.distance_to(codes_KD, index_N, self.metric)
        self.labels_ = index_N.cpu().numpy()
        self.quantization_error_ = weighted_mean(distance_N, torch.ones_like(distance_N))

    def _check_parameters(self) -> None:
        check_number("max_codes", self.max_codes, low=2, whole=True)
        check_number("insert_every", self.insert_every, low=1, whole=True)
        check_number("max_age", self.max_age, low=1, whole=True)
        check_number("max_iter", self.max_iter, low=1, whole=True)
        for name in ("learning_rate", "neighbor_rate", "split", "fading"):
            check_number(name, getattr(self, name), low=0, high=1)


class _Graph:
    """Codes, their errors, and the ages of the edges between them (-1 where there is none), in buffers of full size."""

    def __init__(self, codes_KD: np.ndarray, most: int) -> None:
        most = max(most, len(codes_KD))
        self.size = len(codes_KD)
        self.codes = np.zeros((most, codes_KD.shape[1]), dtype=codes_KD.dtype)
        self.codes[: self.size] = codes_KD
        self.error = np.zeros(most)
        self.age = np.full((most, most), NO_EDGE, dtype=np.int64)
        self.seen = 0

    def learn(self, x_D: np.ndarray, rate: float, neighbor_rate: float, max_age: int) -> float:
        """One sample; returns its distance to the closest code."""
        codes = self.codes[: self.size]
        delta_KD = x_D - codes
        missing_D = np.isnan(x_D)
        if missing_D.any():
            delta_KD[:, missing_D] = 0
        square_K = np.einsum("kd,kd->k", delta_KD, delta_KD)
        square_K *= x_D.size / (x_D.size - missing_D.sum())
        first = int(square_K.argmin())
        lowest = float(square_K[first])
        square_K[first] = np.inf
        second = int(square_K.argmin())
        age_K = self.age[first, : self.size]
        age_K[age_K != NO_EDGE] += 1
        age_K[second] = 0
        old = age_K > max_age
        age_K[old] = NO_EDGE
        self.age[: self.size, first] = age_K
        self.error[first] += lowest
        codes[first] += rate * delta_KD[first]
        near = np.flatnonzero(age_K != NO_EDGE)
        codes[near] += neighbor_rate * delta_KD[near]
        if old.any():
            self._drop_lonely()
        return lowest**0.5

    def insert(self, split: float) -> None:
        """A code halfway between the worst code and its worst neighbor, in place of the edge between them."""
        if self.size == len(self.codes):
            return
        worst = int(self.error[: self.size].argmax())
        near = np.flatnonzero(self.age[worst, : self.size] != NO_EDGE)
        other, new = int(near[self.error[near].argmax()]), self.size
        self.size += 1
        self.codes[new] = (self.codes[worst] + self.codes[other]) / 2
        self.error[[worst, other]] *= split
        self.error[new] = self.error[worst]
        self.age[worst, other] = self.age[other, worst] = NO_EDGE
        for joined in (worst, other):
            self.age[new, joined] = self.age[joined, new] = 0

    def _drop_lonely(self) -> None:
        """Remove codes without edges; the others move up."""
        kept = np.flatnonzero((self.age[: self.size, : self.size] != NO_EDGE).any(1))
        if len(kept) == self.size:
            return
        codes, error, age = self.codes[kept], self.error[kept], self.age[np.ix_(kept, kept)]
        self.size = len(kept)
        self.age[:] = NO_EDGE
        self.codes[: self.size], self.error[: self.size] = codes, error
        self.age[: self.size, : self.size] = age
