"""SoftKohonenVQ: the differentiable KSOM, with the hard choice of a code replaced by a softmax that cools down."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from topovq.codebook import Codebook
from topovq.neighborhood import Schedule
from topovq.ops.bound import counted
from topovq.ops.snapshot import snapshot
from topovq.quantizers.kohonen import KohonenVQ
from topovq.quantizers.neural_gas import GAS
from topovq.quantizers.results import Ask, Part

SCORES = 2**24  # softmax weights that exist at a time: 64 MiB


class SoftKohonenVQ(KohonenVQ):
    """In training y = softmax(-|x - w|^2 / T(t)), the output is sum_k y_k w_k, and every code learns with weight y_k.

    The gradient goes through the softmax. Evaluation, and `indices` always, use the closest code, so the figure to
    watch is the loss in evaluation: the softmax can hide how badly single codes fit. In `health()` and `usage` a code
    counts as chosen by a batch when the weights it got there add up to half a vector.

    neighborhood as KohonenVQ's, but "narrowing" if nothing is named: every code takes part in every batch
    temperature  a Schedule of T over codebook updates, in units of squared distance per dimension
    """

    def __init__(
        self,
        dim: int,
        codebook_size: int,
        *,
        neighborhood: str = "narrowing",
        temperature: Schedule | dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        for name in ("rotation_trick", "learnable_codebook", "directional_reparam", "stochastic_sample_codes"):
            if options.get(name):
                raise TypeError(f"SoftKohonenVQ: {name}=True has no meaning: the gradient goes through the softmax")
        if options.get("orthogonal_reg_weight") or not options.get("route_gradients_to_input", True):
            raise TypeError(
                "SoftKohonenVQ: orthogonal_reg_weight and route_gradients_to_input=False are not supported; "
                "use KohonenVQ"
            )
        metric = "cosine" if options.get("use_cosine_sim") else options.get("metric", "euclidean")
        if metric != "euclidean":
            raise ValueError(f"SoftKohonenVQ: metric={metric!r} is not supported; it compares squared distances")
        if neighborhood in ("ride", GAS):
            raise ValueError(f"SoftKohonenVQ: neighborhood={neighborhood!r} is for codes that are chosen; leave it out")
        super().__init__(dim, codebook_size, neighborhood=neighborhood, **options)
        if isinstance(temperature, dict):  # as config.json holds it
            temperature = Schedule.from_dict(temperature)
        elif temperature is None:
            temperature = Schedule.exponential(1.0, 0.01, 10_000)
        if not isinstance(temperature, Schedule) or temperature.end == 0:
            raise ValueError(
                f"temperature={temperature!r} must be a Schedule that stays above 0, such as "
                "Schedule.exponential(1.0, 0.01, 10_000)"
            )
        self.temperature = temperature

    def _quantize(self, book: Codebook, x_ND: Tensor, keep_N: Tensor | None, ask: Ask) -> Part:
        if not self.training:
            return super()._quantize(book, x_ND, keep_N, ask)
        if ask.chosen is not None or ask.weight is not None:
            raise TypeError(
                "SoftKohonenVQ: codes learn by their weights: update_indices and ema_update_weight mean nothing"
            )
        with torch.autocast(x_ND.device.type, enabled=False):
            turn = book.begin(x_ND, keep_N, not ask.frozen)
            codes_KD = snapshot(turn.codes_KD)
            counted_N = counted(x_ND, codes_KD, turn.learns)
            valid_N = counted_N if turn.keep_N is None else counted_N & turn.keep_N
            scale = 1 / (self.temperature(turn.step) * self.codebook_dim)
            index_N = book.search(x_ND, codes_KD)
            x_safe = torch.where(valid_N[:, None], x_ND.to(book.codes.dtype), 0)
            q_ND, sums_KD, counts_K = _Mixture.apply(  # type: ignore[no-untyped-call]  # of torch
                x_safe, codes_KD, snapshot(scale).to(x_safe.dtype), valid_N
            )
            error = mean_square(x_safe, q_ND.detach(), valid_N)
            book.finish(turn, x_ND, sums_KD, counts_K, (~counted_N).sum())
        return Part(q_ND.to(x_ND.dtype), index_N, error)


def mean_square(x_ND: Tensor, q_ND: Tensor, valid_N: Tensor) -> Tensor:
    """Mean of (x - q)^2 per element over the valid vectors; 0 where there are none."""
    error_ND = torch.where(valid_N[:, None], x_ND - q_ND, 0)
    return error_ND.square().sum() / (valid_N.sum() * x_ND.shape[1]).clamp(min=1)


class _Mixture(torch.autograd.Function):
    """(q = sum_k y_k w_k [N, D], S = Y^T x [K, D], c = Y^T 1 [K]) with y = softmax(-|x - w|^2 scale), block by block.

    Only q has a gradient, to x: with g its gradient, ds_k = y_k (g.w_k - g.q), and dx = 2 scale sum_k ds_k w_k.
    """

    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, codes_KD: Tensor, scale: Tensor, valid_N: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        square_K = codes_KD.square().sum(1)
        sound_K = square_K.isfinite()  # a code that is not finite gets no weight, and spoils no other's
        codes_KD, square_K = torch.where(sound_K[:, None], codes_KD, 0), torch.where(sound_K, square_K, torch.inf)
        q_ND = torch.empty_like(x_ND)
        sums_KD, counts_K = torch.zeros_like(codes_KD), torch.zeros_like(codes_KD[:, 0])
        for rows in _blocks(x_ND, codes_KD):
            y_NK = _softmax(x_ND[rows], codes_KD, square_K, scale)
            q_ND[rows] = y_NK @ codes_KD
            y_NK = y_NK * valid_N[rows, None]
            sums_KD += y_NK.T @ x_ND[rows]
            counts_K += y_NK.sum(0)
        ctx.save_for_backward(x_ND, codes_KD, square_K, scale)
        ctx.mark_non_differentiable(sums_KD, counts_K)
        return q_ND, sums_KD, counts_K

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor, *_: Tensor) -> tuple[Tensor, None, None, None]:
        x_ND, codes_KD, square_K, scale = ctx.saved_tensors
        out_ND = torch.empty_like(x_ND)
        for rows in _blocks(x_ND, codes_KD):
            y_NK = _softmax(x_ND[rows], codes_KD, square_K, scale)
            along_NK = grad_ND[rows] @ codes_KD.T
            slope_NK = y_NK * (along_NK - (y_NK * along_NK).sum(1, keepdim=True))
            out_ND[rows] = 2 * scale * (slope_NK @ codes_KD)
        return out_ND, None, None, None


def _blocks(x_ND: Tensor, codes_KD: Tensor) -> list[slice]:
    rows = max(1, SCORES // codes_KD.shape[0])
    return [slice(first, first + rows) for first in range(0, x_ND.shape[0], rows)]


def _softmax(x_ND: Tensor, codes_KD: Tensor, square_K: Tensor, scale: Tensor) -> Tensor:
    """y [N, K]; |x|^2 is the same for all codes and drops out."""
    return torch.softmax((2 * (x_ND @ codes_KD.T) - square_K) * scale, 1)
