"""A layer that keeps its codes in use: one small autoencoder, trained twice, with the map and without it.

python examples/codes_in_use.py [STEPS]    prints error and usage of both; 300 steps take seconds
"""

import sys

import torch
from torch import Tensor, nn

from topovq import KohonenVQ

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 300


def pictures(number: int) -> Tensor:
    """Waves of random direction, length and color: [number, 3, 16, 16]."""
    y, x = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    angle, length, phase = torch.rand(3, number, 1, 1) * torch.tensor([3.14, 1.0, 6.28]).view(3, 1, 1, 1)
    wave = torch.sin((x * angle.cos() + y * angle.sin()) * (0.3 + length) + phase)
    return wave.unsqueeze(1) * torch.randn(number, 3, 1, 1)


def train(vq: KohonenVQ) -> float:
    """Train an encoder and a decoder around `vq`; returns the last reconstruction error."""
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Conv2d(3, 64, 4, 4), nn.ReLU(), nn.Conv2d(64, 32, 1))
    decoder = nn.Sequential(nn.Conv2d(32, 64, 1), nn.ReLU(), nn.ConvTranspose2d(64, 3, 4, 4))
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=1e-3)
    for _ in range(STEPS):
        images = pictures(64)
        quantized, _, loss = vq(encoder(images))  # the codes learn here, without the optimizer
        error = nn.functional.mse_loss(decoder(quantized), images)
        optimizer.zero_grad()
        (error + loss).backward()
        optimizer.step()
    return error.item()


layers = {
    "with the map": KohonenVQ(32, 1024, steps=STEPS, accept_image_fmap=True),
    "without (EMA-VQ)": KohonenVQ(32, 1024, neighborhood="none", accept_image_fmap=True),
}
for name, vq in layers.items():
    error = train(vq)
    print(f"{name:18} error {error:.3f}, {vq.usage:.0%} of the codes in use, perplexity {vq.perplexity:.0f}")
