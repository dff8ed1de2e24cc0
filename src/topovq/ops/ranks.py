"""by_rank: the sums and counts of neural gas, in which every code learns from every vector, by its rank.

Legend: N vectors x, K codes w, D dimensions; rank_nk = number of codes that are closer to x_n than w_k.
    S_k = sum_n h(rank_nk) x_n        c_k = sum_n h(rank_nk)        over the valid vectors
h is the weight of a neighborhood at that distance: 1 for the closest code. Weights below CUTOFF of it are 0, so only
the closest codes of a vector matter, as many as the neighborhood reaches at its widest, which the host knows.

Torch's own operations on every device, a block of vectors at a time: no more than SCORES distances exist at once.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from topovq.neighborhood import CUTOFF, Neighborhood
from topovq.ops.search import search_terms

SCORES = 2**22  # distances and weights of a block: 16 MiB of float32 each


@torch.no_grad()
def by_rank(
    x_ND: Tensor, codes_KD: Tensor, valid_N: Tensor, ranks: Neighborhood, step: Tensor, metric: str = "euclidean"
) -> tuple[Tensor, Tensor]:
    """(S [K, D], c [K]) in the type of the codes."""
    size = codes_KD.shape[0]
    most = min(size, math.floor(ranks.reach(ranks.widest)) + 1)
    sums_KD, counts_K = torch.zeros_like(codes_KD), torch.zeros_like(codes_KD[:, 0])
    with torch.autocast(x_ND.device.type, enabled=False):
        weight_M = ranks.weight(torch.arange(most, device=codes_KD.device), step)
        weight_M = torch.where(weight_M < CUTOFF, 0, weight_M).to(codes_KD.dtype)
        center_D, w_KD, bias_K = search_terms(codes_KD, metric, codes_KD.dtype)
        for first in range(0, x_ND.shape[0], max(1, SCORES // size)):
            rows = slice(first, first + max(1, SCORES // size))
            block_ND = torch.where(valid_N[rows, None], x_ND[rows].to(codes_KD.dtype), 0)
            score_NK = torch.addmm(bias_K, block_ND - center_D, w_KD.T, alpha=-1)
            closest_NM = score_NK.topk(most, dim=1, largest=False, sorted=True).indices
            weight_NM = weight_M * valid_N[rows, None]
            weight_NK = torch.zeros_like(score_NK).scatter_(1, closest_NM, weight_NM)
            sums_KD += weight_NK.T @ block_ND
            counts_K += weight_NK.sum(0)
    return sums_KD, counts_K
