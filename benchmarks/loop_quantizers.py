"""The quantizers of benchmarks/loop.py: features [B, D, h, w] -> (quantized, loss), each as its library is used.

Those of others get float32, as they expect, whatever autocast says. The commitment weighs 0.25 where there is one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.layers_peers import PlainVQ
from topovq import KohonenVQ

COMMITMENT = 0.25
IDENTITY = "identity"
LEVELS = {512: [8, 8, 8], 16_384: [8, 8, 8, 6, 5]}  # of FSQ, as its paper has them


class Identity(nn.Module):
    """No quantizer: its input straight through, and no loss."""

    def forward(self, x_BDHW: Tensor) -> tuple[Tensor, Tensor]:
        return x_BDHW, x_BDHW.new_zeros((), dtype=torch.float32)


class Ours(nn.Module):
    def __init__(self, dim: int, size: int, **options: Any) -> None:
        super().__init__()
        self.inner = KohonenVQ(dim, size, accept_image_fmap=True, commitment_weight=COMMITMENT, **options)

    def forward(self, x_BDHW: Tensor) -> tuple[Tensor, Tensor]:
        quantized, _, loss = self.inner(x_BDHW)
        return quantized, loss


class Plain(nn.Module):
    """EMA-VQ in plain torch, which takes rows."""

    def __init__(self, dim: int, size: int) -> None:
        super().__init__()
        self.inner = PlainVQ(dim, size)

    def forward(self, x_BDHW: Tensor) -> tuple[Tensor, Tensor]:
        b, d, h, w = x_BDHW.shape
        with torch.autocast(x_BDHW.device.type, enabled=False):
            q_ND, _, loss = self.inner(x_BDHW.float().movedim(1, -1).reshape(-1, d))
        return q_ND.view(b, h, w, d).movedim(-1, 1).to(x_BDHW.dtype), COMMITMENT * loss


class Theirs(nn.Module):
    """A quantizer of vector-quantize-pytorch for feature maps."""

    def __init__(self, name: str, *arguments: Any, **options: Any) -> None:
        super().__init__()
        self.inner = getattr(importlib.import_module("vector_quantize_pytorch"), name)(*arguments, **options)

    def forward(self, x_BDHW: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(x_BDHW.device.type, enabled=False):
            quantized, _, *losses = self.inner(x_BDHW.float())
        loss = losses[0].sum() if losses else quantized.new_zeros(())  # FSQ has none
        return quantized.to(x_BDHW.dtype), loss


def vector_quantize(dim: int, size: int) -> nn.Module:
    """Their recipe against dead codes: a k-means start, and codes that expire."""
    return Theirs(
        "VectorQuantize", dim, size, decay=0.99, kmeans_init=True, threshold_ema_dead_code=2, rotation_trick=False,
        commitment_weight=COMMITMENT, accept_image_fmap=True,
    )  # fmt: skip


def sim_vq(dim: int, size: int) -> nn.Module:
    return Theirs(
        "SimVQ", dim, size, channel_first=True, rotation_trick=False,
        input_to_quantize_commit_loss_weight=COMMITMENT,
    )  # fmt: skip


QUANTIZERS: dict[str, Callable[[int, int], nn.Module]] = {
    IDENTITY: lambda dim, size: Identity(),
    "topovq, recommended": Ours,
    "plain torch EMA-VQ": Plain,
    "vector-quantize-pytorch": vector_quantize,
    "topovq, none": lambda dim, size: Ours(dim, size, neighborhood="none"),
    "FSQ": lambda dim, size: Theirs("FSQ", LEVELS[size], dim=dim),
    "SimVQ": sim_vq,
}
