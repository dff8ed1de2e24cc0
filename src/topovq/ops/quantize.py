"""quantize: one forward pass of a vector quantizer, as one operation with its gradient.

Legend: N vectors x, K codes w, D dimensions.
    index = nearest(x, w);   q = w[index];   error = mean |x - q|^2 per element over the valid vectors
    S, c = accumulate(x, index) over the valid vectors
A vector is valid where `keep` is True and all its entries are finite. Gradients: dq/dx = I (straight-through), and
d error/dx = 2 (x - q) / (valid * D). The codes get none here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from topovq.ops.accumulate import accumulate
from topovq.ops.direct import plain
from topovq.ops.nearest import check_metric, check_precision, nearest


class Choice(NamedTuple):
    """What `quantize` returns; the statistics are empty where they were not asked for."""

    q_ND: Tensor
    error: Tensor
    index_N: Tensor
    sums_KD: Tensor
    counts_K: Tensor
    skipped: Tensor
    """int64: vectors left out for NaN or infinity."""


def quantize(
    x_ND: Tensor,
    codes_KD: Tensor,
    keep_N: Tensor | None = None,
    metric: str = "euclidean",
    precision: str = "exact",
    stats: bool = False,
) -> Choice:
    """The closest codes of x, their error and, with `stats`, the sums and counts of the vectors that chose each."""
    check_metric(metric)
    check_precision(precision)
    codes_KD = codes_KD.detach()
    operation = _Direct.apply if plain(x_ND, codes_KD) else _quantize
    return Choice(*operation(x_ND, codes_KD, keep_N, metric, precision, stats)[:6])


def _compute(
    x_ND: Tensor, codes_KD: Tensor, keep_N: Tensor | None, metric: str, precision: str, stats: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(q, error, index, S, c, skipped, whether each vector is valid [N], the share 1 / (valid * D) of an element)."""
    d, k = x_ND.shape[1], codes_KD.shape[0]
    if x_ND.is_cuda and codes_KD.dtype == torch.float32 and x_ND.dtype != torch.float64:
        from topovq.ops.triton_quantize import quantize_triton

        deterministic = stats and torch.are_deterministic_algorithms_enabled()
        return quantize_triton(x_ND, codes_KD, keep_N, metric, precision, stats, deterministic)
    with torch.autocast(x_ND.device.type, enabled=False):
        finite_N = x_ND.isfinite().all(1)
        valid_N = finite_N if keep_N is None else finite_N & keep_N
        index_N = nearest(x_ND, codes_KD, metric, precision)
        q_ND = codes_KD[index_N]
        dtype = torch.promote_types(x_ND.dtype, torch.float32)
        share = 1 / (valid_N.sum() * d).clamp(min=1).to(dtype)
        apart_ND = torch.where(valid_N[:, None], x_ND.to(dtype) - q_ND, 0)
        error = apart_ND.square().sum() * share
        sums_KD, counts_K = accumulate(x_ND[:0], index_N[:0], 0)
        if stats:
            sums_KD, counts_K = accumulate(x_ND, torch.where(valid_N, index_N, -1), k)
        skipped = (~finite_N).sum()
        return q_ND.to(x_ND.dtype), error, index_N, sums_KD, counts_K, skipped, valid_N.clone(), share


_quantize = torch.library.custom_op("topovq::quantize", _compute, mutates_args=())


@_quantize.register_fake
def _(
    x_ND: Tensor, codes_KD: Tensor, keep_N: Tensor | None, metric: str, precision: str, stats: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    (n, d), k = x_ND.shape, codes_KD.shape[0] if stats else 0
    dtype = torch.promote_types(x_ND.dtype, torch.float32)
    return (
        x_ND.new_empty(n, d),
        x_ND.new_empty((), dtype=dtype),
        x_ND.new_empty(n, dtype=torch.int64),
        x_ND.new_empty(k, d, dtype=dtype),
        x_ND.new_empty(k, dtype=dtype),
        x_ND.new_empty((), dtype=torch.int64),
        x_ND.new_empty(n, dtype=torch.bool),
        x_ND.new_empty((), dtype=dtype),
    )


def _compute_backward(
    grad_ND: Tensor, grad_error: Tensor, x_ND: Tensor, q_ND: Tensor, valid_N: Tensor, share: Tensor
) -> Tensor:
    """grad_q + 2 grad_error share (x - q) where valid, in the type of x."""
    if x_ND.is_cuda and x_ND.dtype != torch.float64:
        from topovq.ops.triton_quantize import backward_triton

        return backward_triton(grad_ND, grad_error, x_ND, q_ND, valid_N, share)
    dtype = torch.promote_types(x_ND.dtype, torch.float32)
    apart_ND = torch.where(valid_N[:, None], x_ND.to(dtype) - q_ND.to(dtype), 0)
    return (grad_ND.to(dtype) + 2 * grad_error * share * apart_ND).to(x_ND.dtype)


_quantize_backward = torch.library.custom_op("topovq::quantize_backward", _compute_backward, mutates_args=())


@_quantize_backward.register_fake
def _(grad_ND: Tensor, grad_error: Tensor, x_ND: Tensor, q_ND: Tensor, valid_N: Tensor, share: Tensor) -> Tensor:
    return torch.empty_like(x_ND, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(inputs[0], output[0], output[6], output[7])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_ND: Tensor | None, grad_error: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    x_ND, q_ND, valid_N, share = ctx.saved_tensors
    nothing = (None,) * 5
    if grad_error is None:
        return grad_ND, *nothing
    if grad_ND is None:
        grad_ND = torch.zeros_like(x_ND)
    operation = _compute_backward if plain(x_ND, grad_ND) else _quantize_backward
    return operation(grad_ND, grad_error, x_ND, q_ND, valid_N, share), *nothing


_quantize.register_autograd(_backward, setup_context=_save)


class _Direct(torch.autograd.Function):
    """The same without the dispatch of an operation."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        output = _compute(*inputs)
        _save(ctx, inputs, output)
        ctx.mark_non_differentiable(*output[2:])
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return _backward(ctx, *grads)
