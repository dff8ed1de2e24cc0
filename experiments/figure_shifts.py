"""Images decoded from tokens that were moved on the map, KSOM above EMA-VQ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from experiments.canvas import INK, Panel, plate, shrink
from experiments.shifts import level_choices
from topovq.tokenizer.models import Tokenizer
from topovq.view.pictures import COLORS, moved
from topovq.view.report import with_channels
from topovq.view.report.images import sheet

NEAR, WIDE = range(-3, 4), range(-10, 11)


def draw_shifts(models: Mapping[str, Tokenizer], images_BCHW: Tensor, offsets: Sequence[int], caption: str) -> Any:
    """For every choice of levels, each image and below each other what the models make of its moved tokens."""
    most, least = (128, 96) if len(offsets) < 10 else (128, 64)
    first = next(iter(models.values()))
    rows = []
    for choice in level_choices(first):
        strips = [shifted_strip(model, images_BCHW, offsets, choice) for model in models.values()]
        for index, image in enumerate(with_channels(images_BCHW, first)):
            shown = [shrink(strip[index], most) for strip in strips]
            side = shown[0].shape[-1]
            times, gap = max(1, round(least / side)), 2
            centers = [column * (side + gap) + side / 2 for column in range(len(offsets))]
            names = [(row * (side + gap) + side / 2, name, COLORS.get(name, INK)) for row, name in enumerate(models)]
            rows.append(
                [
                    Panel(sheet([[shrink(image[None], most)[0]]]), times, columns=[(side / 2, "image")] * (index == 0)),
                    Panel(
                        sheet([list(strip) for strip in shown], gap),
                        times,
                        f"{choice} moved by" if index == 0 else "",
                        [(x, label(offset)) for x, offset in zip(centers, offsets)] if index == 0 else (),
                        names,
                    ),
                ]
            )
    return plate(rows, "Images after their tokens were moved on the map", caption)


def shifted_strip(model: Tokenizer, images_BCHW: Tensor, offsets: Sequence[int], choice: str) -> Tensor:
    """uint8 [B, offsets, C, H, W]: every image with the tokens of `choice` moved by every offset."""
    levels = level_choices(model)[choice]
    tokens = model.encode(with_channels(images_BCHW, model).to(model.mean_C11.device))
    return torch.stack([model.decode(moved(model, tokens, offset, levels)).cpu() for offset in offsets], 1)


def label(offset: int) -> str:
    return f"{offset:+d}".replace("-", "−") if offset else "0"
