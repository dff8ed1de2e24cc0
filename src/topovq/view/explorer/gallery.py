"""The images on offer: validation images, the package's photographs, a folder; and those that are sent.

A request names a set and a number, never a path. Images of the folder are listed once; one that is a link to
somewhere outside of it is not on the list.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from topovq.tokenizer.data import find_images, photograph
from topovq.tokenizer.data.decode import FORMATS, decode
from topovq.tokenizer.data.files import open_file
from topovq.tokenizer.data.photos import HELD_OUT, TRAINING
from topovq.view.explorer.problems import ApiError
from topovq.view.explorer.schemas import MOST_PIXELS, MOST_UPLOAD_BYTES, ImageSet
from topovq.view.report import Study
from topovq.view.report.images import png_bytes, to_array
from topovq.view.report.study import PACKAGED

SHOWN = 48  # images of a set that can be picked


class Gallery:
    def __init__(self, studies: list[Study], folder: Path | None) -> None:
        first = studies[0]
        self.validation = [png_bytes(to_array(image)) for image in first.images_BCHW[:SHOWN]]
        side = max(s.model.image_size for s in studies)
        self.samples = [png_bytes(_small(photograph(name), side)) for name in (*TRAINING, *HELD_OUT)]
        self.files = _inside(folder) if folder is not None else []
        self.sets = [
            ImageSet(
                name="validation",
                count=len(self.validation),
                source=first.source,
                first=most_colorful(first.images_BCHW[:SHOWN]),
            ),
            ImageSet(name="samples", count=len(self.samples), source=PACKAGED),
        ]
        if first.of_crops:  # whole photographs say more than pieces of them
            self.sets.reverse()
        if folder is not None:
            self.sets.append(ImageSet(name="folder", count=len(self.files), source=folder.name))

    def image(self, name: str, index: int, size: int) -> Tensor:
        """Image `index` of a set as uint8 [3, size, size]."""
        images: dict[str, list[bytes] | list[Path]] = {
            "validation": self.validation,
            "samples": self.samples,
            "folder": self.files,
        }
        chosen = images[name]
        if index >= len(chosen):
            raise ApiError(404, f"there is no image {index} in the set {name!r}; it has {len(chosen)}")
        item = chosen[index]
        if isinstance(item, bytes):
            return read_image(item, size)
        try:
            with open_file(item) as file:
                data = file.read(MOST_UPLOAD_BYTES + 1)
        except OSError as error:
            raise ApiError(404, f"image {index} of the folder cannot be read: {error.strerror or error}") from None
        return read_image(data, size)


def most_colorful(images_BCHW: Tensor) -> int:
    """Which image has most color (Hasler and Suesstrunk 2003); of gray ones, the one with most contrast."""
    red, green, blue = images_BCHW.float().expand(-1, 3, -1, -1).flatten(2).unbind(1)
    opponents = torch.stack([red - green, (red + green) / 2 - blue])
    color_B = opponents.std(-1).square().sum(0).sqrt() + 0.3 * opponents.mean(-1).square().sum(0).sqrt()
    gray_B = (red + green + blue).std(-1) / 3
    return int((color_B + 1e-3 * gray_B).argmax())


def sent_image(text: str, size: int) -> Tensor:
    """An image file in base64 as uint8 [3, size, size]."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ApiError(422, "data is not base64; send the bytes of an image file, base64-encoded") from None
    return read_image(data, size)


def read_image(data: bytes, size: int) -> Tensor:
    """The bytes of an image file as uint8 [3, size, size]; the pixels are counted before any is decoded."""
    if len(data) > MOST_UPLOAD_BYTES:
        raise ApiError(413, f"the image file is larger than {MOST_UPLOAD_BYTES // 2**20} MiB; send a smaller one")
    out = np.empty((size, size, 3), np.uint8)
    try:
        with Image.open(io.BytesIO(data), formats=[name for name in FORMATS if name in Image.OPEN]) as image:
            width, height = image.size
        if width * height > MOST_PIXELS:
            raise ApiError(
                413,
                f"the image has {width} x {height} pixels; at most {MOST_PIXELS:,} are taken: scale it down first",
            )
        decode(io.BytesIO(data), size, "crop", out)
    except (ApiError, MemoryError):
        raise
    except UnidentifiedImageError:
        raise ApiError(415, f"the file is no image of a known type ({', '.join(FORMATS)})") from None
    except Image.DecompressionBombError:
        raise ApiError(413, f"the image has more than {MOST_PIXELS:,} pixels: scale it down first") from None
    except Exception as error:  # damaged bytes raise a dozen types in Pillow's decoders
        raise ApiError(415, f"the image cannot be decoded: {error}") from None
    return torch.from_numpy(out).permute(2, 0, 1)


def _inside(folder: Path) -> list[Path]:
    """The images of a folder, without links that lead out of it."""
    if not folder.is_dir():
        raise ValueError(f"--images {folder} is not a folder")
    root = folder.resolve()
    names = [os.fsdecode(name) for name in find_images(folder).names_N]
    real = [(root / name).resolve() for name in names]
    return [path for path in real if path.is_relative_to(root)]


def _small(pixels_HW3: np.ndarray, side: int) -> np.ndarray:
    """The central square, scaled to `side`."""
    height, width, _ = pixels_HW3.shape
    short = min(height, width)
    top, left = (height - short) // 2, (width - short) // 2
    square = Image.fromarray(pixels_HW3[top : top + short, left : left + short])
    return np.asarray(square.resize((side, side), Image.Resampling.LANCZOS))
