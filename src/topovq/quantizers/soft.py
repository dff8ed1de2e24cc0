"""SoftKohonenVQ: the differentiable KSOM, with the hard choice of a code replaced by a softmax that cools down."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from topovq.codebook import Codebook
from topovq.neighborhood import Schedule
from topovq.quantizers.base import Quantized, _in_backward
from topovq.quantizers.kohonen import KohonenVQ

SCORES = 2**24  # softmax weights that exist at a time: 64 MiB


class SoftKohonenVQ(KohonenVQ):
    """In training y = softmax(-|x - w|^2 / T(t)), the output is sum_k y_k w_k, and every code learns with weight y_k.

    The gradient goes through the softmax. Evaluation, and `indices` always, use the closest code, so the figure to
    watch is the loss in evaluation: the softmax can hide how badly single codes fit.

    temperature  a Schedule of T over codebook updates, in units of squared distance per dimension
    """

    def __init__(
        self,
        dim: int,
        codebook_size: int,
        *,
        temperature: Schedule | dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        for name in ("rotation_trick", "learnable_codebook"):
            if options.get(name):
                raise TypeError(f"SoftKohonenVQ: {name}=True has no meaning: the gradient goes through the softmax")
        metric = options.get("metric", "euclidean")
        if metric != "euclidean":
            raise ValueError(f"SoftKohonenVQ: metric={metric!r} is not supported; it compares squared distances")
        super().__init__(dim, codebook_size, **options)
        if isinstance(temperature, dict):  # as config.json holds it
            temperature = Schedule.from_dict(temperature)
        self.temperature = temperature if temperature is not None else Schedule.exponential(1.0, 0.01, 10_000)

    def _quantize(self, book: Codebook, x_ND: Tensor, keep_N: Tensor | None, frozen: bool) -> Quantized:
        if not self.training:
            return super()._quantize(book, x_ND, keep_N, frozen)
        finite_N = x_ND.detach().isfinite().all(1)
        valid_N = finite_N if keep_N is None else finite_N & keep_N
        with torch.autocast(x_ND.device.type, enabled=False):
            learns = not frozen and not _in_backward()
            if learns and not book.is_initialized:
                book.initialize(x_ND.detach(), valid_N)
            x_safe = torch.where(valid_N[:, None], x_ND.float(), 0)
            codes_KD = book.codes.clone()  # what the backward pass differentiates at, whatever the update does
            scale = 1 / (self.temperature(book.step) * self.codebook_dim)
            index_N = book.search(x_ND)
            rows = max(1, SCORES // book.size)
            mixed = []
            sums_KD, counts_K = torch.zeros_like(codes_KD), torch.zeros_like(book.hits)
            for first in range(0, max(1, len(x_safe)), rows):
                x = x_safe[first : first + rows]
                q, y_NK = checkpoint(_soft_codes, x, codes_KD, scale.to(x.dtype), use_reentrant=False)
                mixed.append(q)
                y_NK = y_NK.detach() * valid_N[first : first + rows, None]
                sums_KD = sums_KD + y_NK.T @ x.detach()
                counts_K = counts_K + y_NK.sum(0)
            q_ND = torch.cat(mixed)
            loss = self._loss(book, x_ND, q_ND, index_N, valid_N, learns)
            if learns:
                book.learn_from_stats(sums_KD, counts_K, (~finite_N).sum())
        return Quantized(q_ND.to(x_ND.dtype), index_N, loss)


def _soft_codes(x_ND: Tensor, codes_KD: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """(sum_k y_k w_k [N, D], y [N, K]); |x|^2 is the same for all codes and drops out of the softmax."""
    distance_NK = codes_KD.square().sum(1) - 2 * (x_ND @ codes_KD.T)
    y_NK = torch.softmax(-distance_NK * scale, 1)
    return y_NK @ codes_KD, y_NK
