"""Data as the learning rules see it: dense, with missing values, or sparse, behind one set of questions.

Legend: N vectors x, D features, K codes w, metric as in ops/search.py.
    score_NK     what the closest code minimizes: |w|^2/2 - x.w (euclidean), -x.w/|w| (cosine), -x.w (dot)
    distance_NK  euclidean |x - w| = sqrt(|x|^2 + 2 score), cosine 1 - cos, dot -x.w
    stats_KC     weighted sums of the members of each code [K, D], then their weights [K, 1], or [K, D] where values
                 are missing
A missing value is left out of the distance and of the sums; what remains of a squared distance is scaled by
D / observed, as in sklearn.metrics.nan_euclidean_distances.

Scores are made in blocks of rows, and the smallest is found by NumPy: torch.argmin costs more than the matrix product.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

from topovq.ops.accumulate import accumulate
from topovq.ops.search import center_of, nearest, search_terms

ROWS = 1024  # rows of a block of scores
SCORES = 2**21  # of a block: more of them leave the cache before the smallest is found
CUDA_ROWS = 2**20  # rows of a block on a GPU: each takes a few launches
MOST_AXES = 256  # features up to which axes are looked for: that costs the cube of their number
FARTHEST = 100  # times as far from their mean as half the codes are: axes are not looked for with codes beyond
FLAT = 1e-6  # of the largest extent of the codes: what is smaller is rounding
BLOCK = 2**17  # numbers in a block of dense rows: they stay in the cache


class Table:
    """N vectors of D features on one device. Subclasses say how scores, sums and dense rows are made."""

    n: int
    dim: int
    dtype: torch.dtype
    device: torch.device

    def _scores(self, codes_KD: Tensor, metric: str) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Blocks (rows, score [n, K], scale [n]): scale is |x|^2 (euclidean, from the same origin) or |x| (cosine)."""
        raise NotImplementedError

    def statistics(self, index_N: Tensor, weight_N: Tensor, num_codes: int) -> Tensor:
        """stats_KC, in float64: what blocks add up to does not depend on where they are cut."""
        raise NotImplementedError

    def rows(self, chosen: Tensor | slice) -> Table:
        raise NotImplementedError

    def dense(self, chosen: slice | np.ndarray) -> np.ndarray:
        """These rows as a NumPy array, NaN where a value is missing."""
        raise NotImplementedError

    def slices(self) -> Iterator[slice]:
        """Rows that stay in the cache when they are dense, from the first to the last."""
        return _slices(self.n, CUDA_ROWS if self.device.type == "cuda" else max(1, BLOCK // self.dim))

    def totals(self, weight_N: Tensor) -> tuple[Tensor, Tensor]:
        """Sums [D] of the values, each times the weight of its row, and of the weights of values that are there."""
        sums_D, seen_D = (torch.zeros(self.dim, dtype=torch.float64, device=self.device) for _ in range(2))
        for rows in self.slices():
            x = torch.from_numpy(self.dense(rows)).to(self.device).double()
            there = ~x.isnan()
            sums_D += weight_N[rows].double() @ x.masked_fill(~there, 0)
            seen_D += weight_N[rows].double() @ there.double()
        return sums_D, seen_D

    def mean(self, weight_N: Tensor) -> Tensor:
        sums_D, seen_D = self.totals(weight_N)
        return (sums_D / seen_D).to(self.dtype)

    def centered_blocks(self, mean_D: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Dense blocks of x - mean, 0 where a value is missing."""
        raise NotImplementedError

    def closest(self, codes_KD: Tensor, metric: str) -> tuple[Tensor, Tensor]:
        """(index int64 [N], distance [N]) of the closest code; a tie goes to the lowest index, but for rounding."""
        indices, lowest, scales = [], [], []
        for _, score, scale in self._scores(codes_KD, metric):
            indices.append(_lowest(score))
            lowest.append(score.gather(1, indices[-1][:, None]))
            scales.append(scale)
        distance_N = self._to_distance(torch.cat(lowest)[:, 0], torch.cat(scales), slice(None), metric)
        return torch.cat(indices), distance_N

    def distance_to(self, codes_KD: Tensor, index_N: Tensor, metric: str) -> Tensor:
        """The distance [N] of each vector to the code of its index, from differences: digit for digit."""
        distances = []
        for rows in self.slices():
            x = torch.from_numpy(self.dense(rows)).to(self.device)
            missing = x.isnan()
            w = codes_KD[index_N[rows]].masked_fill(missing, 0)
            distance = pair_distance(x.masked_fill(missing, 0), w, metric)
            distances.append(distance * self._inflation(rows, distance) ** 0.5 if metric == "euclidean" else distance)
        return torch.cat(distances)

    def closest_two(self, codes_KD: Tensor, metric: str) -> Tensor:
        """Indices int64 [N, 2] of the closest code and the next."""
        index_N2 = torch.empty(self.n, 2, dtype=torch.int64, device=self.device)
        for rows, score, _ in self._scores(codes_KD, metric):
            first = _lowest(score)
            score.scatter_(1, first[:, None], torch.inf)
            index_N2[rows] = torch.stack([first, _lowest(score)], 1)
        return index_N2

    def distances(self, codes_KD: Tensor, metric: str) -> Tensor:
        """[N, K]."""
        distance_NK = torch.empty(self.n, len(codes_KD), dtype=self.dtype, device=self.device)
        for rows, distance in self.distance_blocks(codes_KD, metric):
            distance_NK[rows] = distance
        return distance_NK

    def distance_blocks(self, codes_KD: Tensor, metric: str) -> Iterator[tuple[slice, Tensor]]:
        """Blocks (rows, distance [n, K] in float64: a root doubles the digits that rounding takes)."""
        for rows, score, scale in self.double()._scores(codes_KD.double(), metric):
            yield rows, self._to_distance(score, scale[:, None], rows, metric)

    def double(self) -> Table:
        raise NotImplementedError

    def _to_distance(self, score: Tensor, scale: Tensor, rows: slice, metric: str) -> Tensor:
        """Turn scores into distances, in place."""
        if metric == "euclidean":
            return score.mul_(2).add_(scale).clamp_(min=0).mul_(self._inflation(rows, score)).sqrt_()
        if metric == "cosine":
            return score.div_(scale.clamp(min=torch.finfo(score.dtype).tiny)).add_(1)
        return score

    def _inflation(self, rows: slice, like: Tensor) -> Tensor | float:
        return 1.0


class DenseTable(Table):
    """x_ND: a float tensor without missing values."""

    def __init__(self, x_ND: Tensor) -> None:
        self.x_ND = x_ND
        self.n, self.dim = x_ND.shape
        self.dtype, self.device = x_ND.dtype, x_ND.device
        self._square_N: Tensor | None = None

    def closest(self, codes_KD: Tensor, metric: str) -> tuple[Tensor, Tensor]:
        axes_DR = self._few_axes(codes_KD) if metric == "euclidean" else None
        if self.x_ND.is_cuda:
            if axes_DR is None or axes_DR.shape[1] > self.dim / 2:  # its tiles are powers of two wide
                index_N = self._nearest(codes_KD, metric)
            else:
                center_D = codes_KD.mean(0)
                index_N = nearest((self.x_ND - center_D) @ axes_DR, (codes_KD - center_D) @ axes_DR)
            return index_N, self.distance_to(codes_KD, index_N, metric)
        return super().closest(codes_KD, metric) if axes_DR is None else self._closest_along(codes_KD, axes_DR)

    def _few_axes(self, codes_KD: Tensor) -> Tensor | None:
        cheap = len(codes_KD) >= self.dim and self.n >= 8 * self.dim and self.dim <= MOST_AXES
        return few_axes(codes_KD) if cheap and self.dtype == torch.float32 else None

    def _closest_along(self, codes_KD: Tensor, axes_DR: Tensor) -> tuple[Tensor, Tensor]:
        """`closest` for codes of that subspace: what of a vector is off it is as far from all codes."""
        center_D = codes_KD.mean(0)
        along_NR = self.x_ND @ axes_DR - center_D @ axes_DR
        index_N, distance_N = DenseTable(along_NR)._closest_all((codes_KD - center_D) @ axes_DR)
        off_N = self._squares() - 2 * (self.x_ND @ center_D) + center_D @ center_D - along_NR.square().sum(1)
        return index_N, distance_N.square_().add_(off_N.clamp_(min=0)).sqrt_()

    def _closest_all(self, codes_KD: Tensor) -> tuple[Tensor, Tensor]:
        return super().closest(codes_KD, "euclidean")

    def closest_two(self, codes_KD: Tensor, metric: str) -> Tensor:
        if not self.x_ND.is_cuda or self.dtype == torch.float64:
            return super().closest_two(codes_KD, metric)
        first_N = self._nearest(codes_KD, metric)
        return torch.stack([first_N, self._nearest(codes_KD, metric, first_N)], 1)

    def _nearest(self, codes_KD: Tensor, metric: str, other_than_N: Tensor | None = None) -> Tensor:
        """On a GPU: the closest code, or the closest but one, searched in the way that suits codes of a map."""
        if self.dtype == torch.float64:
            return nearest(self.x_ND, codes_KD, metric)
        from topovq.ops.triton.search import nearest_triton, proof_pays

        proof = proof_pays(self.x_ND, codes_KD, metric)
        return nearest_triton(self.x_ND, codes_KD, metric, "exact", other_than_N, proof)

    def distance_to(self, codes_KD: Tensor, index_N: Tensor, metric: str) -> Tensor:
        rows = CUDA_ROWS if self.x_ND.is_cuda else ROWS
        blocks = zip(self.x_ND.split(rows), index_N.split(rows))
        return torch.cat([pair_distance(x, codes_KD[index], metric) for x, index in blocks])

    def _scores(self, codes_KD: Tensor, metric: str) -> Iterator[tuple[slice, Tensor, Tensor]]:
        center_D, w_KD, bias_K = search_terms(codes_KD, metric, self.dtype)
        far = bool(center_D.any())  # else moving every block would be a pass over the data for nothing
        w_DK = -w_KD.T.contiguous()
        size = max(64, min(ROWS, SCORES // len(w_KD)))
        buffer = w_KD.new_empty(min(size, self.n), len(w_KD))
        for rows in _slices(self.n, size):
            x = self.x_ND[rows]
            if far:
                x = x - center_D
                scale = x.square().sum(1)
            else:
                scale = self._squares()[rows]
            yield (
                rows,
                torch.addmm(bias_K, x, w_DK, out=buffer[: len(x)]),
                scale.sqrt() if metric == "cosine" else scale,
            )

    def _squares(self) -> Tensor:
        if self._square_N is None:
            self._square_N = torch.cat([x.square().sum(1) for x in self.x_ND.split(ROWS)])
        return self._square_N

    def statistics(self, index_N: Tensor, weight_N: Tensor, num_codes: int) -> Tensor:
        if self.x_ND.is_cuda:
            sums_KD = torch.zeros(num_codes, self.dim, dtype=torch.float64, device=self.device)
            for x, weight, index in zip(*(part.split(CUDA_ROWS) for part in (self.x_ND, weight_N, index_N))):
                sums_KD += accumulate(x * weight[:, None], index, num_codes)[0]
        else:
            sums_KD = torch.from_numpy(_members(index_N, weight_N.double(), num_codes) @ self.x_ND.numpy())
        return torch.cat([sums_KD, _totals(index_N, weight_N, num_codes)[:, None]], 1)

    def rows(self, chosen: Tensor | slice) -> DenseTable:
        return DenseTable(self.x_ND[chosen])

    def dense(self, chosen: slice | np.ndarray) -> np.ndarray:
        return self.x_ND[chosen].cpu().numpy()

    def totals(self, weight_N: Tensor) -> tuple[Tensor, Tensor]:
        sums_D = torch.zeros(self.dim, dtype=torch.float64, device=self.device)
        for rows in self.slices():
            sums_D += weight_N[rows].double() @ self.x_ND[rows].double()
        return sums_D, weight_N.double().sum().expand(self.dim)

    def centered_blocks(self, mean_D: Tensor) -> Iterator[tuple[slice, Tensor]]:
        for rows in self.slices():
            yield rows, self.x_ND[rows] - mean_D

    def double(self) -> DenseTable:
        return self if self.dtype == torch.float64 else DenseTable(self.x_ND.double())


class MissingTable(Table):
    """x_ND: a float tensor with NaN where a value is missing."""

    def __init__(self, x_ND: Tensor) -> None:
        self.x_ND = x_ND
        self.n, self.dim = x_ND.shape
        self.dtype, self.device = x_ND.dtype, x_ND.device
        self.seen_ND = ~x_ND.isnan()
        self.filled_ND = x_ND.nan_to_num(0.0)

    def _scores(self, codes_KD: Tensor, metric: str) -> Iterator[tuple[slice, Tensor, Tensor]]:
        center_D = center_of(codes_KD) if metric == "euclidean" else torch.zeros_like(codes_KD[0])
        w_KD = codes_KD - center_D
        square_DK = w_KD.T.square()
        for rows in _slices(self.n, ROWS):
            seen = self.seen_ND[rows].to(self.dtype)
            x = (self.filled_ND[rows] - center_D) * seen
            score, scale = -(x @ w_KD.T), x.square().sum(1)
            if metric == "euclidean":
                score += seen @ square_DK / 2
            elif metric == "cosine":
                score /= (seen @ square_DK).sqrt().clamp(min=torch.finfo(self.dtype).tiny)
                scale = scale.sqrt()
            yield rows, score, scale

    def _inflation(self, rows: slice, like: Tensor) -> Tensor | float:
        share = self.dim / self.seen_ND[rows].sum(1).to(like.dtype)
        return share if like.ndim == 1 else share[:, None]

    def statistics(self, index_N: Tensor, weight_N: Tensor, num_codes: int) -> Tensor:
        both = torch.cat([self.filled_ND, self.seen_ND.to(self.dtype)], 1)
        return DenseTable(both).statistics(index_N, weight_N, num_codes)[:, :-1]

    def rows(self, chosen: Tensor | slice) -> MissingTable:
        return MissingTable(self.x_ND[chosen])

    def dense(self, chosen: slice | np.ndarray) -> np.ndarray:
        return self.x_ND[chosen].cpu().numpy()

    def centered_blocks(self, mean_D: Tensor) -> Iterator[tuple[slice, Tensor]]:
        for rows in self.slices():
            yield rows, (self.filled_ND[rows] - mean_D) * self.seen_ND[rows]

    def double(self) -> MissingTable:
        return self if self.dtype == torch.float64 else MissingTable(self.x_ND.double())


class SparseTable(Table):
    """x_ND: a SciPy CSR matrix; it stays sparse, on the CPU."""

    def __init__(self, x_ND: Any) -> None:
        self.x_ND = x_ND
        self.n, self.dim = x_ND.shape
        self.dtype = torch.float64 if x_ND.dtype == np.float64 else torch.float32
        self.device = torch.device("cpu")

    def _scores(self, codes_KD: Tensor, metric: str) -> Iterator[tuple[slice, Tensor, Tensor]]:
        if metric == "euclidean":  # from the origin: to move sparse data is to fill it
            w_KD, bias = codes_KD, (codes_KD.square().sum(1) / 2).numpy()
        else:
            _, w_KD, bias_K = search_terms(codes_KD, metric, self.dtype)
            bias = bias_K.numpy()
        w_DK = w_KD.T.numpy()
        for rows in _slices(self.n, ROWS):
            x = self.x_ND[rows]
            scale = np.asarray(x.multiply(x).sum(1)).reshape(-1).astype(self.x_ND.dtype)
            score = torch.from_numpy(bias - x @ w_DK)
            yield rows, score, torch.from_numpy(np.sqrt(scale) if metric == "cosine" else scale)

    def distance_to(self, codes_KD: Tensor, index_N: Tensor, metric: str) -> Tensor:
        """By the values that are there alone, in float64, for the sparse form has no differences."""
        x, codes = self.x_ND, codes_KD.double().numpy()
        row_E = np.repeat(np.arange(self.n), np.diff(x.indptr))
        dot_N = np.bincount(row_E, x.data * codes[index_N.numpy()[row_E], x.indices], minlength=self.n)
        square_N = np.bincount(row_E, x.data.astype(np.float64) ** 2, minlength=self.n)
        code_N = np.square(codes).sum(1)[index_N.numpy()]
        if metric == "euclidean":
            distance_N = np.sqrt((square_N - 2 * dot_N + code_N).clip(0))
        elif metric == "cosine":
            distance_N = 1 - dot_N / np.sqrt(square_N * code_N).clip(np.finfo(np.float64).tiny)
        else:
            distance_N = -dot_N
        return torch.from_numpy(distance_N).to(self.dtype)

    def statistics(self, index_N: Tensor, weight_N: Tensor, num_codes: int) -> Tensor:
        sums_KD = torch.from_numpy((_members(index_N, weight_N.double(), num_codes) @ self.x_ND).toarray())
        return torch.cat([sums_KD, _totals(index_N, weight_N, num_codes)[:, None]], 1)

    def rows(self, chosen: Tensor | slice) -> SparseTable:
        return SparseTable(self.x_ND[chosen.numpy() if isinstance(chosen, Tensor) else chosen])

    def dense(self, chosen: slice | np.ndarray) -> np.ndarray:
        return self.x_ND[chosen].toarray()

    def totals(self, weight_N: Tensor) -> tuple[Tensor, Tensor]:
        weight_N = weight_N.double()
        return torch.from_numpy(self.x_ND.T @ weight_N.numpy()), weight_N.sum().expand(self.dim)

    def centered_blocks(self, mean_D: Tensor) -> Iterator[tuple[slice, Tensor]]:
        for rows in self.slices():
            yield rows, torch.from_numpy(self.dense(rows)) - mean_D

    def double(self) -> SparseTable:
        return self if self.dtype == torch.float64 else SparseTable(self.x_ND.astype(np.float64))


@lru_cache(maxsize=2)  # by the tensor itself: all blocks of a pass have the same codes
def few_axes(codes_KD: Tensor) -> Tensor | None:
    """Orthonormal axes [D, R] of a subspace that holds the codes to within float32's rounding, where R is small.

    While the neighborhood is wide the codes are smooth over the map, and few axes hold them: a plane at the start.
    """
    w_KD = (codes_KD - codes_KD.mean(0)).double()
    size_K = w_KD.norm(dim=1)
    if center_of(codes_KD).any() or float(size_K.amax()) > FARTHEST * float(size_K.median()):
        return None  # far from the origin, or beside codes that are, squares of distances would lose their digits
    values_D, vectors_DD = torch.linalg.eigh(w_KD.T @ w_KD)
    rank = max(1, int((values_D > FLAT**2 * values_D[-1]).sum()))
    return vectors_DD[:, -rank:].float() if rank <= 0.6 * codes_KD.shape[1] else None


def pair_distance(x_ND: Tensor, w_ND: Tensor, metric: str) -> Tensor:
    """The distance of each row to the row beside it, [N], digit for digit."""
    if metric == "euclidean":
        return torch.linalg.vector_norm(x_ND - w_ND, dim=1)
    if metric == "cosine":
        return 1 - torch.nn.functional.cosine_similarity(x_ND, w_ND, dim=1)
    return -(x_ND * w_ND).sum(1)


def _slices(n: int, rows: int) -> Iterator[slice]:
    for start in range(0, n, rows):
        yield slice(start, min(n, start + rows))


def _lowest(score_NK: Tensor) -> Tensor:
    if score_NK.device.type == "cpu":
        return torch.from_numpy(score_NK.numpy().argmin(1))
    return score_NK.argmin(1)


def _members(index_N: Tensor, weight_N: Tensor, num_codes: int) -> Any:
    """The K x N sparse matrix whose row k holds the weights of the members of code k."""
    n = len(index_N)
    one_hot = scipy.sparse.csr_matrix((weight_N.numpy(), index_N.numpy(), np.arange(n + 1)), shape=(n, num_codes))
    return one_hot.T


def _totals(index_N: Tensor, weight_N: Tensor, num_codes: int) -> Tensor:
    return torch.bincount(index_N, weight_N.double(), minlength=num_codes)
