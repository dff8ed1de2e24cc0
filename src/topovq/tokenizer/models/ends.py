"""4x4 stride-2 convolutions from or to a few channels, such as an image's three, with the ReLU at their wide end.

Matrix units want channels in multiples of eight, which an image has not; and the wide map would be read and written
once more for bias and ReLU. On CUDA all of it is one pass (ops/thin.py). The values are those of the ordinary
convolution, summed in another order, and rounded once where that would be done after each step.
Legend: B images, C few channels, M many; H x W pixels of the image; P >= 4 C.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from topovq.ops.thin import narrow, widen

FEW = 8  # channels below which a convolution is thin
LEAST = 16  # numbers in a row of a patch: what one instruction of the matrix units takes
MOST = 128  # channels of the wide map whose gradients fit the registers
HALF = (torch.bfloat16, torch.float16)


def is_thin(x: Tensor, weight_MC44: Tensor) -> bool:
    """Whether the functions below are for these: on CUDA, in 16 bits, with few channels at one end."""
    m, c = weight_MC44.shape[:2]
    return x.is_cuda and weight_MC44.dtype in HALF and c < FEW and m <= MOST


def widened(x_BCHW: Tensor, weight_MC44: Tensor, bias_M: Tensor) -> Tensor:
    """relu(F.conv2d(x, weight, bias, stride=2, padding=1)) for even H and W."""
    bordered = F.pad(x_BCHW.permute(0, 2, 3, 1), (0, 0, 1, 1, 1, 1)).contiguous()
    return widen(bordered, as_matrix(weight_MC44), bias_M).permute(0, 3, 1, 2)


def narrowed(x_BMhw: Tensor, before_M: Tensor | None, weight_MC44: Tensor, bias_C: Tensor) -> Tensor:
    """F.conv_transpose2d(relu(x + before), weight, bias, stride=2, padding=1).

    `before` is the bias of the layer before, if that has not been added."""
    before_M = x_BMhw.new_zeros(x_BMhw.shape[1]) if before_M is None else before_M
    bordered = narrow(x_BMhw.permute(0, 2, 3, 1), before_M, as_matrix(weight_MC44), bias_C.shape[0])
    return bordered[:, 1:-1, 1:-1].permute(0, 3, 1, 2) + bias_C.view(-1, 1, 1)


def as_matrix(weight_MC44: Tensor) -> Tensor:
    """[4 P, M]: the weights in the order of a patch, each of whose rows has P numbers."""
    m, c = weight_MC44.shape[:2]
    weight_44cM = weight_MC44.permute(2, 3, 1, 0).reshape(4, 4 * c, m)
    return F.pad(weight_44cM, (0, 0, 0, padded(c) - 4 * c)).reshape(-1, m)


def padded(channels: int) -> int:
    """P: a power of two, so that patches are."""
    return max(LEAST, 2 ** (4 * channels - 1).bit_length())
