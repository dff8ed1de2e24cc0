"""`shards`: images inside tar files (the WebDataset convention: members `key.ext`, files `train-000.tar`, ...).

Shards are read by random access, not streamed: each is indexed once (`tar_index`), and from then on an image is one
read at a known offset. That makes shards a list of images like any other: batch i is a function of (seed, i) whatever
the number of ranks and workers, each epoch is a full permutation (a shuffle buffer mixes only neighbors), a run resumes
at once without reading what it skips, and a rank reads nothing but its own rows. What streaming would gain, long
sequential reads, matters on spinning disks; from flash or over a network mount, reading one image of 10 to 100 kB costs
less than decoding it, and the workers overlap it. Nothing is ever unpacked to disk.

Shards named `val*` validate and those named `train*` train (any other shard trains if none is named so); without a
`val*` shard, 5% of the images validate, by the hash of their member names.
"""

import copy
import glob
import io
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, BinaryIO, Protocol, TypeVar

import numpy as np

from topovq.tokenizer.data.decode import EXTENSIONS, MAX_PIXELS
from topovq.tokenizer.data.files import DataError, PathLike
from topovq.tokenizer.data.loader import ImageSource, Listing
from topovq.tokenizer.data.order import split
from topovq.tokenizer.data.source import logger
from topovq.tokenizer.data.tar_index import TarIndex, tar_index

LARGEST = 8 * MAX_PIXELS  # bytes: no image that is decoded has more, in 16 bits a channel and without compression
_OPEN_FILES = 64  # a worker keeps this many shards open; thousands would hit the limit of the system
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_BRACES = re.compile(r"\{([^{}]*)\}")


def open_shards(path: PathLike, **options: Any) -> ImageSource:
    """The images in the shards at `path` (folder, glob or brace pattern); options as in `ImageSource`."""
    return ImageSource("shards", os.fspath(path), list_shards(path), **options)


class InFiles(Protocol):
    """Images that lie in files together: image n is `names_N[n]` in `paths[shard_N[n]]`."""

    paths: list[str]
    shard_N: np.ndarray
    names_N: np.ndarray


Members = TypeVar("Members", bound=InFiles)


class ShardRecords:
    """Images that are members of tar files."""

    def __init__(self, paths: list[str], indices: list[TarIndex]) -> None:
        self.paths = paths
        self.damage = [f"{path}: {what}" for path, index in zip(paths, indices) for what in index.damage_M]
        self.shard_N = np.repeat(np.arange(len(paths)), [len(index.names_N) for index in indices])
        self.names_N = np.concatenate([index.names_N for index in indices])
        self.offset_N = np.concatenate([index.offset_N for index in indices])
        self.length_N = np.concatenate([index.length_N for index in indices])
        self._files: OrderedDict[tuple[int, int], BinaryIO] = OrderedDict()

    def __len__(self) -> int:
        return len(self.names_N)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_files": OrderedDict()}

    def take(self, numbers: range) -> "ShardRecords":
        """Those of `numbers` alone, without the rest of the index."""
        taken, rows = copy.copy(self), slice(numbers.start, numbers.stop)
        taken.names_N, taken.shard_N = self.names_N[rows], self.shard_N[rows]
        taken.offset_N, taken.length_N = self.offset_N[rows], self.length_N[rows]
        taken.damage, taken._files = [], OrderedDict()
        return taken

    def name(self, index: int) -> str:
        return f"{self.paths[self.shard_N[index]]}: {os.fsdecode(self.names_N[index])}"

    def open(self, index: int) -> BinaryIO:
        if self.length_N[index] > LARGEST:
            raise ValueError(f"{self.length_N[index]:,} bytes are more than the limit of {LARGEST:,}")
        file = self._file(int(self.shard_N[index]))
        file.seek(self.offset_N[index])
        return io.BytesIO(file.read(self.length_N[index]))

    def _file(self, shard: int) -> BinaryIO:
        key = (os.getpid(), shard)  # a forked worker must not share the position of its parent's file
        if key in self._files:
            self._files.move_to_end(key)
        else:
            if len(self._files) == _OPEN_FILES:
                self._files.popitem(last=False)[1].close()
            self._files[key] = open(self.paths[shard], "rb")  # noqa: SIM115  # kept open
        return self._files[key]


def list_shards(path: PathLike) -> Listing:
    """Find the images in the shards at `path` and split them."""
    records = find_members(path)
    validates_S = np.array([os.path.basename(shard).startswith("val") for shard in records.paths])
    trains_S = np.array([os.path.basename(shard).startswith("train") for shard in records.paths])
    if not trains_S.any():
        trains_S = ~validates_S
    validates_N, trains_N = validates_S[records.shard_N], trains_S[records.shard_N]
    return Listing(records, *split(records.names_N, trains_N, validates_N, repr(os.fspath(path))))


def find_members(path: PathLike, each: Callable[..., Iterable[TarIndex]] = map) -> ShardRecords:
    """The images in the shards at `path`, in the order of shards and members; `each` may index them elsewhere."""
    where = os.fspath(path)
    paths = expand(where)
    records = ShardRecords(paths, list(each(tar_index, paths)))
    for what in records.damage:
        logger.warning("skipped %s", what)
    if not len(records):
        kinds = f"members ending in .{', .'.join(sorted(EXTENSIONS))}"
        damage = f" ({records.damage[0]})" if records.damage else ""
        raise DataError(f"{where!r} ({len(paths)} shards) holds no image; {kinds} were looked for{damage}")
    return records


def with_distinct_names(records: Members) -> Members:
    """The same images; where shards share names (each counts its members from 0, say), `shard/` precedes each.

    Shards of one name, in several folders, have as much of their paths before it as tells them apart.
    """
    if len(np.unique(records.names_N)) < len(records.names_N):
        shards = [os.path.splitext(os.path.basename(path))[0] for path in records.paths]
        if len(set(shards)) < len(shards):
            common = os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in records.paths])
            shards = [os.path.splitext(os.path.relpath(path, common))[0] for path in records.paths]
        named = [os.fsencode(shards[shard]) + b"/" + name for shard, name in zip(records.shard_N, records.names_N)]
        records.names_N = np.array(named, dtype=np.bytes_)
        names, counts = np.unique(records.names_N, return_counts=True)
        if len(names) < len(records.names_N):
            index = int(np.flatnonzero(records.names_N == names[counts > 1][0])[0])
            raise DataError(f"{records.paths[records.shard_N[index]]} has two members of one name: {named[index]!r}")
    return records


def are_shards(path: PathLike) -> bool:
    """Whether `path` is of tar files, or a folder that holds some."""
    where = os.fspath(path)
    return where.endswith(".tar") or (os.path.isdir(where) and any(name.endswith(".tar") for name in os.listdir(where)))


def expand(path: str, kind: str = "tar") -> list[str]:
    """The shards meant by a folder, a file, a glob (`*.tar`) or a brace pattern (`train-{000..003}.tar`), in order."""
    patterns = [os.path.join(glob.escape(path), f"*.{kind}")] if os.path.isdir(path) else expand_braces(path)
    found: list[str] = []
    for pattern in patterns:
        matches = [pattern] if os.path.isfile(pattern) else sorted(glob.glob(pattern, recursive=True))
        if not matches:
            raise DataError(f"{path!r} names no shard: {pattern!r} was looked for and is not there")
        for match in matches:
            if not os.path.isfile(match):  # a named pipe would be waited at for ever
                raise DataError(f"the shard {match!r} is not a regular file")
        found += matches
    return found


def expand_braces(pattern: str) -> list[str]:
    """`{a,b}` and `{000..003}` (as wide as its first number) written out, as a shell does."""
    braces = _BRACES.search(pattern)
    if braces is None:
        return [pattern]
    limits = _RANGE.fullmatch(braces[1])
    if limits is not None:
        first, last = limits.groups()
        choices = [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]
        if not choices:
            raise DataError(f"{braces[0]} in {pattern!r} is an empty range; the smaller number comes first")
    else:
        choices = braces[1].split(",")
    head, tail = pattern[: braces.start()], pattern[braces.end() :]
    return [head + choice + rest for choice in choices for rest in expand_braces(tail)]
