"""How much of an update each code takes: vector-quantize-pytorch's `ema_update_weight`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from topovq.codebook import Codebook
from topovq.ops.quantize import Choice

# [K], or what makes it of the sums [1, K, D] and counts [1, K] of the vectors that chose each code
WeightLike = Tensor | Callable[[Tensor, Tensor], Tensor] | None


@torch.no_grad()
def shares(book: Codebook, choice: Choice, weight: WeightLike) -> Tensor | None:
    """What `Codebook.finish` takes, [K]; None where each code takes the whole."""
    if weight is None:
        return None
    if not book.ema_update or book.accumulating:
        raise ValueError("ema_update_weight needs an update of the running means: not with gradients or accumulation")
    if callable(weight):
        weight = weight(choice.sums_KD[None], choice.counts_K[None])
    if weight.shape not in ((book.size,), (1, book.size)):
        raise ValueError(f"ema_update_weight of shape {tuple(weight.shape)} must be [{book.size}], one for each code")
    return weight.flatten()
