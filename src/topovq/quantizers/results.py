"""What quantizers are asked for in a forward, and what they return."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from topovq.codebook import Codebook
from topovq.ops.quantize import Choice

# [K], or what makes it of the sums [1, K, D] and counts [1, K] of the vectors that chose each code
WeightLike = Tensor | Callable[[Tensor, Tensor], Tensor] | None


@torch.no_grad()
def shares(book: Codebook, choice: Choice, weight: Tensor | Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """How much of the update each code takes, [K]."""
    if not book.ema_update or book.accumulating:
        raise ValueError("ema_update_weight needs an update of the running means: not with gradients or accumulation")
    if callable(weight):
        weight = weight(choice.sums_KD[None], choice.counts_K[None])
    if weight.shape not in ((book.size,), (1, book.size)):
        raise ValueError(f"ema_update_weight of shape {tuple(weight.shape)} must be [{book.size}], one for each code")
    return weight.flatten()


class Quantized(NamedTuple):
    """What a quantizer returns; unpacks as `quantized, indices, loss`."""

    quantized: Tensor
    """The codes, in the layout and type of the input; 0 where masked."""
    indices: Tensor
    """int64, the shape of the input without its channels (with heads: one more axis, last); -1 where masked."""
    loss: Tensor
    """A scalar, its weight applied; where quantizers are in a row, one for each."""


pytree._register_namedtuple(Quantized, serialized_type_name="topovq.Quantized")  # so that torch.export.save knows it


class Ask(NamedTuple):
    """What one forward asks for."""

    frozen: bool
    """The codes stay as they are."""
    temperature: float = 0.0
    """Above 0: codes are drawn (ops/candidates.py)."""
    chosen: Tensor | None = None
    """int64, the shape of the indices: codes that were chosen already; -1 masks."""
    weight: WeightLike = None
    """How much of the update each code takes (weighting.py)."""


def choosing(ask: Ask, chosen: Tensor | None) -> Ask:
    """The same with these codes: torch 2.8 does not compile `_replace`."""
    return Ask(ask.frozen, ask.temperature, chosen, ask.weight)


class Part(NamedTuple):
    """What one codebook made of its vectors [N, D]."""

    q_ND: Tensor
    index_N: Tensor
    error: Tensor
    """The commitment error, without its weight."""
    codebook_loss: Tensor | None = None
    """What moves codes that are parameters, its weight applied."""
    orthogonality: Tensor | None = None
    """The penalty of orthogonal.py, without its weight."""


class LossBreakdown(NamedTuple):
    """The parts of a loss without their weights, 0-dim, named as in vector-quantize-pytorch."""

    commitment: Tensor
    codebook_diversity: Tensor
    orthogonal_reg: Tensor
    inplace_optimize: Tensor


def breakdown(parts: list[Part]) -> LossBreakdown:
    """The means over the codebooks."""
    none = parts[0].error.new_zeros(())
    penalties = [none if part.orthogonality is None else part.orthogonality for part in parts]
    return LossBreakdown(mean([part.error for part in parts]), none, mean(penalties), none)


def mean(values: list[Tensor]) -> Tensor:
    return values[0] if len(values) == 1 else torch.stack(values).mean()
