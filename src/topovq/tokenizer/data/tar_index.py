"""Where the images of a tar file lie: its headers are scanned once, and the result is kept in the cache folder."""

import errno
import os
import tarfile
from dataclasses import dataclass
from hashlib import sha256
from io import FileIO
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from topovq.storage import atomic_file
from topovq.tokenizer.data.decode import EXTENSIONS
from topovq.tokenizer.data.files import DataError, cache_dir
from topovq.tokenizer.data.source import logger

CHUNK = 1 << 20  # bytes read at a time, and more than any header has
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZ": "bzip2", b"\xfd7": "xz", b"\x28\xb5": "zstd"}


@dataclass(frozen=True)
class TarIndex:
    """Names (bytes), offsets and lengths of the images of one tar file, and what of it could not be read."""

    names_N: np.ndarray
    offset_N: np.ndarray
    length_N: np.ndarray
    damage_M: np.ndarray


def tar_index(path: str) -> TarIndex:
    """The index of the tar file at `path`, from the cache if the file has not changed since."""
    status = os.stat(path)
    key = f"{os.path.abspath(path)}|{status.st_size}|{status.st_mtime_ns}"
    cached = cache_dir() / "shards" / f"{sha256(key.encode(errors='surrogateescape')).hexdigest()[:32]}.npz"
    known = _read(cached, status.st_size)
    if known is not None:
        return known
    index = scan_tar(path)
    try:
        with atomic_file(cached) as temporary, open(temporary, "wb") as file:
            np.savez(file, **vars(index))
    except OSError as error:
        logger.warning("the index of %s is not kept, it will be made again next time: %s", path, error)
    return index


def _read(cached: Path, length: int) -> TarIndex | None:
    """The index that was kept of a tar file of `length` bytes; None where there is none, or none that is sound."""
    if not cached.is_file():
        return None
    try:
        with np.load(cached, allow_pickle=False) as arrays:
            index = TarIndex(**arrays)
        kinds = "".join(array.dtype.kind + str(array.ndim) for array in vars(index).values())
        ends_N = index.offset_N + index.length_N
        numbers = {len(index.names_N), len(index.offset_N), len(index.length_N)}
        starts = index.offset_N.min(initial=0) >= 0 and index.length_N.min(initial=0) >= 0
        if kinds == "S1i1i1U1" and len(numbers) == 1 and starts and ends_N.max(initial=0) <= length:
            return index
    except Exception:  # numpy, zipfile and zlib have a dozen types for damaged bytes
        pass
    logger.warning("the index %s is damaged: it is made again", cached)
    return None


def scan_tar(path: str) -> TarIndex:
    """Read every header of the tar file at `path`.

    A member cut short by the end of the file is left out; behind a damaged header the scan goes on with the next sound
    one. Both are named in `damage_M`.
    """
    images: list[tuple[bytes, int, int]] = []
    damage: list[str] = []
    with open(path, "rb") as file, open(path, "rb", buffering=0) as raw:
        start = file.read(2)
        if start in _COMPRESSED:
            raise DataError(
                f"{path} is compressed ({_COMPRESSED[start]}); unpack it to a plain .tar, to be read at any place"
            )
        length = os.fstat(file.fileno()).st_size
        expected = end = 0  # where the next header should be, and where the last member's data end
        found = _after_zeros(raw, 0)  # where there is something; tarfile would look for it a block at a time
        try:
            headers = cast(BinaryIO, _Headers(file))
            headers.seek(found)
            with tarfile.open(fileobj=headers, mode="r:", ignore_zeros=True) as tar:
                while (member := tar.next()) is not None:
                    if found < member.offset and not _is_global(raw, expected):
                        damage.append(f"{member.offset - expected} bytes from {expected} on have no readable header")
                    expected = tar.offset
                    end = member.offset_data + member.size
                    if end > length:
                        damage.append(f"{member.name} is cut short by the end of the file")
                    elif member.isreg() and not member.issparse() and is_image_member(member.name):
                        images.append((os.fsencode(member.name), member.offset_data, member.size))
                    found = tar.offset = _after_zeros(raw, expected)
                if found < length and not _is_global(raw, expected):
                    damage.append(f"{length - expected} bytes from {expected} on have no readable header")
        except (tarfile.TarError, ValueError, OverflowError) as error:  # what headers made by chance or malice raise
            if expected <= length:  # else it only says what is known: the last member is cut short
                damage.append(f"unreadable from byte {expected} on ({error})")
        if end <= length <= found and length < expected + 2 * tarfile.BLOCKSIZE:
            damage.append(f"what may have been behind byte {length}: no empty blocks end the tar file there")
    names, offsets, lengths = zip(*images) if images else ((), (), ())
    return TarIndex(
        np.array(names, dtype=np.bytes_),
        np.array(offsets, dtype=np.int64),
        np.array(lengths, dtype=np.int64),
        np.array(damage, dtype=np.str_),
    )


def is_image_member(name: str) -> bool:
    """Whether a member `folder/key.ext` is a sample's image: the extension is all that follows the first dot of the
    file name, so that `key.seg.png` (a mask, say) is not one."""
    key, _, extension = name.rpartition("/")[2].partition(".")
    return key != "" and extension.lower() in EXTENSIONS


class _Headers:
    """A tar file for whoever reads its headers: none is so long that it should not be held in memory."""

    def __init__(self, file: BinaryIO) -> None:
        self.seek, self.tell, self._read = file.seek, file.tell, file.read

    def read(self, size: int) -> bytes:
        if size > CHUNK:
            raise tarfile.ReadError(f"a header of {size:,} bytes; {CHUNK:,} can be read")
        return self._read(size)


def _after_zeros(raw: FileIO, start: int) -> int:
    """Where the first block from `start` on begins that is not of zeros alone; the end, if there is none."""
    place, size = start, tarfile.BLOCKSIZE
    while True:
        raw.seek(place)
        data = raw.read(size)
        zeros = len(data) - len(data.lstrip(b"\0"))
        if zeros < len(data) or not data:
            return place + zeros // tarfile.BLOCKSIZE * tarfile.BLOCKSIZE
        place, size = _after_hole(raw, place + zeros), CHUNK


def _after_hole(raw: FileIO, place: int) -> int:
    """The first block from `place` on that the disk has: what a sparse file leaves out is zeros."""
    try:
        stored = raw.seek(place, os.SEEK_DATA)
    except (AttributeError, OSError) as error:
        nothing = isinstance(error, OSError) and error.errno == errno.ENXIO
        return max(place, raw.seek(0, os.SEEK_END)) if nothing else place  # else it is not known
    return place + (stored - place) // tarfile.BLOCKSIZE * tarfile.BLOCKSIZE


def _is_global(raw: FileIO, start: int) -> bool:
    """Whether the header of a whole archive is at `start`: tarfile hands out none of its own."""
    raw.seek(start + 156)
    return raw.read(1) == tarfile.XGLTYPE
