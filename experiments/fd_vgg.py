"""FD-VGG: the Frechet distance of two sets of images in features of VGG16: how much samples look like photographs.

It is no FID, which has other features, and the two cannot be compared. An image's features are the means, over all
places, of the last convolution's 512 channels after the ReLU, with the image at its own size. A set is known by the
mean and covariance of its features, and

    FD = |m - m'|^2 + trace(C + C' - 2 (C C')^(1/2)).

The weights are `conv0` to `conv12` of a safetensors file, for images in [-1, 1] that are shifted and scaled as LPIPS
does it. Legend: N images, F features.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

POOLED_BEFORE = (2, 4, 7, 10)  # convolutions that a max-pool comes before
CONVOLUTIONS = 13
SHIFT, SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)


class Moments(NamedTuple):
    """The mean and covariance of a set's features, float64 [F] and [F, F], and how many images it has."""

    mean_F: Tensor
    covariance_FF: Tensor
    images: int


class VGG:
    """Features of images, from the weights of a file."""

    def __init__(self, path: Path, device: torch.device | str = "cpu") -> None:
        if not path.is_file():
            raise FileNotFoundError(f"there are no weights of VGG16 at {path}")
        told = {name: tensor.float().to(device) for name, tensor in load_file(path).items()}
        self.layers = [(told[f"conv{n}.weight"], told[f"conv{n}.bias"]) for n in range(CONVOLUTIONS)]
        self.shift, self.scale = (torch.tensor(values, device=device).view(3, 1, 1) for values in (SHIFT, SCALE))

    @torch.no_grad()
    def features(self, images_NCHW: Tensor) -> Tensor:
        """uint8 [N, 3, H, W], at least 16 pixels a side -> [N, F]."""
        x = (images_NCHW.to(self.shift.device).float() / 127.5 - 1 - self.shift) / self.scale
        for number, (weight, bias) in enumerate(self.layers):
            if number in POOLED_BEFORE:
                x = F.max_pool2d(x, 2)
            x = F.relu(F.conv2d(x, weight, bias, padding=1))
        return x.mean((2, 3))

    def moments(self, images_NCHW: Tensor, at_once: int = 500) -> Moments:
        rows_NF = torch.cat([self.features(part) for part in images_NCHW.split(at_once)]).double()
        return Moments(rows_NF.mean(0), rows_NF.T.cov(), len(rows_NF))


def frechet(ours: Moments, theirs: Moments) -> float:
    """The distance of two sets; 0 where both have the same moments."""
    root = _root(ours.covariance_FF)
    middle = torch.linalg.eigvalsh(root @ theirs.covariance_FF @ root).clamp(min=0).sqrt().sum()
    apart = (ours.mean_F - theirs.mean_F).square().sum()
    return float(apart + ours.covariance_FF.trace() + theirs.covariance_FF.trace() - 2 * middle)


def _root(covariance_FF: Tensor) -> Tensor:
    values_F, vectors_FF = torch.linalg.eigh(covariance_FF)
    return vectors_FF * values_F.clamp(min=0).sqrt() @ vectors_FF.T
