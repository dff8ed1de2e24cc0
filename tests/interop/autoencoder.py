"""What the tests with other libraries share: an autoencoder with a codebook, its data, and an encoder to export."""

import torch
from torch import Tensor, nn

from topovq import KohonenVQ

DIM, SIZE = 6, 16


class Autoencoder(nn.Module):
    """forward(x [N, 6]) gives the loss, tokens(x) the indices [N]."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.encoder = nn.Linear(DIM, 8)
        self.vq = KohonenVQ(8, SIZE, **options)
        self.decoder = nn.Linear(8, DIM)

    def forward(self, x: Tensor) -> Tensor:
        quantized, _, loss = self.vq(self.encoder(x))
        return (self.decoder(quantized) - x).square().mean() + loss

    def tokens(self, x: Tensor) -> Tensor:
        training = self.training
        self.eval()
        with torch.no_grad():
            indices = self.vq(self.encoder(x)).indices
        self.train(training)
        return indices


class ImageEncoder(nn.Module):
    """Images [B, 3, h, w] to (quantized, indices, loss), a plain tuple."""

    def __init__(self, vq: nn.Module) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 4, 4)
        self.vq = vq

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return tuple(self.vq(self.convolution(image)))


def data(batches: int = 4, seed: int = 0) -> Tensor:
    """[batches, 32, 6]"""
    return torch.randn(batches, 32, DIM, generator=torch.Generator().manual_seed(seed))


def statistics(vq: KohonenVQ) -> dict[str, Tensor]:
    """The floating-point state of the codebook, which is float32 whatever the model is."""
    return {name: value for name, value in vq.codebooks[0].state_dict().items() if value.is_floating_point()}


class Closest(nn.Module):
    """A quantizer that gives its three closest codes."""

    def __init__(self, vq: KohonenVQ) -> None:
        super().__init__()
        self.vq = vq

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.vq(x, topk=3))
