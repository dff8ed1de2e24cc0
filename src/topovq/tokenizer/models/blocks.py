"""The convolutional parts of VQ-VAE and VQ-VAE-2 (van den Oord et al. 2017, Razavi et al. 2019).

Legend: B images, C channels, H x W pixels; h = hidden channels, r = residual channels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from topovq.tokenizer.models.ends import is_thin, narrowed, widened

RESIDUALS = ("plain", "activated")


class Residual(nn.Module):
    """[B, h, H, W] -> the same.

    plain      x + conv1x1(relu(conv3x3(relu(x))))
    activated  the same with relu(x) in place of x, and convolutions without biases: what an in-place ReLU makes of it
               in the code of the Kohonen-VAE's authors
    """

    def __init__(self, hidden: int, residual_hidden: int, kind: str) -> None:
        super().__init__()
        if kind not in RESIDUALS:
            raise ValueError(f"residual={kind!r} is unknown; choose one of {', '.join(map(repr, RESIDUALS))}")
        self.activated = kind == "activated"
        self.body = nn.Sequential(
            nn.ReLU(),
            nn.Conv2d(hidden, residual_hidden, 3, padding=1, bias=not self.activated),
            nn.ReLU(),
            nn.Conv2d(residual_hidden, hidden, 1, bias=not self.activated),
        )

    def forward(self, x_BhHW: Tensor) -> Tensor:
        return (x_BhHW.relu() if self.activated else x_BhHW) + self.body(x_BhHW)


def residual_stack(hidden: int, layers: int, residual_hidden: int, kind: str) -> list[nn.Module]:
    """`layers` residual blocks and the ReLU that closes them."""
    return [*(Residual(hidden, residual_hidden, kind) for _ in range(layers)), nn.ReLU()]


class Encoder(nn.Sequential):
    """[B, C, H, W] -> [B, h, H / stride, W / stride]: a 4x4 stride-2 convolution per halving, then residual blocks."""

    def __init__(
        self, channels: int, hidden: int, layers: int, residual_hidden: int, residual: str, stride: int
    ) -> None:
        parts: list[nn.Module] = []
        width = channels
        for halving in range(halvings(stride)):
            wider = hidden // 2 if halving == 0 else hidden
            parts += [nn.Conv2d(width, wider, 4, stride=2, padding=1), nn.ReLU()]
            width = wider
        parts += [nn.Conv2d(width, hidden, 3, padding=1), *residual_stack(hidden, layers, residual_hidden, residual)]
        super().__init__(*parts)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        first, _, *rest = self  # a convolution, its ReLU
        assert isinstance(first, nn.Conv2d)
        assert first.bias is not None
        if not is_thin(x_BCHW, first.weight) or x_BCHW.requires_grad:
            return super().forward(x_BCHW)
        x = widened(x_BCHW.to(first.weight.dtype), first.weight, first.bias)
        for part in rest:
            x = part(x)
        return x


class Decoder(nn.Sequential):
    """[B, D, H, W] -> [B, C, H * stride, W * stride]: the encoder mirrored, with transposed convolutions."""

    def __init__(
        self, dim: int, channels: int, hidden: int, layers: int, residual_hidden: int, residual: str, stride: int
    ) -> None:
        parts: list[nn.Module] = [
            nn.Conv2d(dim, hidden, 3, padding=1),
            *residual_stack(hidden, layers, residual_hidden, residual),
        ]
        width, doublings = hidden, halvings(stride)
        for doubling in range(doublings):
            left = doublings - 1 - doubling
            narrower = channels if left == 0 else hidden // 2 if left == 1 else hidden
            parts += [_double(width, narrower)] + [nn.ReLU()] * (left > 0)
            width = narrower
        super().__init__(*parts)

    def forward(self, x_BDHW: Tensor) -> Tensor:
        *rest, before, _, last = self  # a layer, its ReLU, a transposed convolution
        assert isinstance(last, nn.ConvTranspose2d)
        assert last.bias is not None
        if not is_thin(x_BDHW, last.weight):
            return super().forward(x_BDHW)
        x = x_BDHW
        for part in rest:
            x = part(x)
        if isinstance(before, nn.ConvTranspose2d):  # its bias is left to the next
            return narrowed(F.conv_transpose2d(x, before.weight, None, 2, 1), before.bias, last.weight, last.bias)
        return narrowed(before(x), None, last.weight, last.bias)


def upsample(dim: int, stride: int) -> nn.Sequential:
    """[B, D, H, W] -> [B, D, H * stride, W * stride] by one transposed convolution per doubling."""
    return nn.Sequential(*(_double(dim, dim) for _ in range(halvings(stride))))


def dense_gradient(x_BCHW: Tensor) -> Tensor:
    """x, whose gradient is copied where it comes as a slice of a joined map: compiled, that is faster than the copy
    that the gradient of a convolution would make of it."""
    return _DenseGradient.apply(x_BCHW) if x_BCHW.requires_grad else x_BCHW


class _DenseGradient(torch.autograd.Function):
    @staticmethod
    def forward(x_BCHW: Tensor) -> Tensor:
        return x_BCHW.view_as(x_BCHW)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        # Of x: while this is compiled, the strides of a gradient are not known yet.
        ctx.last = inputs[0].is_contiguous(memory_format=torch.channels_last)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (grad_BCHW,) = grads
        return grad_BCHW.contiguous(memory_format=torch.channels_last if ctx.last else torch.contiguous_format)


def _double(width: int, narrower: int) -> nn.ConvTranspose2d:
    return nn.ConvTranspose2d(width, narrower, 4, stride=2, padding=1)


def halvings(stride: int) -> int:
    """How many stride-2 convolutions make `stride`: 4 gives 2."""
    if not isinstance(stride, int) or stride < 2 or stride & (stride - 1):
        raise ValueError(f"stride={stride!r} must be a power of two of at least 2, such as 4")
    return stride.bit_length() - 1
