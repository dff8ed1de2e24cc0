"""A run looked at: its model, its record, some validation images and what the model makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from topovq.metrics import code_counts
from topovq.tokenizer.atlas import Chart, charts, from_planes, to_planes
from topovq.tokenizer.data import photo_crops
from topovq.tokenizer.models import Tokenizer
from topovq.tokenizer.training import load_run, open_data, read_record
from topovq.tokenizer.training.record import RECORD_FILE
from topovq.tokenizer.training.runs import data_of

LOOKED_AT = 256  # validation images that hits are counted over
PACKAGED = "photographs that come with the package"  # what is shown where there are no validation images


@dataclass(frozen=True)
class Study:
    """A run's model with its maps, and validation images as it sees them.

    images_BCHW  uint8; `source` says where they are from
    hits         int64 [K] a map: how often each code occurs among the tokens of these images
    """

    name: str
    folder: Path
    model: Tokenizer
    maps: list[Chart]
    record: list[dict[str, Any]]
    images_BCHW: Tensor
    source: str
    hits: list[Tensor]

    @property
    def config(self) -> dict[str, Any]:
        return self.record[0] if self.record else {}

    @property
    def validations(self) -> list[dict[str, Any]]:
        return [line for line in self.record if line["event"] == "validation"]

    def curve(self, key: str) -> list[tuple[int, float | None]]:
        """A figure of the validations: (step, value); None where it was not finite or not recorded."""
        return [(line["step"], line.get(key)) for line in self.validations]

    @property
    def of_crops(self) -> bool:
        """Whether the images are crops of the package's photographs."""
        return self.config.get("data") == "photos" or self.source.startswith(PACKAGED)

    @property
    def usual(self) -> list[int]:
        """The code that occurs most often, of each map."""
        return [int(counts_K.argmax()) for counts_K in self.hits]

    def encode(self, images_BCHW: Tensor) -> list[Tensor]:
        """Images uint8 [B, C, H, W] -> one plane of tokens [B, h, w] a map."""
        return to_planes(self.model.encode(images_BCHW))

    def decode(self, planes: list[Tensor]) -> Tensor:
        """The reverse: uint8 images."""
        return self.model.decode(from_planes(planes, self.maps))

    def shift(self, planes: list[Tensor], offsets: list[tuple[int, ...]]) -> list[Tensor]:
        """Planes after every token moved by its map's offset."""
        return [chart.grid.shift(plane, offset) for chart, plane, offset in zip(self.maps, planes, offsets)]

    def nowhere(self) -> list[tuple[int, ...]]:
        """Offsets that leave every token where it is."""
        return [(0,) * chart.grid.ndim for chart in self.maps]


def study(run: str | Path, name: str | None = None, limit: int = LOOKED_AT) -> Study:
    """Load a run and look at up to `limit` of its validation images, on the CPU."""
    folder = Path(run)
    model = load_run(folder)
    record = read_record(folder / RECORD_FILE) if (folder / RECORD_FILE).exists() else []
    images_BCHW, source = validation_images(model, record[0] if record else None, limit)
    maps = charts(model)
    hits = [torch.zeros(chart.grid.size, dtype=torch.int64) for chart in maps]
    for batch in images_BCHW.split(32):
        for hits_K, plane in zip(hits, to_planes(model.encode(batch))):
            hits_K += code_counts(plane, len(hits_K))
    return Study(name or folder.resolve().name, folder, model, maps, record, images_BCHW, source, hits)


def validation_images(model: Tokenizer, config: dict[str, Any] | None, limit: int) -> tuple[Tensor, str]:
    """Images for the model and a sentence on where they are from: its validation set where that can be opened."""
    if config is None:
        reason = "the folder holds a model without a record, so its own images are not known"
    else:
        try:
            data, path, _ = data_of(config)
            with open_data(data, path, model.image_size, 0) as source:
                images = next(iter(source.validation(limit)))[:limit].clone()
                all_of_them = source.validation_images
            first = f"of the {all_of_them:,} " if all_of_them > len(images) else ""
            return with_channels(images, model), f"{first}validation images of {data}"
        except (OSError, ValueError) as error:
            reason = f"its own data set could not be opened: {error}"
    photographs = photo_crops(min(limit, 64), model.image_size, held_out=True)
    return with_channels(photographs, model), f"{PACKAGED} ({reason})"


def with_channels(images_B3HW: Tensor, model: Tokenizer) -> Tensor:
    """RGB images as the model takes them: gray is their mean."""
    if model.channels == images_B3HW.shape[1]:
        return images_B3HW
    if model.channels != 1:
        raise ValueError(f"the model takes images of {model.channels} channels; pictures of 1 or 3 can be shown")
    return images_B3HW.float().mean(1, keepdim=True).round().to(torch.uint8)
