"""Images side by side on one picture."""

from __future__ import annotations

import math

import torch
from torch import Tensor

GAP = 2  # pixels between images
SMALLEST = 64  # pixels of a side: smaller images are shown enlarged, so that one can judge them
WHITE = 255


def enlarged(images_NCHW: Tensor) -> Tensor:
    """Images by a whole factor so large that a side has SMALLEST pixels or more."""
    factor = math.ceil(SMALLEST / max(images_NCHW.shape[2:]))
    return images_NCHW.repeat_interleave(factor, 2).repeat_interleave(factor, 3)


def sheet(images_NCHW: Tensor, columns: int | None = None) -> Tensor:
    """Images side by side on white, in rows of `columns` (as many as there are rows, if not given): uint8 [C, H, W]."""
    number, channels, height, width = images_NCHW.shape
    columns = min(columns or math.ceil(math.sqrt(number)), number)
    rows = math.ceil(number / columns)
    shape = (channels, rows * (height + GAP) + GAP, columns * (width + GAP) + GAP)
    whole = torch.full(shape, WHITE, dtype=torch.uint8)
    for i, image in enumerate(images_NCHW):
        top, left = i // columns * (height + GAP) + GAP, i % columns * (width + GAP) + GAP
        whole[:, top : top + height, left : left + width] = image
    return whole
