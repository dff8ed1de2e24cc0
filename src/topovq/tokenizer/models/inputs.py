"""Images as people have them, as a batch that a model takes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from topovq.missing import needs

if TYPE_CHECKING:
    from PIL.Image import Image

    from topovq.tokenizer.models.model import Tokenizer

    Single = Image | str | os.PathLike[str]
    Images = Tensor | Single | Sequence[Single]

SLACK = 0.05  # of the range of normalized pixels, by which floats may lie outside of it


def as_batch(images: Images, model: Tokenizer) -> Tensor:
    """uint8 pixels or normalized floats [B, C, H, W] on the model's device; see `Tokenizer.encode`."""
    if isinstance(images, Tensor):
        return _normalized(images, model) if images.is_floating_point() else images
    several = images if isinstance(images, Sequence) and not isinstance(images, str) else [images]
    if not several:
        raise ValueError("the list of images is empty")
    return torch.stack([_square(image, model) for image in several]).to(model.mean_C11.device)


def _normalized(x_BCHW: Tensor, model: Tokenizer) -> Tensor:
    """Floats in [0, 1] are pixels; others are taken as normalized, with a warning if they cannot be."""
    if torch.compiler.is_compiling() or not x_BCHW.numel():
        return x_BCHW
    low, high = (float(end) for end in torch.aminmax(x_BCHW.detach()))
    if low >= 0 and high <= 1:
        return (x_BCHW.to(model.mean_C11) * 255 - model.mean_C11) / model.std_C11
    black, white = (-model.mean_C11 / model.std_C11).min(), ((255 - model.mean_C11) / model.std_C11).max()
    slack = SLACK * (white - black)
    if not (low >= black - slack and high <= white + slack):
        warnings.warn(
            f"floats from {low:.3g} to {high:.3g} are neither in [0, 1] nor normalized, which for this model is "
            f"{black:.3g} to {white:.3g}; they are taken as normalized. Give uint8 pixels or floats in [0, 1]",
            stacklevel=4,
        )
    return x_BCHW


def _square(image: Any, model: Tokenizer) -> Tensor:
    """A PIL image or an image file as uint8 [C, S, S]."""
    with needs("train"):
        from PIL import Image

        from topovq.tokenizer.data.decode import decode, to_square
    if model.channels not in (1, 3):
        raise ValueError(f"the model takes images of {model.channels} channels; give a tensor of uint8 pixels")
    pixels_SS3 = np.empty((model.image_size, model.image_size, 3), dtype=np.uint8)
    if isinstance(image, Image.Image):
        to_square(image, model.image_size, "crop", pixels_SS3)
    elif isinstance(image, str | os.PathLike):
        decode(os.fspath(image), model.image_size, "crop", pixels_SS3)
    else:
        raise TypeError(f"an image of type {type(image).__name__} is no tensor, no PIL image and no path")
    pixels_CSS = torch.from_numpy(pixels_SS3).permute(2, 0, 1)
    return pixels_CSS if model.channels == 3 else pixels_CSS.float().mean(0, keepdim=True).round().to(torch.uint8)
