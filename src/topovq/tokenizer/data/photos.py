"""`photos`: random crops of the color photographs inside the scikit-image and scikit-learn packages. Needs no network.

A crop is S x S pixels of a photograph chosen uniformly, at a scale chosen uniformly among those of `SCALES` at which it
is large enough, anywhere in it, mirrored half of the time. The scaled photographs sit in memory: a crop is a copy.
"""

import importlib.util
from functools import cache, lru_cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from topovq.tokenizer.data.files import DataError
from topovq.tokenizer.data.order import AUGMENTATION, random_words
from topovq.tokenizer.data.source import Batches, Source, Triple

TRAINING = (
    "skimage/data/astronaut.png",
    "skimage/data/chelsea.png",
    "skimage/data/hubble_deep_field.jpg",
    "skimage/data/ihc.png",
    "skimage/data/motorcycle_left.png",
    "skimage/data/retina.jpg",
    "skimage/data/rocket.jpg",
    "sklearn/datasets/images/china.jpg",
)
HELD_OUT = ("skimage/data/coffee.png", "sklearn/datasets/images/flower.jpg")
SCALES = tuple(2 ** (-k / 2) for k in range(5))  # 1 to 1/4

NORMALIZATION: tuple[Triple, Triple] = ((121.26, 96.08, 88.57), (79.58, 68.93, 70.27))
"""Mean and std over the pixels of the training photographs, each photograph weighing the same."""

VALIDATION_CROPS = 512


class Photos(Source):
    """Endless crops of `TRAINING`; validation is `VALIDATION_CROPS` fixed crops of `HELD_OUT`."""

    def __init__(self, path: None = None, *, size: int = 32, workers: int | None = None) -> None:
        """`path` must be None and `workers` has no effect: the photographs are in the packages, and in memory."""
        if path is not None:
            raise ValueError(
                f"photos takes no path ({str(path)!r} was given); for images of your own give their folder instead"
            )
        super().__init__("photos", size, NORMALIZATION, np.arange(VALIDATION_CROPS))

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"photographs": list(TRAINING), "held_out": list(HELD_OUT)}

    def _train(self, batch_size: int, rows: range, seed: int, start: int) -> Batches:
        for i in count(start):
            yield _crops(TRAINING, self.size, random_words(seed, AUGMENTATION, i, 5 * batch_size), rows)

    def _validation(self, indices: np.ndarray, batch_size: int) -> Batches:
        words = random_words(0, AUGMENTATION, 0, 5 * VALIDATION_CROPS)
        for first in range(0, len(indices), batch_size):
            yield _crops(HELD_OUT, self.size, words, indices[first : first + batch_size])


def photo_crops(number: int, size: int = 32, *, seed: int = 0, held_out: bool = False) -> torch.Tensor:
    """`number` random crops, uint8 [number, 3, size, size], of the training or of the held-out photographs."""
    words = random_words(seed, AUGMENTATION, 0, 5 * number)
    return _crops(HELD_OUT if held_out else TRAINING, size, words, range(number))


@cache
def photograph(name: str) -> np.ndarray:
    """A photograph of `TRAINING` or `HELD_OUT`, uint8 [height, width, 3], read-only."""
    package, _, inside = name.partition("/")
    found = importlib.util.find_spec(package)  # the package itself, large, is not imported
    path = Path(found.submodule_search_locations[0], inside) if found and found.submodule_search_locations else None
    if path is None or not path.is_file():
        raise DataError(
            f"the photograph {inside!r} is not in the installed package {package!r}; reinstall that package"
        )
    with Image.open(path) as image:
        pixels_HWC = np.array(image.convert("RGB"))
    pixels_HWC.flags.writeable = False
    return pixels_HWC


@lru_cache(maxsize=32)
def _pyramid(name: str, size: int) -> tuple[np.ndarray, ...]:
    """A photograph at the scales at which a crop fits, uint8 [3, height, width] each; enlarged if it fits at none."""
    image = Image.fromarray(photograph(name))
    shorter = min(image.size)
    scales = [scale for scale in SCALES if shorter * scale >= size] or [size / shorter]
    levels = (image.resize([round(side * s) for side in image.size], Image.Resampling.LANCZOS) for s in scales)
    return tuple(np.ascontiguousarray(np.asarray(level).transpose(2, 0, 1)) for level in levels)


def _crops(names: tuple[str, ...], size: int, words: np.ndarray, rows: range | np.ndarray) -> torch.Tensor:
    """Crop b of a batch is a function of words [5, B]'s column b: photograph, scale, place and mirroring."""
    words_5B = words.reshape(5, -1)
    pyramids = [_pyramid(name, size) for name in names]
    crops_B3SS = np.empty((len(rows), 3, size, size), dtype=np.uint8)
    for crop_3SS, draws in zip(crops_B3SS, words_5B.T[rows].tolist()):
        photo, scale, y, x, mirror = draws
        levels = pyramids[photo % len(pyramids)]
        level_3HW = levels[scale % len(levels)]
        y %= level_3HW.shape[1] - size + 1
        x %= level_3HW.shape[2] - size + 1
        window_3SS = level_3HW[:, y : y + size, x : x + size]
        crop_3SS[...] = window_3SS[:, :, ::-1] if mirror & 1 else window_3SS
    return torch.from_numpy(crops_B3SS)
