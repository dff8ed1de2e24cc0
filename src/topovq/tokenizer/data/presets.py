"""`imagenet` and `faces`: the 256x256 image sets of the paper, from folders or tar shards.

Both resize to 256x256 as the paper's experiments did, without keeping the ratio of the sides.
"""

import os
from collections.abc import Sequence
from typing import Any, BinaryIO

import numpy as np

from topovq.tokenizer.data.files import DataError, PathLike
from topovq.tokenizer.data.folder import list_folder
from topovq.tokenizer.data.loader import ImageSource, Listing, Records
from topovq.tokenizer.data.shards import are_shards, list_shards
from topovq.tokenizer.data.source import Triple

SIZE = 256
IMAGENET: tuple[Triple, Triple] = ((123.675, 116.28, 103.53), (58.395, 57.12, 57.375))
"""Mean (0.485, 0.456, 0.406) and std (0.229, 0.224, 0.225), times 255."""

FACE_PARTS = {"celebahq": ("human-",), "afhq": ("cat-", "dog-", "wild-")}
"""The two sets of faces, and how the names of their images begin where they share a folder or shards."""


def open_imagenet(path: PathLike, *, size: int = SIZE, **options: Any) -> ImageSource:
    """ImageNet at `path`, a folder (with `train` and `val`) or tar shards; options as in `ImageSource`."""
    options |= {"size": size, "fit": "stretch", "normalization": IMAGENET}
    return ImageSource("imagenet", os.fspath(path), _list_images(path), **options)


def open_faces(path: PathLike | Sequence[PathLike], *, size: int = SIZE, **options: Any) -> ImageSource:
    """The mixture of CelebA-HQ and AFHQ, normalized to [-1, 1], validated on the parts `celebahq` and `afhq`.

    `path` is two paths, CelebA-HQ's first (a sequence, or one string with `::` between them), each a folder or shards;
    or a single path whose images are named as `FACE_PARTS` says.
    """
    paths = os.fspath(path).split("::") if isinstance(path, (str, os.PathLike)) else [os.fspath(p) for p in path]
    if len(paths) == 1:
        listing = _list_images(paths[0])
        parts = _by_name(listing, paths[0])
    elif len(paths) == 2:
        listings = [_list_images(p) for p in paths]
        listing = _join(*listings)
        parts = dict(zip(FACE_PARTS, np.split(listing.validation, [len(listings[0].validation)])))
    else:
        raise ValueError(f"faces takes one path, or two (CelebA-HQ's and AFHQ's); got {len(paths)}: {paths}")
    return ImageSource("faces", "::".join(paths), listing, size=size, fit="stretch", parts=parts, **options)


def _list_images(path: PathLike) -> Listing:
    return list_shards(path) if are_shards(path) else list_folder(path)


def _by_name(listing: Listing, where: str) -> dict[str, np.ndarray]:
    """The validation images of each part."""
    names = [os.fsdecode(name).rpartition("/")[2] for name in listing.records.names_N]
    for name in names:
        if not name.startswith(sum(FACE_PARTS.values(), ())):
            expected = ", ".join(f"{begin}*" for begins in FACE_PARTS.values() for begin in begins)
            raise DataError(f"{name!r} in {where!r} belongs to neither set of faces; {expected} are understood")
    return {
        part: np.array([i for i in listing.validation if names[i].startswith(begins)], dtype=np.int64)
        for part, begins in FACE_PARTS.items()
    }


class _JoinedRecords:
    """Two sets of images, one after the other."""

    def __init__(self, first: Records, second: Records) -> None:
        self.first, self.second = first, second
        self.names_N = np.concatenate([first.names_N, second.names_N])
        self.damage = [*first.damage, *second.damage]

    def __len__(self) -> int:
        return len(self.names_N)

    def name(self, index: int) -> str:
        records, within = self._find(index)
        return records.name(within)

    def open(self, index: int) -> BinaryIO:
        records, within = self._find(index)
        return records.open(within)

    def _find(self, index: int) -> tuple[Records, int]:
        skipped = len(self.first)
        return (self.first, index) if index < skipped else (self.second, index - skipped)


def _join(first: Listing, second: Listing) -> Listing:
    skipped = len(first.records)
    return Listing(
        _JoinedRecords(first.records, second.records),
        np.concatenate([first.train, second.train + skipped]),
        np.concatenate([first.validation, second.validation + skipped]),
    )
