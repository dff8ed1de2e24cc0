"""quantize: one forward pass of a vector quantizer, as one operation with its gradient.

Legend: N vectors x, K codes w, D dimensions.
    index = nearest(x, w);   q = w[index];   error = mean |x - q|^2 per element over the valid vectors
    S, c = accumulate(x, index) over the valid vectors
A vector is valid where `keep` is True and it counts (bound.py). Gradients: dq/dx = I (straight-through), and
d error/dx = 2 (x - q) / (valid * D), in which q is a constant: the second derivative is 2 / (valid * D). The codes get
none here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from topovq.ops.accumulate import accumulate
from topovq.ops.bound import counted
from topovq.ops.direct import plain, transformed
from topovq.ops.registered import registered
from topovq.ops.search import check_metric, check_precision, nearest

# Up to so many codes are copied for the backward pass on CUDA, with the choices in 16 bits: it need not read q then,
# which is the caller's to change.
FEW = 2**15


class Choice(NamedTuple):
    """What `quantize` returns; the statistics are empty where they were not asked for."""

    q_ND: Tensor
    error: Tensor
    index_N: Tensor
    sums_KD: Tensor
    counts_K: Tensor
    skipped: Tensor
    """int64: vectors that do not count (bound.py)."""


def quantize(
    x_ND: Tensor,
    codes_KD: Tensor,
    keep_N: Tensor | None = None,
    metric: str = "euclidean",
    precision: str = "exact",
    stats: bool = False,
    learns: bool = False,
) -> Choice:
    """The closest codes of x, their error and, with `stats`, the sums and counts of the vectors that chose each.

    `learns`: this is training, where a vector that is far from all others does not count.
    """
    check_metric(metric)
    check_precision(precision)
    direct = plain(x_ND, codes_KD)
    if codes_KD.requires_grad or not direct:  # else nothing follows it, and the host is spared the call
        codes_KD = codes_KD.detach()
    if torch.compiler.is_exporting() and not stats:
        from topovq.ops.exported import quantize_exported

        return Choice(*quantize_exported(x_ND, codes_KD, nearest(x_ND, codes_KD, metric), keep_N))
    others = (codes_KD, keep_N, metric, precision, stats, learns)
    if direct:
        rest: list[Tensor] = []
        q_ND, error = _Direct.apply(x_ND, others, rest)  # type: ignore[no-untyped-call]  # of torch
        return Choice(q_ND, error, *rest)
    return Choice(*(_by_torch if transformed() else _quantize)(x_ND, *others)[:6])


def _compute(
    x_ND: Tensor, codes_KD: Tensor, keep_N: Tensor | None, metric: str, precision: str, stats: bool, learns: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(q, error, index, S, c, skipped, whether each vector is valid, int8 [N], the share 1 / (valid * D) of an element,
    and for the backward pass: the codes as they are now and the index in 16 bits, or nothing of both)."""
    d, k = x_ND.shape[1], codes_KD.shape[0]
    if _by_kernels(x_ND) and codes_KD.dtype == torch.float32:
        from topovq.ops.triton.quantize import quantize_triton

        deterministic = stats and torch.are_deterministic_algorithms_enabled()
        return quantize_triton(x_ND, codes_KD, keep_N, metric, precision, stats, learns, deterministic, k <= FEW)
    q_ND, error, index_N, sums_KD, counts_K, skipped, valid_N, share = _chosen(
        x_ND, codes_KD, keep_N, metric, precision, stats, learns
    )
    nothing = codes_KD.new_empty(0, d), index_N.new_empty(0, dtype=torch.int16)
    return q_ND, error, index_N, sums_KD, counts_K, skipped, valid_N.to(torch.int8), share, *nothing


def _chosen(
    x_ND: Tensor, codes_KD: Tensor, keep_N: Tensor | None, metric: str, precision: str, stats: bool, learns: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The first eight of `_compute`, by torch's own operations; the error can be differentiated, q is a constant."""
    with torch.autocast(x_ND.device.type, enabled=False):
        counted_N = counted(x_ND, codes_KD, learns)
        valid_N = counted_N if keep_N is None else counted_N & keep_N
        index_N = nearest(x_ND, codes_KD, metric, precision)
        q_ND = codes_KD[index_N]
        dtype = torch.promote_types(x_ND.dtype, torch.float32)
        share = 1 / (valid_N.sum() * x_ND.shape[1]).clamp(min=1).to(dtype)
        apart_ND = torch.where(valid_N[:, None], x_ND.to(dtype) - q_ND, 0)
        error = apart_ND.square().sum() * share
        sums_KD, counts_K = codes_KD.new_empty(0, x_ND.shape[1], dtype=dtype), codes_KD.new_empty(0, dtype=dtype)
        if stats:
            sums_KD, counts_K = accumulate(x_ND.detach(), torch.where(valid_N, index_N, -1), codes_KD.shape[0])
        return q_ND.to(x_ND.dtype), error, index_N, sums_KD, counts_K, (~counted_N).sum(), valid_N, share


def _by_torch(x_ND: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """The same within a transform of torch.func or a level of forward-mode derivatives, which know torch's operations
    and do not look into ours."""
    q_ND, *rest = _chosen(x_ND, *arguments)
    at_ND = x_ND.detach()
    return q_ND + torch.where(at_ND.isfinite(), x_ND - at_ND, 0), *rest  # + 0, whose derivative is I


def _by_kernels(x_ND: Tensor) -> bool:
    return x_ND.is_cuda and x_ND.dtype != torch.float64


def _outlines(
    x_ND: Tensor, codes_KD: Tensor, keep_N: Tensor | None, metric: str, precision: str, stats: bool, learns: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    (n, d), k = x_ND.shape, codes_KD.shape[0] if stats else 0
    keeps = _by_kernels(x_ND) and codes_KD.dtype == torch.float32 and codes_KD.shape[0] <= FEW
    dtype = torch.promote_types(x_ND.dtype, torch.float32)
    return (
        x_ND.new_empty(n, d),
        x_ND.new_empty((), dtype=dtype),
        x_ND.new_empty(n, dtype=torch.int64),
        x_ND.new_empty(k, d, dtype=dtype),
        x_ND.new_empty(k, dtype=dtype),
        x_ND.new_empty((), dtype=torch.int64),
        x_ND.new_empty(n, dtype=torch.int8),
        x_ND.new_empty((), dtype=dtype),
        codes_KD.new_empty(codes_KD.shape[0] if keeps else 0, d),
        x_ND.new_empty(n if keeps else 0, dtype=torch.int16),
    )


_quantize = registered("quantize", _compute, _outlines)


def _compute_backward(
    grad_ND: Tensor,
    grad_error: Tensor,
    x_ND: Tensor,
    rows: Tensor,
    row_of_N: Tensor | None,
    valid_N: Tensor,
    share: Tensor,
) -> Tensor:
    """grad_q + 2 grad_error share (x - q) where valid, in the type of x; q is `rows`, or rows[row_of_N] where given."""
    if _by_kernels(x_ND):
        from topovq.ops.triton.quantize import backward_triton

        return backward_triton(grad_ND, grad_error, x_ND, rows, row_of_N, valid_N, share)
    return _backward_by_torch(grad_ND, grad_error, x_ND, rows, row_of_N, valid_N, share)


def _backward_by_torch(
    grad_ND: Tensor,
    grad_error: Tensor,
    x_ND: Tensor,
    rows: Tensor,
    row_of_N: Tensor | None,
    valid_N: Tensor,
    share: Tensor,
) -> Tensor:
    """The same, which can be differentiated once more."""
    dtype = torch.promote_types(x_ND.dtype, torch.float32)
    q_ND = rows if row_of_N is None else rows[row_of_N.long()].to(x_ND.dtype)
    apart_ND = torch.where(valid_N[:, None] != 0, x_ND.to(dtype) - q_ND.to(dtype), 0)
    return (grad_ND.to(dtype) + 2 * grad_error * share * apart_ND).to(x_ND.dtype)


def _outlines_backward(grad_ND: Tensor, grad_error: Tensor, x_ND: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x_ND, memory_format=torch.contiguous_format)


_quantize_backward = registered("quantize_backward", _compute_backward, _outlines_backward)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    if not any(ctx.needs_input_grad):
        return
    q_ND, valid_N, share, kept_KD, choice_N = (output[i] for i in (0, 6, 7, 8, 9))
    # A copy: q is the caller's, who may change it in place. A compiler leaves it out where nobody does.
    rows, row_of_N = (kept_KD, choice_N) if kept_KD.shape[0] else (q_ND.detach().clone(), None)
    ctx.save_for_backward(inputs[0], rows, row_of_N, valid_N, share)


def _backward(ctx: Any, grad_ND: Tensor | None, grad_error: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    x_ND, rows, row_of_N, valid_N, share = ctx.saved_tensors
    nothing = (None,) * 6
    if grad_error is None:
        return grad_ND, *nothing
    if grad_ND is None:
        grad_ND = torch.zeros_like(x_ND)
    operation = _compute_backward if plain(x_ND, grad_ND) else _quantize_backward
    if torch.is_grad_enabled():  # somebody wants a second derivative (create_graph=True)
        operation = _backward_by_torch
    return operation(grad_ND, grad_error, x_ND, rows, row_of_N, valid_N, share), *nothing


torch.library.register_autograd("topovq::quantize", _backward, setup_context=_save)


class _Direct(torch.autograd.Function):
    """The same without the dispatch of an operation: q and error, and in the list `rest` what has no gradient.

    What autograd need not see is in one tuple: it looks at every argument.
    """

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, others: tuple[Any, ...], rest: list[Tensor]) -> tuple[Tensor, ...]:
        output = _compute(x_ND, *others)
        _save(ctx, (x_ND,), output)
        rest.extend(output[2:6])
        return output[:2]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return _backward(ctx, *grads)[:3]
