"""Pictures of a model's codebook and of what its map is good for, as arrays and as matplotlib axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from topovq.atlas import charts, map_picture
from topovq.models import Tokenizer, as_levels


def codebook_map(model: Tokenizer, level: int = 0) -> np.ndarray:
    """Every code decoded, at its place on the map: uint8 [rows * s, columns * s, 3], s pixels a token."""
    return map_picture(model, charts(model), level)[..., :3]


def shifted(model: Tokenizer, images_BCHW: Tensor, offset: Sequence[int]) -> Tensor:
    """Images uint8 [B, C, H, W] -> the same after every token moved by `offset` places on its map."""
    quantizers: Any = model.quantizers
    moved = [q.grid.shift(t, tuple(offset)) for q, t in zip(quantizers, as_levels(model.encode(images_BCHW)))]
    return model.decode(moved[0] if len(moved) == 1 else tuple(moved))


def pixel_error(ours: Tensor, theirs: Tensor) -> float:
    """Mean absolute difference of uint8 images, in gray levels (0 to 255)."""
    return float((ours.float() - theirs.float()).abs().mean())


def film(images_BCHW: Tensor) -> np.ndarray:
    """Images side by side: uint8 [H, B * W, C]."""
    return torch.cat(list(images_BCHW.cpu()), -1).permute(1, 2, 0).numpy()
