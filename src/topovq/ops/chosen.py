"""What `quantize` gives where the codes were chosen otherwise than by distance: drawn, or found by a beam search.

Legend: N vectors x, K codes w, D dimensions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from topovq.ops.accumulate import accumulate
from topovq.ops.bound import counted
from topovq.ops.quantize import Choice
from topovq.ops.snapshot import held


def quantize_as(
    x_ND: Tensor, codes_KD: Tensor, index_N: Tensor, keep_N: Tensor | None, stats: bool, learns: bool
) -> Choice:
    """The codes index_N, with the error, the statistics and the gradients that `quantize` has for its choice."""
    if torch.compiler.is_exporting() and not stats:
        from topovq.ops.exported import quantize_exported

        return Choice(*quantize_exported(x_ND, codes_KD.detach(), index_N, keep_N))
    with torch.autocast(x_ND.device.type, enabled=False):
        codes_KD = held(codes_KD) if stats else codes_KD.detach()  # with statistics, an update follows
        counted_N = counted(x_ND, codes_KD, learns)
        valid_N = counted_N if keep_N is None else counted_N & keep_N
        rows_ND = codes_KD[index_N]
        dtype = torch.promote_types(x_ND.dtype, torch.float32)
        share = 1 / (valid_N.sum() * x_ND.shape[1]).clamp(min=1).to(dtype)
        error = torch.where(valid_N[:, None], x_ND.to(dtype) - rows_ND, 0).square().sum() * share
        sums_KD, counts_K = codes_KD.new_empty(0, x_ND.shape[1], dtype=dtype), codes_KD.new_empty(0, dtype=dtype)
        if stats:
            sums_KD, counts_K = accumulate(x_ND.detach(), torch.where(valid_N, index_N, -1), codes_KD.shape[0])
        # Straight-through, with the value of the code to the last bit: what is added is 0.
        q_ND = rows_ND.to(x_ND.dtype) + torch.where(x_ND.detach().isfinite(), x_ND - x_ND.detach(), 0)
    return Choice(q_ND, error, index_N, sums_KD, counts_K, (~counted_N).sum())
