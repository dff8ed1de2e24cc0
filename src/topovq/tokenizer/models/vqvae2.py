"""VQ-VAE-2: tokens on several scales (Razavi et al. 2019), with the sizes of the paper's 256x256 models as defaults."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from topovq.tokenizer.models.blocks import Decoder, Encoder, dense_gradient, upsample
from topovq.tokenizer.models.model import Tokenizer


class VQVAE2(Tokenizer):
    """Images [B, C, S, S] <-> one token grid per level, coarsest first.

    `strides` are those of the encoders from the image upward: (4, 2) gives a bottom grid of S / 4 and a top grid of
    S / 8; (4, 2, 2) adds a third level. Each level below the top is quantized given the decoded codes above it:

        z_top = conv1(enc_top(enc_bottom(x)));  z_bottom = conv1([dec_top(q_top), enc_bottom(x)])
        x' = dec([up(q_top), q_bottom])

    That second conv1 is done as the sum of two, one of the codes and one of the image: the maps need not be joined, nor
    their gradient be cut apart again.

    The other arguments are VQVAE's, shared by the levels; every level has its own codebook, grid and statistics.
    """

    kind = "vqvae2"

    def __init__(
        self,
        image_size: int = 256,
        channels: int = 3,
        hidden: int = 128,
        residual_layers: int = 2,
        residual_hidden: int = 32,
        residual: str = "plain",
        strides: Sequence[int] = (4, 2),
        codebook_size: int = 512,
        code_dim: int = 64,
        quantizer: str = "kohonen",
        quantizer_options: dict[str, Any] | None = None,
        mean: Sequence[float] = (127.5, 127.5, 127.5),
        std: Sequence[float] = (127.5, 127.5, 127.5),
    ) -> None:
        if len(strides) < 2:
            raise ValueError(f"strides={list(strides)} must name at least two levels, such as (4, 2); VQVAE has one")
        super().__init__(image_size, strides, channels, mean, std)
        levels = len(strides)
        size = (hidden, residual_layers, residual_hidden, residual)
        # All lists here run from the bottom (level 0: next to the pixels) to the top.
        self.encoders = nn.ModuleList(
            Encoder(channels if level == 0 else hidden, *size, stride) for level, stride in enumerate(strides)
        )
        self.to_codes = nn.ModuleList(
            nn.Conv2d(hidden if level == levels - 1 else hidden + code_dim, code_dim, 1) for level in range(levels)
        )
        self.condition = nn.ModuleList(Decoder(code_dim, code_dim, *size, stride) for stride in strides[1:])
        self.upsample = nn.ModuleList(
            upsample(code_dim, math.prod(strides[1 : level + 1])) for level in range(1, levels)
        )
        self.decoder = Decoder(levels * code_dim, channels, *size, strides[0])
        self._make_quantizers(levels, quantizer, code_dim, codebook_size, quantizer_options or {})

    def features(self, x_BCHW: Tensor) -> list[Tensor]:
        found: list[Tensor] = []
        for encoder, to_codes in zip(self.encoders, self.to_codes):
            x_BCHW = encoder(x_BCHW)
            assert isinstance(to_codes, nn.Conv2d)
            if len(found) < len(self.encoders) - 1:
                found.append(F.conv2d(x_BCHW, to_codes.weight[:, -x_BCHW.shape[1] :]))
            else:
                found.append(to_codes(x_BCHW))
        return found[::-1]

    def descend(self, level: int, feature: Tensor, above: Tensor) -> Tensor:
        place = len(self.encoders) - 1 - level
        to_codes, given = self.to_codes[place], self.condition[place](above)
        assert isinstance(to_codes, nn.Conv2d)
        return feature + F.conv2d(given, to_codes.weight[:, : given.shape[1]], to_codes.bias)

    def reconstruct(self, quantized: Sequence[Tensor]) -> Tensor:
        *above, bottom = quantized
        raised = [dense_gradient(up(q)) for up, q in zip(reversed(list(self.upsample)), above)]
        return self.decoder(torch.cat([*raised, bottom], 1))
