"""4x4 stride-2 convolutions between a few channels and many with their ReLU, as operations with gradients; CUDA alone.

Legend: as in triton/thin.py; the weights are a matrix [4 P, M], rows in the order of a patch.
    widen   wide = relu(patches of the image @ matrix + bias)
    narrow  an image whose patches are added up: relu(wide + bias) @ matrix^T, each at its place
`widen` gives the image no gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("topovq::widen", mutates_args=())
def widen(image_BHWC: Tensor, matrix_4PM: Tensor, bias_M: Tensor) -> Tensor:
    from topovq.ops.triton.thin import widen_triton

    return widen_triton(image_BHWC.contiguous(), matrix_4PM.contiguous(), bias_M.contiguous())


@widen.register_fake
def _(image_BHWC: Tensor, matrix_4PM: Tensor, bias_M: Tensor) -> Tensor:
    b, height, width, _ = image_BHWC.shape
    return image_BHWC.new_empty(b, height // 2 - 1, width // 2 - 1, matrix_4PM.shape[1])


@torch.library.custom_op("topovq::widen_backward", mutates_args=())
def _widen_backward(image_BHWC: Tensor, wide_BHWM: Tensor, grad_BHWM: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    from topovq.ops.triton.thin import widen_backward_triton

    matrix, bias = widen_backward_triton(image_BHWC.contiguous(), wide_BHWM.contiguous(), grad_BHWM.contiguous(), rows)
    return matrix.to(wide_BHWM.dtype), bias.to(wide_BHWM.dtype)


@_widen_backward.register_fake
def _(image_BHWC: Tensor, wide_BHWM: Tensor, grad_BHWM: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    m = wide_BHWM.shape[3]
    return wide_BHWM.new_empty(rows, m), wide_BHWM.new_empty(m)


def _save_widened(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)
    ctx.rows = inputs[1].shape[0]


def _of_widened(ctx: Any, grad_BHWM: Tensor) -> tuple[Tensor | None, ...]:
    return None, *_widen_backward(*ctx.saved_tensors, grad_BHWM.contiguous(), ctx.rows)


widen.register_autograd(_of_widened, setup_context=_save_widened)


@torch.library.custom_op("topovq::narrow", mutates_args=())
def narrow(wide_BHWM: Tensor, bias_M: Tensor, matrix_4PM: Tensor, channels: int) -> Tensor:
    from topovq.ops.triton.thin import narrow_triton

    return narrow_triton(wide_BHWM.contiguous(), bias_M.contiguous(), matrix_4PM.contiguous(), channels)


@narrow.register_fake
def _(wide_BHWM: Tensor, bias_M: Tensor, matrix_4PM: Tensor, channels: int) -> Tensor:
    b, h, w, _ = wide_BHWM.shape
    return wide_BHWM.new_empty(b, 2 * h + 2, 2 * w + 2, channels)


@torch.library.custom_op("topovq::narrow_backward", mutates_args=())
def _narrow_backward(
    wide_BHWM: Tensor, bias_M: Tensor, matrix_4PM: Tensor, grad_BHWC: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    from topovq.ops.triton.thin import narrow_backward_triton

    wide, matrix, bias = narrow_backward_triton(
        wide_BHWM.contiguous(), bias_M.contiguous(), matrix_4PM.contiguous(), grad_BHWC.contiguous()
    )
    return wide, bias.to(bias_M.dtype), matrix.to(matrix_4PM.dtype)


@_narrow_backward.register_fake
def _(wide_BHWM: Tensor, bias_M: Tensor, matrix_4PM: Tensor, grad_BHWC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return wide_BHWM.new_empty(wide_BHWM.shape), torch.empty_like(bias_M), matrix_4PM.new_empty(matrix_4PM.shape)


def _save_narrowed(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])


def _of_narrowed(ctx: Any, grad_BHWC: Tensor) -> tuple[Tensor | None, ...]:
    return *_narrow_backward(*ctx.saved_tensors, grad_BHWC.contiguous()), None


narrow.register_autograd(_of_narrowed, setup_context=_save_narrowed)
