"""The training images nearest to samples, so that a person can tell a copy from a new picture.

The distance is the root of the mean squared difference of pixels: 0 for the same image, 255 for black and white.

Legend: N samples, B images at a time, k of them beside a sample.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Nearest:
    """Images uint8 [N, k, C, H, W] on the CPU, the nearest first, and their distances float32 [N, k]."""

    images: Tensor
    distances: Tensor

    def beside(self, samples_NCHW: Tensor) -> Tensor:
        """Each sample, then the images nearest to it: uint8 [N * (k + 1), C, H, W]."""
        return torch.cat([samples_NCHW.cpu()[:, None], self.images], 1).flatten(0, 1)


@torch.no_grad()
def find_nearest(samples_NCHW: Tensor, batches: Iterable[Tensor], k: int = 3) -> Nearest:
    """The `k` images of `batches` that are nearest to each sample (fewer where there are fewer images).

    samples_NCHW  uint8; the distances are computed where it lies
    batches       uint8 [B, C, H, W], of the samples' size
    """
    place, shape = samples_NCHW.device, samples_NCHW.shape[1:]
    images = torch.empty(len(samples_NCHW), 0, *shape, dtype=torch.uint8)
    apart_Nk = torch.empty(len(samples_NCHW), 0)
    for batch_BCHW in batches:
        if batch_BCHW.shape[1:] != shape:
            raise ValueError(f"images of {tuple(batch_BCHW.shape[1:])} are not of the samples' size, {tuple(shape)}")
        there = batch_BCHW.to(place).float()
        # Differences and not a matrix product, by which a copy would not be exactly 0 away.
        squares = [(there - sample.float()).square().flatten(1).mean(1) for sample in samples_NCHW]
        every = torch.cat([apart_Nk, torch.stack(squares).cpu()], 1)
        apart_Nk, index = every.topk(min(k, every.shape[1]), largest=False)
        # Those from before come first in `every`, the batch after them.
        before, here = images.shape[1], batch_BCHW.cpu()
        rows = [
            torch.stack([kept[i] if i < before else here[i - before] for i in row])
            for kept, row in zip(images, index.tolist())
        ]
        images = torch.stack(rows)
    if not images.shape[1]:
        raise ValueError("there is no image to compare the samples with")
    return Nearest(images, apart_Nk.sqrt())
