"""nearest: which code is closest to each vector, without an N x K tensor.

Legend: N vectors, K codes, D dimensions.
    euclidean  argmin_k |x - w_k|^2
    dot        argmax_k x . w_k
    cosine     argmax_k x . w_k / |w_k|
The lowest index wins a tie. A vector with NaN or infinity still gets a valid index. A code with one of them, or whose
square overflows, is never chosen while there is another.

Euclidean distances are compared as |w|^2/2 - x.w after both are moved by a center among the codes (`center_of`):
distances do not change under translation, and the rounding error then scales with the spread of the codes instead of
their distance from the origin. A few codes far away from the others do not move the center.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from topovq.ops.direct import plain

METRICS = ("euclidean", "dot", "cosine")
PRECISIONS = ("exact", "fast")
ROWS = 1024  # vectors per block on the CPU
COLUMNS = 48  # codes in a block are a multiple of this, which the tiles of matrix products (float32, float64) divide
SAMPLE = 32  # codes among which the center is sought
SPREAD = 2_654_435_761  # a prime beyond any number of codes: its multiples, modulo that number, are all different
GOLDEN = 0.618034  # its multiples, modulo 1, are spread evenly and never repeat
BLOCK = 2**22  # scores per block on the CPU: 16 MiB of float32


def check_metric(metric: str) -> None:
    if metric not in METRICS:
        raise ValueError(f"metric={metric!r} is unknown; choose one of {', '.join(map(repr, METRICS))}")


def check_precision(precision: str) -> None:
    if precision not in PRECISIONS:
        raise ValueError(f"precision={precision!r} is unknown; choose one of {', '.join(map(repr, PRECISIONS))}")


def nearest(x_ND: Tensor, codes_KD: Tensor, metric: str = "euclidean", precision: str = "exact") -> Tensor:
    """Index int64 [N] of the closest code for each vector.

    precision  "exact": as float64 would choose, but for ties within float32 rounding; "fast": on CUDA with 11 bits of
               each factor (as TF32 has), elsewhere the same as exact
    """
    check_metric(metric)
    check_precision(precision)
    if x_ND.ndim != 2 or codes_KD.ndim != 2 or x_ND.shape[1] != codes_KD.shape[1]:
        raise ValueError(
            f"vectors of shape {tuple(x_ND.shape)} and codes of shape {tuple(codes_KD.shape)} do not fit: "
            "expected [N, D] and [K, D]"
        )
    if codes_KD.shape[0] < 1:
        raise ValueError("there are no codes: expected at least one row")
    if torch.compiler.is_exporting():
        from topovq.ops.exported import nearest_exported

        return nearest_exported(x_ND, codes_KD.detach(), metric)
    operation = _compute if plain(x_ND) else _nearest
    return operation(x_ND.detach(), codes_KD.detach(), metric, precision)


def nearest_reference(x_ND: Tensor, codes_KD: Tensor, metric: str = "euclidean") -> Tensor:
    """The definition, with the N x K matrix: for tests."""
    if metric == "euclidean":
        score_NK = ((x_ND[:, None, :] - codes_KD[None, :, :]) ** 2).sum(-1)
    else:
        codes_KD = torch.nn.functional.normalize(codes_KD, dim=1) if metric == "cosine" else codes_KD
        score_NK = -(x_ND @ codes_KD.T)
    return score_NK.argmin(1)


def center_of(codes_KD: Tensor) -> Tensor:
    """A point [D] that most codes are near to, seen from the origin; the origin itself where there is none.

    Of some codes (`sample_of`) it is the one in the middle along one direction, so codes far away from the others do
    not move it. It is taken where three quarters of them are nearer to it than half its length; elsewhere moving the
    codes would gain no digits, and where most codes are strewn far and wide it could cost all of them.
    """
    some_SD = codes_KD[sample_of(len(codes_KD), codes_KD.device)]
    along_S = some_SD @ projection(codes_KD.shape[1], codes_KD)
    middle_D = some_SD[along_S.argsort()[len(some_SD) // 2 :][:1]][0]  # by a list of one: a lone index would be read
    near_S = (some_SD - middle_D).square().sum(1) < middle_D.square().sum() / 4
    return torch.where(4 * near_S.sum() >= 3 * len(some_SD), middle_D, 0)


def sample_of(size: int, device: torch.device) -> Tensor:
    """Up to SAMPLE different rows of `size`, int64, at no regular distance: what is every so many rows is not all."""
    return torch.arange(min(SAMPLE, size), device=device) * SPREAD % size


def projection(dim: int, like: Tensor) -> Tensor:
    """The direction [D] along which codes are sorted: weights of 0.5 to 1.5 that no pattern of codes will cancel."""
    return (torch.arange(dim, dtype=like.dtype, device=like.device) * GOLDEN) % 1 + 0.5


def search_terms(codes_KD: Tensor, metric: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(center [D], w [K, D], bias [K]) such that the closest code minimizes bias_k - (x - center) . w_k."""
    codes_KD = codes_KD.to(dtype)
    center_D = torch.zeros_like(codes_KD[0])
    bias_K = torch.zeros_like(codes_KD[:, 0])
    if metric == "cosine":
        codes_KD = torch.nn.functional.normalize(codes_KD, dim=1)
    elif metric == "euclidean":
        center_D = center_of(codes_KD)
        codes_KD = codes_KD - center_D
        bias_K = codes_KD.square().sum(1) / 2
    sound_K = codes_KD.isfinite().all(1) & bias_K.isfinite()  # others would make NaN of the scores beside them
    return center_D, torch.where(sound_K[:, None], codes_KD, 0), torch.where(sound_K, bias_K, torch.inf)


def _compute(x_ND: Tensor, codes_KD: Tensor, metric: str, precision: str) -> Tensor:
    dtype = torch.promote_types(torch.promote_types(x_ND.dtype, codes_KD.dtype), torch.float32)
    if x_ND.is_cuda and dtype == torch.float32:
        from topovq.ops.triton.search import nearest_triton

        return nearest_triton(x_ND, codes_KD.float(), metric, precision)
    with torch.autocast(x_ND.device.type, enabled=False):
        return _nearest_blocked(x_ND, *search_terms(codes_KD, metric, dtype))


_nearest = torch.library.custom_op("topovq::nearest", _compute, mutates_args=())


@_nearest.register_fake
def _(x_ND: Tensor, codes_KD: Tensor, metric: str, precision: str) -> Tensor:
    return x_ND.new_empty(x_ND.shape[0], dtype=torch.int64)


@_nearest.register_vmap
def _(
    info: Any, in_dims: tuple[Any, ...], x_ND: Tensor, codes_KD: Tensor, metric: str, precision: str
) -> tuple[Tensor, int]:
    """Vectors of all batches are one batch; where the codes differ, too, there is one search for each of them."""
    x_dim, codes_dim = in_dims[:2]
    if codes_dim is None:
        x_BND = x_ND.movedim(x_dim, 0)
        return _nearest(x_BND.flatten(0, 1), codes_KD, metric, precision).unflatten(0, x_BND.shape[:2]), 0
    codes_BKD = codes_KD.movedim(codes_dim, 0)
    x_BND = x_ND.expand(info.batch_size, *x_ND.shape) if x_dim is None else x_ND.movedim(x_dim, 0)
    return torch.stack([_nearest(x, codes, metric, precision) for x, codes in zip(x_BND, codes_BKD)]), 0


def _nearest_blocked(x_ND: Tensor, center_D: Tensor, w_KD: Tensor, bias_K: Tensor) -> Tensor:
    """Blocks of one matrix product each. The bias rides along as one more dimension, so a block is a single GEMM."""
    n, k = x_ND.shape[0], w_KD.shape[0]
    w_KD = torch.cat([-w_KD, bias_K[:, None]], 1)
    # Whole tiles: a product rounds leftover columns differently, and equal codes must have equal scores.
    # The codes that fill up are infinitely far away: they are never the lowest.
    filler = w_KD.new_zeros(-k % COLUMNS, w_KD.shape[1])
    filler[:, -1] = torch.inf
    w_DK = torch.cat([w_KD, filler]).T.contiguous()
    k = w_DK.shape[1]
    index_N = torch.zeros(n, dtype=torch.int64, device=x_ND.device)
    rows = max(1, min(ROWS, n))
    columns = min(k, max(1, BLOCK // (rows * COLUMNS)) * COLUMNS)
    score = w_KD.new_empty(rows * columns)
    for start in range(0, n, rows):
        x = x_ND[start : start + rows].to(w_KD.dtype) - center_D
        x = torch.cat([x, x.new_ones(len(x), 1)], 1)
        best = x.new_full((len(x),), torch.inf)
        index = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        for first in range(0, k, columns):
            w = w_DK[:, first : first + columns]
            block = score[: len(x) * w.shape[1]].view(len(x), w.shape[1])
            torch.mm(x, w, out=block)
            value, place = _lowest(block)
            better = value < best  # false for NaN: such a row keeps a valid index
            best, index = torch.where(better, value, best), torch.where(better, place + first, index)
        index_N[start : start + rows] = index
    return index_N


def _lowest(score_NK: Tensor) -> tuple[Tensor, Tensor]:
    """The lowest score of each row and its first place. NumPy's argmin is ten times as fast as torch's on the CPU."""
    if score_NK.device.type == "cpu":
        place_N = torch.from_numpy(score_NK.numpy().argmin(1))
    else:
        place_N = score_NK.argmin(1)
    return score_NK.gather(1, place_N[:, None])[:, 0], place_N
