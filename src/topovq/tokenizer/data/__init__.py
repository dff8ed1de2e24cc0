"""Images for training: six doors, one interface (`Source`).

>>> from topovq.tokenizer.data import open_source
>>> with open_source("photos") as source:
...     batch = next(source.train(64, seed=0))
>>> batch.shape, batch.dtype
(torch.Size([64, 3, 32, 32]), torch.uint8)
"""

import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from topovq.tokenizer.data.cifar10 import Cifar10
from topovq.tokenizer.data.files import DataError, PathLike
from topovq.tokenizer.data.folder import FileRecords, find_files, open_folder
from topovq.tokenizer.data.parquet_images import ParquetRecords, are_tables, find_rows
from topovq.tokenizer.data.photos import Photos, photo_crops, photograph
from topovq.tokenizer.data.presets import open_faces, open_imagenet
from topovq.tokenizer.data.shards import ShardRecords, are_shards, find_members, open_shards, with_distinct_names
from topovq.tokenizer.data.source import Source
from topovq.tokenizer.models import check_name

__all__ = [
    "NEED_PATH",
    "SOURCES",
    "DataError",
    "Source",
    "are_shards",
    "find_images",
    "open_data",
    "open_source",
    "parts_of",
    "photo_crops",
    "photograph",
]

SOURCES: dict[str, Callable[..., Source]] = {
    "photos": Photos,
    "cifar10": Cifar10,
    "folder": open_folder,
    "shards": open_shards,
    "imagenet": open_imagenet,
    "faces": open_faces,
}
IMAGES_A_PART = 2048
NEED_PATH = ("folder", "shards", "imagenet", "faces")


def open_source(
    name: str,
    path: PathLike | Sequence[PathLike] | None = None,
    *,
    size: int | None = None,
    workers: int | None = None,
    **options: Any,
) -> Source:
    """The source `name` (one of `SOURCES`) at `path`.

    `size` is the side of the images (default: the source's own), `workers` the number of decoding processes (default:
    one a core; sources that sit in memory need none), `options` what else the source takes (`flip=True`).
    """
    check_name("data source", name, SOURCES)
    if path is None and name in NEED_PATH:
        raise ValueError(f"the data source {name!r} needs a path: open_source({name!r}, 'where/the/images/are')")
    if size is not None:
        options["size"] = size
    return SOURCES[name](path, workers=workers, **options)


Found = FileRecords | ShardRecords | ParquetRecords


def find_images(path: PathLike, each: Callable[..., Iterable[Any]] = map) -> Found:
    """Every image at `path`, not split into those that train and those that validate.

    `path` is a folder, tar shards, Parquet files with a column of bytes, or one image. `each` may look into the shards
    elsewhere than here.
    """
    where = os.fspath(path)
    if are_shards(where):
        return with_distinct_names(find_members(where, each))
    if are_tables(where):
        return with_distinct_names(find_rows(where, each))
    if os.path.isfile(where):
        return FileRecords(os.path.dirname(where), np.array([os.fsencode(os.path.basename(where))]))
    return find_files(where)


def parts_of(records: Found) -> list[range]:
    """The images of each shard; where they are files of their own, of each `IMAGES_A_PART` or a few less.

    They depend on nothing but the images, so that what one cluster began another can end.
    """
    if isinstance(records, FileRecords):
        parts = -(-len(records) // IMAGES_A_PART)
        return [range(len(records) * i // parts, len(records) * (i + 1) // parts) for i in range(parts)]
    ends = np.searchsorted(records.shard_N, np.arange(len(records.paths) + 1)).tolist()
    return [range(first, last) for first, last in itertools.pairwise(ends)]


def open_data(data: str, path: Path | None = None, size: int | None = None, workers: int | None = None) -> Source:
    """Open `data` (see tokenizer/data): a name in SOURCES, or the path of a folder, a .tar file or a folder of them."""
    if data in NEED_PATH and path is None:
        raise ValueError(f"the data set {data!r} needs the path of its images: --data-path PATH (data_path in Python)")
    if data in SOURCES:
        return open_source(data, path, size=size, workers=workers)
    if not Path(data).exists() and not are_shards(data):
        if Path(data).name != data:  # a path and no name
            raise FileNotFoundError(f"there is no folder {data!r}; DATA is a folder of images or {', '.join(SOURCES)}")
        check_name("data set (and no such folder)", data, SOURCES)
    if path is not None:
        raise ValueError(
            f"{data!r} is a path already; --data-path (here {str(path)!r}) goes with a name: {', '.join(SOURCES)}"
        )
    return open_source("shards" if are_shards(data) else "folder", data, size=size, workers=workers)
