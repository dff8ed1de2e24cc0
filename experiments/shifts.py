"""What moving tokens on the map does to an image, measured: PSNR over the offset."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from topovq.metrics import to_psnr
from topovq.tokenizer.atlas import LEVEL_NAMES
from topovq.tokenizer.models import Tokenizer
from topovq.view.pictures import moved

PIXELS = 2**19  # decoded at a time


@dataclass(frozen=True)
class ShiftScore:
    """PSNR in dB, over all pixels of all images, of what the moved tokens decode to."""

    moved: str  # which tokens: a key of `level_choices`
    offset: int  # places along every axis of the map
    to_reconstruction: float  # infinity where nothing moved
    to_original: float
    images: int


def level_choices(model: Tokenizer) -> dict[str, tuple[int, ...]]:
    """Which tokens may be moved: all of them and, where there are several levels, each level alone."""
    every = tuple(range(len(model.quantizers)))
    if len(every) == 1:
        return {"all tokens": every}
    names = LEVEL_NAMES.get(len(every), tuple(f"level {level}" for level in every))
    together = "both levels" if len(every) == 2 else "all levels"
    return {together: every} | {f"{name} alone": (level,) for level, name in enumerate(names)}


def shift_scores(
    model: Tokenizer,
    images_BCHW: Tensor,
    offsets: Iterable[int],
    advance: Callable[[], object] = lambda: None,
) -> list[ShiftScore]:
    """Scores of uint8 images for every choice of levels and every offset, each image encoded once.

    `advance` is called after every choice and offset of every batch: see `batches`.
    """
    offsets, choices = list(offsets), level_choices(model)
    device = model.mean_C11.device
    errors = torch.zeros(len(choices), len(offsets), 2, dtype=torch.float64)
    for batch in batches(images_BCHW):
        batch = batch.to(device)
        tokens = model.encode(batch)
        plain = model.decode(tokens)
        for row, levels in enumerate(choices.values()):
            for column, offset in enumerate(offsets):
                ours = (model.decode(moved(model, tokens, offset, levels)) if offset else plain).double()
                for which, theirs in enumerate((plain, batch)):
                    errors[row, column, which] += float((ours - theirs).square().sum())
                advance()
    errors /= images_BCHW.numel()
    scores = []
    for row, name in enumerate(choices):
        for column, offset in enumerate(offsets):
            to_reconstruction, to_original = map(to_psnr, errors[row, column].tolist())
            scores.append(ShiftScore(name, offset, to_reconstruction, to_original, len(images_BCHW)))
    return scores


def batches(images_BCHW: Tensor) -> Sequence[Tensor]:
    """The images in as many parts as `shift_scores` takes them in."""
    return images_BCHW.split(max(1, PIXELS // images_BCHW[0, 0].numel()))
