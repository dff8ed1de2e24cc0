"""Pictures of a model's codebook and of what its map is good for, as arrays and as matplotlib axes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from topovq.tokenizer.atlas import charts, map_picture
from topovq.tokenizer.models import Tokenizer, Tokens, as_levels

COLORS = {"KSOM": "#1b7a5a", "EMA-VQ": "#c2571a"}  # of the two methods, in every picture that shows both


def codebook_map(model: Tokenizer, level: int = 0) -> np.ndarray:
    """Every code decoded, at its place on the map: uint8 [rows * s, columns * s, 3], s pixels a token.

    Where there is no code it is white.
    """
    picture = map_picture(model, charts(model), level)
    picture[picture[..., 3] == 0] = 255
    return picture[..., :3]


def moved(model: Tokenizer, tokens: Tokens, offset: int | Sequence[int], levels: Sequence[int] | None = None) -> Tokens:
    """Tokens after those of `levels` (default: all) moved by `offset` places on their map, one int for every axis."""
    parts = list(as_levels(tokens))
    for level in range(len(parts)) if levels is None else levels:
        parts[level] = model.quantizers[level].grid.shift(parts[level], offset)
    return parts[0] if len(parts) == 1 else tuple(parts)


def shifted(
    model: Tokenizer, images_BCHW: Tensor, offset: int | Sequence[int], levels: Sequence[int] | None = None
) -> Tensor:
    """Images uint8 [B, C, H, W] -> the same after every token of `levels` (default: all) moved on its map."""
    return model.decode(moved(model, model.encode(images_BCHW), offset, levels))


def pixel_error(ours: Tensor, theirs: Tensor) -> float:
    """Mean absolute difference of uint8 images, in gray levels (0 to 255)."""
    return float((ours.float() - theirs.float()).abs().mean())


def film(images_BCHW: Tensor) -> np.ndarray:
    """Images side by side: uint8 [H, B * W, C]."""
    return torch.cat(list(images_BCHW.cpu()), -1).permute(1, 2, 0).numpy()
