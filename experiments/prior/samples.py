"""What is looked at beside the bits of a prior: samples, how fast, how alike to photographs, what is nearest to them;
what errors in tokens cost its tokenizer, and how small its tokens become.

FD-VGG says how much samples look like photographs: the Frechet distance of two sets of images in features of VGG16. It
is no FID, which has other features, and the two cannot be compared. An image's features are the means, over all places,
of the last convolution's 512 channels after the ReLU, with the image at its own size. A set is known by the mean and
covariance of its features, and

    FD = |m - m'|^2 + trace(C + C' - 2 (C C')^(1/2)).

The weights are `conv0` to `conv12` of a safetensors file, for images in [-1, 1] that are shifted and scaled as LPIPS
does it. Legend: N images, F features.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from experiments.prior.books import Images, Tokens, decode
from experiments.prior.tokens import error_rows, sizes
from topovq.prior import Prior
from topovq.prior.contact import enlarged, sheet
from topovq.prior.nearest import find_nearest

SAMPLES = 10_000
AT_ONCE = 2_500
SHOWN = 64  # samples on the picture
BESIDE = 8  # samples that are shown with the training images nearest to them
NEAREST = 4
# Of VGG16
POOLED_BEFORE = (2, 4, 7, 10)  # convolutions that a max-pool comes before
CONVOLUTIONS = 13
SHIFT, SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)


def look_at(prior: Prior, tokens: Tokens, images: Images, vgg: Path | None, out: Path, name: str) -> dict[str, Any]:
    """Figures of 10,000 samples; writes pictures of some into `out`."""
    device = tokens.train_NT.device
    samples_NT, seconds = draw(prior, SAMPLES if device.type == "cuda" else 4 * BESIDE, device)
    begin = _now(device)
    pixels = decode(tokens.model, samples_NT)
    figures: dict[str, Any] = {
        "images": len(pixels),
        "seconds": seconds + _now(device) - begin,
        "seconds_of_decoder": _now(device) - begin,
    }
    figures["images_per_second"] = len(pixels) / figures["seconds"]
    train = images[0].permute(0, 3, 1, 2)
    if train.shape[2:] == pixels.shape[2:]:
        near = find_nearest(pixels[:BESIDE], train.split(AT_ONCE), NEAREST)
        _save(sheet(enlarged(near.beside(pixels[:BESIDE])), NEAREST + 1), out / f"nearest-{name}.webp")
    _save(sheet(enlarged(pixels[:SHOWN]), 16), out / f"samples-{name}.webp")
    if vgg is not None and train.shape[2:] == pixels.shape[2:]:
        figures |= distances(VGG(vgg, device), pixels, train, tokens)
    if tokens.model.quantizers[0].maps:
        errors = error_rows(tokens.model, tokens.val_images, tokens.grid)
        figures |= {"error_images": len(tokens.val_images), "error_tokens": tokens.val_NT.numel()}
        figures["errors"] = [{key: row[key] for key in ("errors", "share", "psnr")} for row in errors]
    figures["sizes"] = sizes(
        tokens.val_images[:1_024], tokens.val_NT[:1_024], len(tokens.codes_KD), tokens.figures["psnr"]
    )
    return figures


@torch.no_grad()
def draw(prior: Prior, number: int, device: torch.device) -> tuple[Tensor, float]:
    """Samples [number, T] and the seconds they took, after a first few."""
    prior.eval()
    with torch.autocast(device.type, torch.bfloat16):
        prior.sample(min(number, AT_ONCE))
        begin, found = _now(device), []
        for first in range(0, number, AT_ONCE):
            found.append(prior.sample(min(AT_ONCE, number - first)))
    return torch.cat(found), _now(device) - begin


def distances(vgg: VGG, pixels: Tensor, train: Tensor, tokens: Tokens) -> dict[str, float]:
    """FD-VGG to training images: of the samples, of reconstructions, and of other photographs, which is the least that
    can be hoped for."""
    real = vgg.moments(train[: len(pixels)])
    return {
        "fd_vgg": frechet(vgg.moments(pixels), real),
        "fd_vgg_reconstructions": frechet(vgg.moments(decode(tokens.model, tokens.val_NT)), real),
        "fd_vgg_photographs": frechet(vgg.moments(tokens.val_images), real),
    }


def _save(sheet_CHW: Tensor, path: Path) -> None:
    Image.fromarray(sheet_CHW.permute(1, 2, 0).numpy()).save(path, lossless=True, quality=50, method=2)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


# FD-VGG


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
