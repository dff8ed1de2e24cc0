"""join: what comes after a convolution, s = y + bias (+ x) and r = relu(s), as one operation with its gradient.

The gradient of all its inputs is one map, g = ds + dr [r > 0], and the bias's is the sum of g over images and places.
On CUDA each way is one pass over the maps (triton_join.py); separate operations read and write them once more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from topovq.ops.direct import plain


def join(y: Tensor, bias_C: Tensor | None, x: Tensor | None = None, keep: bool = False) -> tuple[Tensor, Tensor]:
    """(s, r) of maps [B, C, H, W]; s is empty unless it is to be kept."""
    tensors = [tensor for tensor in (y, bias_C, x) if tensor is not None]
    operation = _Direct.apply if plain(*tensors) else _join
    return operation(y, bias_C, x, keep)


def _compute(y: Tensor, bias_C: Tensor | None, x: Tensor | None, keep: bool) -> tuple[Tensor, Tensor]:
    if y.is_cuda:
        from topovq.ops.triton_join import join_triton

        return join_triton(y, bias_C, x, keep)
    s = y.float()
    if bias_C is not None:
        s = s + bias_C.float()[:, None, None]
    if x is not None:
        s = s + x.float()
    return s.to(y.dtype) if keep else y.new_empty(0), s.relu().to(y.dtype)


_join = torch.library.custom_op("topovq::join", _compute, mutates_args=())


@_join.register_fake
def _(y: Tensor, bias_C: Tensor | None, x: Tensor | None, keep: bool) -> tuple[Tensor, Tensor]:
    r = torch.empty_like(y, memory_format=torch.channels_last if y.is_cuda else torch.preserve_format)
    return torch.empty_like(r) if keep else y.new_empty(0), r


def _compute_backward(ds: Tensor | None, dr: Tensor | None, r: Tensor, has_bias: bool) -> tuple[Tensor, Tensor]:
    if r.is_cuda:
        from topovq.ops.triton_join import join_backward_triton

        return join_backward_triton(ds, dr, r, has_bias)
    g = torch.zeros_like(r, dtype=torch.float32) if ds is None else ds.float().clone()
    if dr is not None:
        g += torch.where(r > 0, dr.float(), 0)
    g = g.to(r.dtype)
    return g, g.float().sum((0, 2, 3)) if has_bias else r.new_empty(0, dtype=torch.float32)


_join_backward = torch.library.custom_op("topovq::join_backward", _compute_backward, mutates_args=())


@_join_backward.register_fake
def _(ds: Tensor | None, dr: Tensor | None, r: Tensor, has_bias: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(r), r.new_empty(r.shape[1] if has_bias else 0, dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, bias_C, x, keep = inputs
    ctx.save_for_backward(output[1])
    ctx.has_x, ctx.keep = x is not None, keep
    ctx.bias_type = None if bias_C is None else bias_C.dtype
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, ds: Tensor | None, dr: Tensor | None) -> tuple[Tensor | None, ...]:
    (r,) = ctx.saved_tensors
    ds = ds if ctx.keep else None
    if ds is None and dr is None:
        return None, None, None, None
    operation = _compute_backward if plain(r) else _join_backward
    g, bias_grad = operation(ds, dr, r, ctx.bias_type is not None)
    return g, None if ctx.bias_type is None else bias_grad.to(ctx.bias_type), g if ctx.has_x else None, None


_join.register_autograd(_backward, setup_context=_save)


class _Direct(torch.autograd.Function):
    """The same without the dispatch of an operation."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        output = _compute(*inputs)
        _save(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return _backward(ctx, *grads)
