"""GradientVQ: codes as parameters, moved by the codebook loss; with a neighbor term it is the SOM-VAE's quantizer."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from topovq.codebook import Codebook, Turn
from topovq.ops.accumulate import accumulate
from topovq.ops.quantize import Choice
from topovq.ops.smooth import smooth
from topovq.quantizers.kohonen import KohonenVQ, valid_index

NEIGHBOR_TARGETS = ("input", "winner")
NEIGHBOR_REDUCTIONS = ("sum", "mean")
# What is saved names its reduction. Layers, models and records of before there was a choice do not: it was the mean.
REDUCTION = {"neighbor_reduction": "sum"}
REDUCTION_BEFORE = {"neighbor_reduction": "mean"}


class GradientVQ(KohonenVQ):
    """The original VQ: loss = codebook_weight * |w_k* - sg(x)|^2 + commitment_weight * |x - sg(w_k*)|^2, per element.

    With `neighborhood` other than "none" it is the SOM-VAE form, which adds, as a mean over vectors,
        neighbor_weight * sum over k != k* of A[k*, k] * |w_k - sg(target)|^2
    neighbor_target     the "input" x, or the "winner" w_k* (as in the code of the Kohonen-VAE's authors)
    neighbor_reduction  of the square over dimensions: its "sum", as the authors', or its "mean", as in the other terms,
                        which makes a weight 1/D of what it is with "sum"
    Everything else is as in KohonenVQ; give its parameters to your optimizer.
    """

    pulls_neighbors = True

    def __init__(
        self,
        dim: int,
        codebook_size: int,
        *,
        neighborhood: str = "none",
        codebook_weight: float = 1.0,
        commitment_weight: float = 0.25,
        neighbor_weight: float = 1.0,
        neighbor_target: str = "input",
        neighbor_reduction: str = "sum",
        **options: Any,
    ) -> None:
        for name, value, known in (
            ("neighbor_target", neighbor_target, NEIGHBOR_TARGETS),
            ("neighbor_reduction", neighbor_reduction, NEIGHBOR_REDUCTIONS),
        ):
            if value not in known:
                raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(map(repr, known))}")
        for name in ("ema_update", "learnable_codebook"):
            if name in options:
                raise TypeError(f"GradientVQ: {name}={options[name]!r} is decided: its codes follow the gradient alone")
        super().__init__(
            dim,
            codebook_size,
            neighborhood=neighborhood,
            commitment_weight=commitment_weight,
            ema_update=False,
            learnable_codebook=True,
            **options,
        )
        self.codebook_weight = codebook_weight
        self.neighbor_weight = neighbor_weight
        self.neighbor_target = neighbor_target
        self.neighbor_reduction = neighbor_reduction

    @classmethod
    def _from_pretrained(cls, **arguments: Any) -> Self:
        return super()._from_pretrained(**{**REDUCTION_BEFORE, **arguments})

    def _codebook_loss(
        self, book: Codebook, turn: Turn, x_ND: Tensor, choice: Choice, keep_N: Tensor | None
    ) -> Tensor | None:
        loss = super()._codebook_loss(book, turn, x_ND, choice, keep_N)
        if loss is None or book.neighborhood.kind == "none" or not turn.learns:
            return loss
        index_N = choice.index_N
        targets_ND = book.codes.detach()[index_N] if self.neighbor_target == "winner" else x_ND.detach()
        around = neighbor_loss(book, targets_ND, valid_index(x_ND, turn.codes_KD, index_N, keep_N), turn.step)
        weight = self.neighbor_weight if self.neighbor_reduction == "sum" else self.neighbor_weight / x_ND.shape[1]
        return loss + weight * around


def neighbor_loss(book: Codebook, targets_ND: Tensor, index_N: Tensor, step: Tensor) -> Tensor:
    """Mean over vectors of sum_{k != k*} A[k*, k] |w_k - target|^2 without an N x K or K x K tensor.

    The sum depends on the targets only through what each code's members add up to: with S, c and Q the sums of
    target, 1 and |target|^2 over members, smoothed by A - I to m, n and r, it is sum_k n_k |w_k|^2 - 2 w_k.m_k + r_k.
    """
    targets_ND = targets_ND.to(book.codes.dtype)
    squares_N1 = targets_ND.square().sum(1, keepdim=True)
    sums_KD, counts_K = accumulate(torch.cat([targets_ND, squares_N1], 1), index_N, book.size)
    smooth_KD, smooth_K = smooth(sums_KD, counts_K, book.neighborhood, step)
    around_KD, around_K = smooth_KD - sums_KD, smooth_K - counts_K
    codes_KD = book.free_codes()
    total = (around_K * codes_KD.square().sum(1)).sum() - 2 * (codes_KD * around_KD[:, :-1]).sum()
    total = total + around_KD[:, -1].sum()
    return total / counts_K.sum().clamp(min=1)
