"""VQ-VAE: one level of tokens (van den Oord et al. 2017), with the sizes of the paper's CIFAR-10 model as defaults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from topovq.tokenizer.models.blocks import Decoder, Encoder
from topovq.tokenizer.models.model import Tokenizer


class VQVAE(Tokenizer):
    """Images [B, C, S, S] <-> tokens int64 [B, S / stride, S / stride].

    image_size         S, the side of the images it is meant for (others work if they are multiples of `stride`)
    channels           of the images
    hidden             channels inside; `residual_layers` blocks of `residual_hidden` channels on each side
    residual           "plain", or "activated" as in the code of the Kohonen-VAE's authors (blocks.py)
    stride             pixels per token, a power of two
    codebook_size      K codes of `code_dim` dimensions
    quantizer          one of `topovq.tokenizer.models.QUANTIZERS`, built with `quantizer_options`
    mean, std          pixel statistics (0..255) that normalize the images, one per channel
    """

    kind = "vqvae"

    def __init__(
        self,
        image_size: int = 32,
        channels: int = 3,
        hidden: int = 128,
        residual_layers: int = 2,
        residual_hidden: int = 32,
        residual: str = "plain",
        stride: int = 4,
        codebook_size: int = 512,
        code_dim: int = 64,
        quantizer: str = "kohonen",
        quantizer_options: dict[str, Any] | None = None,
        mean: Sequence[float] = (127.5, 127.5, 127.5),
        std: Sequence[float] = (127.5, 127.5, 127.5),
    ) -> None:
        super().__init__(image_size, (stride,), channels, mean, std)
        size = (hidden, residual_layers, residual_hidden, residual)
        self.encoder = Encoder(channels, *size, stride)
        self.to_codes = nn.Conv2d(hidden, code_dim, 1)
        self._make_quantizers(1, quantizer, code_dim, codebook_size, quantizer_options or {})
        self.decoder = Decoder(code_dim, channels, *size, stride)

    def features(self, x_BCHW: Tensor) -> list[Tensor]:
        return [self.to_codes(self.encoder(x_BCHW))]

    def reconstruct(self, quantized: Sequence[Tensor]) -> Tensor:
        return self.decoder(quantized[0])
