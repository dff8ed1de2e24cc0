"""`folder`: any tree of images.

A sub-folder `train` holds the training images if there is one, else the whole tree does; a sub-folder `val`, `valid` or
`validation` holds the validation images if there is one, else 5% of the training images are set aside by the hash of
their relative path. Hidden files and folders are passed over; links are followed.
"""

import os
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np

from topovq.tokenizer.data.decode import EXTENSIONS
from topovq.tokenizer.data.files import DataError, PathLike, open_file
from topovq.tokenizer.data.loader import ImageSource, Listing
from topovq.tokenizer.data.order import split
from topovq.tokenizer.data.source import logger

VALIDATION_FOLDERS = (b"val", b"valid", b"validation")


class FileRecords:
    """Images that are files of their own, named by their path relative to `root`."""

    def __init__(self, root: str, names_N: np.ndarray, damage: list[str] | None = None) -> None:
        self.root = root
        self.names_N = names_N
        self.damage = damage or []

    def __len__(self) -> int:
        return len(self.names_N)

    def take(self, numbers: range) -> "FileRecords":
        """Those of `numbers` alone."""
        return FileRecords(self.root, self.names_N[numbers.start : numbers.stop])

    def name(self, index: int) -> str:
        return os.path.join(self.root, os.fsdecode(self.names_N[index]))

    def open(self, index: int) -> BinaryIO:
        return open_file(self.name(index))


def open_folder(path: PathLike, **options: Any) -> ImageSource:
    """The images under `path`; options as in `ImageSource`."""
    return ImageSource("folder", os.fspath(path), list_folder(path), **options)


def list_folder(path: PathLike) -> Listing:
    """Find the images under `path` and split them."""
    records = find_files(path)
    top_N = [name.partition(b"/")[0] if b"/" in name else b"" for name in records.names_N]
    validates_N = np.isin(top_N, VALIDATION_FOLDERS)
    trains_N = np.isin(top_N, b"train")
    if not trains_N.any():
        trains_N = ~validates_N
    return Listing(records, *split(records.names_N, trains_N, validates_N, repr(records.root)))


def find_files(path: PathLike) -> FileRecords:
    """The images under the folder `path`, in the order of their names."""
    root = os.fspath(path)
    looked_for = f"files ending in .{', .'.join(sorted(EXTENSIONS))}"
    if not os.path.exists(root):
        raise DataError(f"there is no folder {root!r}")
    if not os.path.isdir(root):
        raise DataError(f"{root!r} is not a folder; a folder with {looked_for} was looked for")
    damage: list[str] = []
    names = sorted(_image_names(root, damage))
    for what in damage:
        logger.warning("skipped %s", what)
    if not names:
        raise DataError(f"{root!r} holds no image; {looked_for} were looked for at any depth")
    # One block of memory, which forked workers share; a list they would copy, reference counts and all.
    return FileRecords(root, np.array(names, dtype=np.bytes_), damage)


def holds_images(root: str) -> bool:
    """Whether there is an image under the folder, at any depth."""
    return next(_image_names(root, []), None) is not None


def _image_names(root: str, damage: list[str]) -> Iterator[bytes]:
    """Paths of the images relative to `root`, with `/` between the parts whatever the system. Folders that cannot be
    read are named in `damage`."""
    walked = set()
    for folder_path, folders, files in os.walk(root, onerror=lambda error: damage.append(str(error)), followlinks=True):
        walked.add(_identity(folder_path))
        # A link to a folder above would be followed for ever. Sorted, since which of two links is walked must not vary.
        visible = sorted(name for name in folders if not name.startswith("."))
        folders[:] = [name for name in visible if _identity(os.path.join(folder_path, name)) not in walked]
        inside = os.path.relpath(folder_path, root)
        for name in files:
            if is_image(name):
                relative = name if inside == os.curdir else os.path.join(inside, name)
                yield os.fsencode(relative.replace(os.sep, "/"))


def _identity(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino


def is_image(name: str) -> bool:
    """Whether a visible file's name ends like an image's."""
    return not name.startswith(".") and os.path.splitext(name)[1][1:].lower() in EXTENSIONS
