"""Other choices than the closest code: the k closest, or one drawn at random. Without an N x K tensor.

Legend: N vectors, K codes, D dimensions.
Both go through blocks of vectors and codes, as `nearest` does on the CPU, and keep the best of what they have seen. A
draw with probability softmax(-distance / T) is the lowest distance / T - g with g of Gumbel's distribution, so a block
needs nothing from the others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from topovq.ops.search import BLOCK, ROWS, check_metric, search_terms

TINY = 1e-20  # so that the logarithm of a uniform number of 0 is finite


def nearest_k(x_ND: Tensor, codes_KD: Tensor, k: int, metric: str = "euclidean") -> Tensor:
    """Indices int64 [N, k] of the k closest codes, the closest first."""
    check_metric(metric)
    if not 1 <= k <= codes_KD.shape[0]:
        raise ValueError(f"k={k!r} must be at least 1 and at most {codes_KD.shape[0]}, the number of codes")
    if torch.compiler.is_exporting():
        from topovq.ops.exported import nearest_k_exported

        return nearest_k_exported(x_ND, codes_KD.detach(), k, metric)
    index_Nk: Tensor = _nearest_k(x_ND.detach(), codes_KD.detach(), k, metric)
    return index_Nk


def sample(x_ND: Tensor, codes_KD: Tensor, temperature: float, metric: str = "euclidean") -> Tensor:
    """Index int64 [N] of a code drawn with probability softmax(-distance / temperature).

    The distance is |x - w|; for "dot" and "cosine" it is -x . w, with w of length 1 for "cosine".
    """
    check_metric(metric)
    if not temperature > 0:
        raise ValueError(f"temperature={temperature!r} must be above 0; choose the closest code for 0")
    index_N: Tensor = _sample(x_ND.detach(), codes_KD.detach(), float(temperature), metric)
    return index_N


@torch.library.custom_op("topovq::nearest_k", mutates_args=())
def _nearest_k(x_ND: Tensor, codes_KD: Tensor, k: int, metric: str) -> Tensor:
    return _lowest(x_ND, codes_KD, metric, k, None)


@_nearest_k.register_fake
def _(x_ND: Tensor, codes_KD: Tensor, k: int, metric: str) -> Tensor:
    return x_ND.new_empty(x_ND.shape[0], k, dtype=torch.int64)


@torch.library.custom_op("topovq::sample", mutates_args=())
def _sample(x_ND: Tensor, codes_KD: Tensor, temperature: float, metric: str) -> Tensor:
    return _lowest(x_ND, codes_KD, metric, 1, temperature)[:, 0]


@_sample.register_fake
def _(x_ND: Tensor, codes_KD: Tensor, temperature: float, metric: str) -> Tensor:
    return x_ND.new_empty(x_ND.shape[0], dtype=torch.int64)


def _lowest(x_ND: Tensor, codes_KD: Tensor, metric: str, k: int, temperature: float | None) -> Tensor:
    """[N, k]: the places of the lowest scores, or with a temperature of the lowest disturbed distances."""
    dtype = torch.promote_types(torch.promote_types(x_ND.dtype, codes_KD.dtype), torch.float32)
    out_NK = torch.zeros(x_ND.shape[0], k, dtype=torch.int64, device=x_ND.device)
    columns = max(1, BLOCK // ROWS)
    with torch.autocast(x_ND.device.type, enabled=False):
        center_D, w_KD, bias_K = search_terms(codes_KD, metric, dtype)
        for start in range(0, x_ND.shape[0], ROWS):
            x = x_ND[start : start + ROWS].to(dtype) - center_D
            # What has no order, NaN, must still give valid indices.
            x = torch.where(x.isfinite().all(1, keepdim=True), x, 0)
            best = x.new_empty(len(x), 0)
            index = torch.empty(len(x), 0, dtype=torch.int64, device=x.device)
            for first in range(0, w_KD.shape[0], columns):
                score = torch.addmm(bias_K[first : first + columns], x, w_KD[first : first + columns].T, alpha=-1)
                if temperature is not None:
                    if metric == "euclidean":  # |x - w|^2 = |x|^2 + 2 score
                        score = (x.square().sum(1, keepdim=True) + 2 * score).clamp(min=0).sqrt()
                    score = score / temperature + torch.rand_like(score).clamp(min=TINY).log().neg().log()
                place = torch.arange(first, first + score.shape[1], device=x.device).expand_as(score)
                best, order = torch.cat([best, score], 1).topk(min(k, index.shape[1] + score.shape[1]), largest=False)
                index = torch.cat([index, place], 1).gather(1, order)
            out_NK[start : start + ROWS] = index
    return out_NK
