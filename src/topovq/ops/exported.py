"""quantize and the searches in evaluation as plain torch operations, for files that run where topovq is not installed.

torch.export, AOTInductor and torch.onnx.export(dynamo=True) record these in place of the registered operations, which
only topovq knows. The values are those of ops/quantize.py; there is no gradient, and nothing for training.

Legend: N vectors, K codes, D dimensions.
N may be dynamic, so vectors cannot be taken in blocks, but K is known: the codes are, each block one matrix product.
What exists at a time is N x 4,080 scores and not N x K; 65,536 codes are 17 blocks in the graph.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from topovq.ops.bound import largest
from topovq.ops.search import COLUMNS, search_terms

CODES = 85 * COLUMNS  # a block: whole tiles, so that equal codes have equal scores


def nearest_exported(x_ND: Tensor, codes_KD: Tensor, metric: str) -> Tensor:
    """Index int64 [N] of the closest code, the lowest of several; 0 where a vector's scores are not numbers."""
    with _without_autocast(x_ND):
        x, w_DK = _factors(x_ND, codes_KD, metric)
        best_N = torch.full_like(x[:, 0], torch.inf)
        index_N = torch.zeros_like(best_N, dtype=torch.int64)
        for first in range(0, w_DK.shape[1], CODES):
            score_NK = x @ w_DK[:, first : first + CODES]
            value_N, place_N = score_NK.amin(1), score_NK.argmin(1)
            better_N = value_N < best_N  # false for NaN: such a row keeps a valid index
            best_N, index_N = torch.where(better_N, value_N, best_N), torch.where(better_N, place_N + first, index_N)
    return index_N


def nearest_k_exported(x_ND: Tensor, codes_KD: Tensor, k: int, metric: str) -> Tensor:
    """Indices int64 [N, k] of the k closest codes, the closest first."""
    with _without_autocast(x_ND):
        x, w_DK = _factors(x_ND, codes_KD, metric)
        # What has no order, NaN, must still give valid indices. The last dimension is the bias's.
        x = torch.cat([torch.where(x.isfinite().all(1, keepdim=True), x[:, :-1], 0), x[:, -1:]], 1)
        best_NK, index_NK = x[:, :0], torch.zeros_like(x[:, :0], dtype=torch.int64)
        for first in range(0, w_DK.shape[1], CODES):
            score_NK = x @ w_DK[:, first : first + CODES]
            place_NK = torch.arange(first, first + score_NK.shape[1], device=x.device).expand(x.shape[0], -1)
            seen_NK, seen_index_NK = torch.cat([best_NK, score_NK], 1), torch.cat([index_NK, place_NK], 1)
            best_NK, order_NK = seen_NK.topk(min(k, seen_NK.shape[1]), largest=False)
            index_NK = seen_index_NK.gather(1, order_NK)
    return index_NK


def _factors(x_ND: Tensor, codes_KD: Tensor, metric: str) -> tuple[Tensor, Tensor]:
    """(x [N, D + 1], w [D + 1, K]) whose product is lowest at the closest code; codes infinitely far away fill up."""
    dtype = _precise(x_ND.dtype, codes_KD.dtype)
    center_D, w_KD, bias_K = search_terms(codes_KD, metric, dtype)
    w_KD = torch.cat([-w_KD, bias_K[:, None]], 1)
    filler = torch.zeros_like(w_KD[:1, :-1]), torch.full_like(w_KD[:1, -1:], torch.inf)
    w_DK = torch.cat([w_KD, torch.cat(filler, 1).expand(-w_KD.shape[0] % COLUMNS, -1)]).T
    x = x_ND.detach().to(dtype) - center_D
    return torch.cat([x, torch.ones_like(x[:, :1])], 1), w_DK


def quantize_exported(
    x_ND: Tensor, codes_KD: Tensor, index_N: Tensor, keep_N: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The fields of ops/quantize.py's Choice without statistics: (q, error, index, no sums, no counts, skipped)."""
    dtype = _precise(x_ND.dtype)
    counted_N = x_ND.to(dtype).abs().sum(1) <= largest(dtype)
    valid_N = counted_N if keep_N is None else counted_N & keep_N
    q_ND = codes_KD[index_N]
    apart_ND = torch.where(valid_N[:, None], x_ND.to(dtype) - q_ND, 0)
    error = apart_ND.square().sum() / (valid_N.sum() * x_ND.shape[1]).clamp(min=1).to(dtype)
    nothing = codes_KD.new_empty(0, x_ND.shape[1]), codes_KD.new_empty(0)
    return q_ND.to(x_ND.dtype), error, index_N, *nothing, (~counted_N).sum()


def _without_autocast(x_ND: Tensor) -> torch.autocast | nullcontext[None]:
    """Autocast switched off where it is on; where it is not, switching would only add to the graph."""
    device = x_ND.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def _precise(*dtypes: torch.dtype) -> torch.dtype:
    """float32, or float64 if one is that. (torch.promote_types itself would be recorded.)"""
    return torch.float64 if torch.float64 in dtypes else torch.float32
