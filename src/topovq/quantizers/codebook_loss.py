"""The loss that moves codes which are parameters: mean |w_k* - sg(x)|^2 per element over the valid vectors.

Legend: K codes w of D dimensions; S, c the sums and counts of the vectors that chose each.
Its value is the error of the choice. Its gradient, 2 (c_k w_k - S_k) / (sum(c) D), comes from sums and counts, which
are there already: no gather, whose gradient is slow.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from topovq.ops.direct import transformed


class _CodebookLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, codes_KD: Tensor, sums_KD: Tensor, counts_K: Tensor, error: Tensor) -> Tensor:
        ctx.save_for_backward(codes_KD, sums_KD, counts_K)
        return error.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad * _slope(*ctx.saved_tensors), None, None, None


def _slope(codes_KD: Tensor, sums_KD: Tensor, counts_K: Tensor) -> Tensor:
    share = 2 / (counts_K.sum() * codes_KD.shape[1]).clamp(min=1)
    return share * (counts_K[:, None] * codes_KD - sums_KD)


def codebook_loss(codes_KD: Tensor, sums_KD: Tensor, counts_K: Tensor, error: Tensor) -> Tensor:
    """The error, as a function of the codes; S, c and the value of the error are constants."""
    error, sums_KD, counts_K = error.detach(), sums_KD.detach(), counts_K.detach()
    if transformed():  # torch's own operations, for forward-mode derivatives
        at_KD = codes_KD.detach()
        return error + ((codes_KD - at_KD) * _slope(at_KD, sums_KD, counts_K)).sum()
    loss: Tensor = _CodebookLoss.apply(codes_KD, sums_KD, counts_K, error)  # type: ignore[no-untyped-call]  # of torch
    return loss
