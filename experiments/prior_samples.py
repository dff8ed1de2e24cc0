"""What is looked at beside the bits of a prior: samples, how fast, how alike to photographs, what is nearest to them;
what errors in tokens cost its tokenizer, and how small its tokens become."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from experiments.compression import sizes
from experiments.fd_vgg import VGG, frechet
from experiments.prior_books import Images, Tokens, decode
from experiments.token_errors import measure
from topovq.prior import Prior
from topovq.prior.nearest import find_nearest

SAMPLES = 10_000
AT_ONCE = 2_500
SHOWN = 64  # samples on the picture
BESIDE = 8  # samples that are shown with the training images nearest to them
NEAREST = 4


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
        _save(_sheet(near.beside(pixels[:BESIDE]), NEAREST + 1), out / f"nearest-{name}.webp")
    _save(_sheet(pixels[:SHOWN], 16), out / f"samples-{name}.webp")
    if vgg is not None and train.shape[2:] == pixels.shape[2:]:
        figures |= distances(VGG(vgg, device), pixels, train, tokens)
    if tokens.model.quantizers[0].maps:
        errors = measure(tokens.model, tokens.val_images, tokens.grid)
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


def _sheet(images: Tensor, columns: int, gap: int = 2) -> np.ndarray:
    """uint8 [N, 3, S, S] side by side, with white between them."""
    array = images.permute(0, 2, 3, 1).cpu().numpy()
    side = array.shape[1] + gap
    sheet = np.full((-(-len(array) // columns) * side - gap, columns * side - gap, 3), 255, np.uint8)
    for number, image in enumerate(array):
        top, left = number // columns * side, number % columns * side
        sheet[top : top + side - gap, left : left + side - gap] = image
    return sheet


def _save(sheet: np.ndarray, path: Path) -> None:
    larger = Image.fromarray(sheet).resize((2 * sheet.shape[1], 2 * sheet.shape[0]), Image.Resampling.NEAREST)
    larger.save(path, lossless=True, quality=50, method=2)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
