"""Images of the study as tensors on the device, and the random crops of them that are trained on."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

SIDE = 160  # of the images that crops are taken from


def load_images(folder: Path | None, data: str, split: str) -> Tensor:
    """uint8 [M, SIDE, SIDE, 3] of FOLDER/DATA-SPLIT.npz (`pack`), or of the tar shards FOLDER/DATA/SPLIT*.tar."""
    if data == "photos":
        from topovq.tokenizer.data.photos import photo_crops

        held_out = split == "val"
        return photo_crops(16 if held_out else 64, 32, held_out=held_out).permute(0, 2, 3, 1).contiguous()
    if folder is None:
        raise ValueError(f"data={data!r} must be looked for in a folder: name it by --data or --data-path")
    packed = folder / f"{data}-{split}.npz"
    raw = unpack(packed) if packed.exists() else members(folder / data, split)
    with ThreadPoolExecutor(16) as pool:
        return torch.from_numpy(np.stack(list(pool.map(square, raw))))


def load_both(folder: Path | None, data: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """The images that train, and those that validate, on the device."""
    train, val = (load_images(folder, data, split) for split in ("train", "val"))
    return train.to(device), val.to(device)


def members(folder: Path, split: str) -> Iterator[bytes]:
    shards = sorted(folder.glob(f"{split}*.tar"))
    if not shards:
        raise FileNotFoundError(f"there are no shards {folder / split}*.tar, and no {folder}-{split}.npz")
    for shard in shards:
        with tarfile.open(shard) as file:
            for member in file:
                opened = file.extractfile(member)
                if opened is not None:
                    yield opened.read()


def square(raw: bytes) -> np.ndarray:
    """The middle of an image, its short side made SIDE pixels."""
    with Image.open(io.BytesIO(raw)) as image:
        return np.asarray(ImageOps.fit(image.convert("RGB"), (SIDE, SIDE), Image.Resampling.LANCZOS))


def pack(folder: Path, out: Path, most: int | None) -> None:
    """Squares as JPEG files in one array, for a machine that cannot take all shards."""
    for split in ("train", "val"):
        files = []
        for raw in islice(members(folder, split), most):
            buffer = io.BytesIO()
            Image.fromarray(square(raw)).save(buffer, "jpeg", quality=85)
            files.append(np.frombuffer(buffer.getvalue(), np.uint8))
        off = np.cumsum([0, *map(len, files)])
        np.savez(out.with_name(f"{out.name}-{split}.npz"), blob=np.concatenate(files), off=off)


def unpack(path: Path) -> list[bytes]:
    with np.load(path) as file:
        blob, off = file["blob"], file["off"]
    return [blob[first:last].tobytes() for first, last in pairwise(off)]


@dataclass
class Crops:
    """Where the crops of T batches are; all of it on the device."""

    images: Tensor  # uint8 [M, H, W, 3]
    which: Tensor  # [T, B]
    top: Tensor
    left: Tensor
    flip: Tensor
    side: int

    @classmethod
    def drawn(cls, images: Tensor, which: Tensor, side: int, generator: torch.Generator) -> Crops:
        room = images.shape[1] - side + 1
        top, left = torch.randint(0, room, (2, *which.shape), generator=generator)
        flip = torch.rand(which.shape, generator=generator) < 0.5
        which, top, left, flip = (value.to(images.device) for value in (which, top, left, flip))
        return cls(images, which, top, left, flip, side)

    def batch(self, t: Tensor) -> Tensor:
        """Batch t (an int64 tensor of one number) as [B, 3, side, side] from -1 to 1, channels last."""
        which, top, left, flip = (value.index_select(0, t)[0] for value in (self.which, self.top, self.left, self.flip))
        place = torch.arange(self.side, device=self.images.device)
        columns = torch.where(flip[:, None], self.side - 1 - place, place) + left[:, None]
        rows = place + top[:, None]
        pixels = self.images[which[:, None, None], rows[:, :, None], columns[:, None, :]]
        return (pixels.permute(0, 3, 1, 2).float() / 127.5 - 1).contiguous(memory_format=torch.channels_last)
