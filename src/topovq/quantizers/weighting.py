"""How much of an update each code takes: vector-quantize-pytorch's `ema_update_weight`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from topovq.codebook import Codebook
from topovq.ops.quantize import Choice
from topovq.quantizers.parameters import divisor_of

# [K], or what makes it of the sums [1, K, D] and counts [1, K] of the vectors that chose each code
WeightLike = Tensor | Callable[[Tensor, Tensor], Tensor] | None


def learn_weighted(book: Codebook, choice: Choice, weight: WeightLike) -> None:
    """One update, of which code k takes the share weight[k]: 0 leaves it as it is, 1 is the whole."""
    if weight is None:
        book.learn(choice.sums_KD, choice.counts_K, choice.skipped)
        return
    if not book.ema_update or book.accumulating:
        raise ValueError("ema_update_weight needs an update of the running means: not with gradients or accumulation")
    with torch.no_grad():
        if callable(weight):
            weight = weight(choice.sums_KD[None], choice.counts_K[None])
        weight = weight.to(book.counts)
        if weight.shape not in ((book.size,), (1, book.size)):
            raise ValueError(
                f"ema_update_weight of shape {tuple(weight.shape)} must be [{book.size}], one for each code"
            )
        weight_K, weight_K1 = weight.flatten(), weight.flatten()[:, None]
        codes_KD, sums_KD, counts_K = book.codes.clone(), book.sums.clone(), book.counts.clone()
        book.learn(choice.sums_KD, choice.counts_K, choice.skipped)
        book.sums.copy_(sums_KD.lerp(book.sums, weight_K1))
        book.counts.copy_(counts_K.lerp(book.counts, weight_K))
        between_KD = book.sums / divisor_of(book)[:, None]
        between_KD = F.normalize(between_KD, dim=1) if book.unit_length else between_KD
        whole_KD = torch.where((weight_K1 == 1) | book.frozen[:, None], book.codes, between_KD)
        book.codes.copy_(torch.where(weight_K1 == 0, codes_KD, whole_KD))
