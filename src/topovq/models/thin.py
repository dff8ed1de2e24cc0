"""4x4 stride-2 convolutions from or to a few channels, such as an image's three, in a shape that GPUs are fast at.

Matrix units want channels in multiples of eight. Four neighboring pixels of three channels are twelve channels of one
place on a grid half as fine, on which the same 4x4 stride-2 convolution is a 2x2 convolution of stride 1; with four
channels of zeros it has sixteen. The values are those of the ordinary convolution, summed in another order.
Legend: B images, C few channels, O many; H x W pixels of the fine grid; h = H / 2 + 1, w = W / 2 + 1.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

MULTIPLE = 8  # of channels that the fast kernels take


class ThinConv(nn.Conv2d):
    """`nn.Conv2d(C, O, 4, stride=2, padding=1)` for few channels C."""

    def __init__(self, channels: int, out_channels: int) -> None:
        super().__init__(channels, out_channels, 4, stride=2, padding=1)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return coarse_conv(x_BCHW, self.weight, self.bias) if x_BCHW.is_cuda else super().forward(x_BCHW)


class ThinConvTranspose(nn.ConvTranspose2d):
    """`nn.ConvTranspose2d(O, C, 4, stride=2, padding=1)` for few channels C."""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__(in_channels, channels, 4, stride=2, padding=1)

    def forward(self, x_BOHW: Tensor, output_size: list[int] | None = None) -> Tensor:
        if x_BOHW.is_cuda and output_size is None:
            return coarse_conv_transpose(x_BOHW, self.weight, self.bias)
        return super().forward(x_BOHW, output_size)


def coarse_conv(x_BCHW: Tensor, weight_OC44: Tensor, bias_O: Tensor | None) -> Tensor:
    """F.conv2d(x, weight, bias, stride=2, padding=1) for even H and W."""
    b, c, height, width = x_BCHW.shape
    h, w, spare = height // 2 + 1, width // 2 + 1, -4 * c % MULTIPLE
    x_BHWC = F.pad(x_BCHW.permute(0, 2, 3, 1), (0, 0, 1, 1, 1, 1))
    x_Bhwc = x_BHWC.reshape(b, h, 2, w, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, 4 * c)
    kernel = weight_OC44.reshape(-1, c, 2, 2, 2, 2).permute(0, 2, 4, 3, 5, 1).reshape(-1, 2, 2, 4 * c)
    x_Bchw, kernel = F.pad(x_Bhwc, (0, spare)).permute(0, 3, 1, 2), F.pad(kernel, (0, spare)).permute(0, 3, 1, 2)
    return F.conv2d(x_Bchw, kernel, bias_O)


def coarse_conv_transpose(x_BOHW: Tensor, weight_OC44: Tensor, bias_C: Tensor | None) -> Tensor:
    """F.conv_transpose2d(x, weight, bias, stride=2, padding=1)."""
    b, o, height, width = x_BOHW.shape
    c, spare = weight_OC44.shape[1], -4 * weight_OC44.shape[1] % MULTIPLE
    # Tap t of the 2x2 kernel, for the fine row 2 i + dy, is row dy + 2 (1 - t) of the 4x4 one.
    kernel = weight_OC44.reshape(o, c, 2, 2, 2, 2).flip(2, 4).permute(3, 5, 1, 2, 4, 0).reshape(4 * c, 2, 2, o)
    kernel = F.pad(kernel, (0, 0, 0, 0, 0, 0, 0, spare)).permute(0, 3, 1, 2)
    bias = None if bias_C is None else F.pad(bias_C.repeat(4), (0, spare))
    # Channels last, as the convolution has them: so comes its gradient, too, without a copy.
    y_Bhwc = F.conv2d(x_BOHW, kernel, bias, padding=1).permute(0, 2, 3, 1)[..., : 4 * c]
    y = y_Bhwc.reshape(b, height + 1, width + 1, 2, 2, c).permute(0, 5, 1, 3, 2, 4)
    return y.reshape(b, c, 2 * height + 2, 2 * width + 2)[:, :, 1:-1, 1:-1]
