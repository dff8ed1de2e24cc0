"""The networks that tokenizers have had since VQGAN (Esser et al. 2021): GroupNorm, SiLU, residual blocks, attention.

They are trained as the other models here, by the squared error: there is no discriminator and no perceptual loss.
Legend: B images, C channels, H x W pixels; D dimensions of a code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from topovq.tokenizer.models.model import Tokenizer

# stride -> channels of each resolution in units of `hidden`, from the image's own down to the tokens'
WIDTHS = {4: (1, 2, 4), 8: (1, 1, 2, 4), 16: (1, 1, 2, 2, 4), 32: (1, 1, 2, 2, 4, 4)}
MOST_GROUPS = 32


class Norm(nn.GroupNorm):
    """GroupNorm whose output has the type of its input: autocast would have it write float32. Sums are float32.

    It has as many groups as `hidden` allows, so that those of the tokens' own resolution hold four channels or more: a
    group of one channel would be 0 where a map has one place.
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(math.gcd(MOST_GROUPS, hidden, width), width, eps=1e-6)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        with torch.autocast(x_BCHW.device.type, enabled=False):
            weight, bias = self.weight.to(x_BCHW.dtype), self.bias.to(x_BCHW.dtype)
            return F.group_norm(x_BCHW, self.num_groups, weight, bias, self.eps)


class Residual(nn.Module):
    """x + conv(silu(norm(conv(silu(norm(x)))))), where x goes through a 1x1 convolution if the width changes."""

    def __init__(self, width: int, wider: int, hidden: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(Norm(width, hidden), nn.SiLU(), nn.Conv2d(width, wider, 3, padding=1)),
            *(Norm(wider, hidden), nn.SiLU(), nn.Conv2d(wider, wider, 3, padding=1)),
        )
        self.skip = nn.Conv2d(width, wider, 1) if width != wider else nn.Identity()

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.skip(x_BCHW) + self.body(x_BCHW)


class Attention(nn.Module):
    """x + attention over all places of norm(x), with one head."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = Norm(width, hidden)
        self.qkv, self.out = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        b, c, h, w = x_BCHW.shape
        qkv = self.qkv(self.norm(x_BCHW)).flatten(2).transpose(1, 2)  # [B, H W, 3 C]
        q, k, v = (part[:, None] for part in qkv.chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v)[:, 0]
        return x_BCHW + self.out(y.transpose(1, 2).reshape(b, c, h, w))


class Encoder(nn.Sequential):
    """[B, C, H, W] -> [B, D, H / stride, W / stride]."""

    def __init__(self, channels: int, hidden: int, layers: int, stride: int, light: bool, dim: int) -> None:
        widths = [hidden * width for width in WIDTHS[stride]]
        width = hidden
        if light:
            widths = widths[1:]
            parts: list[nn.Module] = [nn.Conv2d(channels, width, 4, stride=2, padding=1)]
        else:
            parts = [nn.Conv2d(channels, width, 3, padding=1)]
        for number, wider in enumerate(widths):
            if number:
                parts.append(nn.Conv2d(width, width, 3, stride=2, padding=1))
            for _ in range(layers):
                parts.append(Residual(width, wider, hidden))
                width = wider
        parts += [Attention(width, hidden), Residual(width, width, hidden), Norm(width, hidden), nn.SiLU()]
        super().__init__(*parts, nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, dim, 1))


class Decoder(nn.Sequential):
    """[B, D, H, W] -> [B, C, H * stride, W * stride]: the encoder mirrored; upsampling repeats pixels."""

    def __init__(self, channels: int, hidden: int, layers: int, stride: int, light: bool, dim: int) -> None:
        widths = [hidden * width for width in WIDTHS[stride]][1 if light else 0 :]
        width = widths[-1]
        parts: list[nn.Module] = [nn.Conv2d(dim, width, 1), nn.Conv2d(width, width, 3, padding=1)]
        parts += [Residual(width, width, hidden), Attention(width, hidden), Residual(width, width, hidden)]
        for number, narrower in reversed(list(enumerate(widths))):
            for _ in range(layers):
                parts.append(Residual(width, narrower, hidden))
                width = narrower
            if number:
                parts += [nn.Upsample(scale_factor=2.0), nn.Conv2d(width, width, 3, padding=1)]
        if light:
            parts += [nn.Upsample(scale_factor=2.0), nn.Conv2d(width, width // 2, 3, padding=1)]
            width = width // 2
        super().__init__(*parts, Norm(width, hidden), nn.SiLU(), nn.Conv2d(width, channels, 3, padding=1))


class VQGAN(Tokenizer):
    """Images [B, C, S, S] <-> tokens int64 [B, S / stride, S / stride].

    hidden             channels at the resolution of the image; those of the tokens have four times as many
    residual_layers    blocks of each resolution
    stride             pixels per token: 4, 8, 16 or 32
    light              no blocks at the resolution of the image, where most of the time would go
    The other arguments are VQVAE's.
    """

    kind = "vqgan"

    def __init__(
        self,
        image_size: int = 256,
        channels: int = 3,
        hidden: int = 64,
        residual_layers: int = 1,
        stride: int = 8,
        light: bool = True,
        codebook_size: int = 16_384,
        code_dim: int = 8,
        quantizer: str = "kohonen",
        quantizer_options: dict[str, Any] | None = None,
        mean: Sequence[float] = (127.5, 127.5, 127.5),
        std: Sequence[float] = (127.5, 127.5, 127.5),
    ) -> None:
        if stride not in WIDTHS:
            raise ValueError(f"stride={stride!r} must be one of {', '.join(map(str, WIDTHS))}")
        if not isinstance(hidden, int) or hidden < 2 or hidden % 2:
            raise ValueError(f"hidden={hidden!r} must be an even number of channels, such as 64")
        if not isinstance(residual_layers, int) or residual_layers < 1:
            raise ValueError(f"residual_layers={residual_layers!r} must be at least 1")
        super().__init__(image_size, (stride,), channels, mean, std)
        size = (channels, hidden, residual_layers, stride, light, code_dim)
        self.encoder = Encoder(*size)
        self._make_quantizers(1, quantizer, code_dim, codebook_size, quantizer_options or {})
        self.decoder = Decoder(*size)

    def features(self, x_BCHW: Tensor) -> list[Tensor]:
        return [self.encoder(x_BCHW)]

    def reconstruct(self, quantized: Sequence[Tensor]) -> Tensor:
        return self.decoder(quantized[0])
