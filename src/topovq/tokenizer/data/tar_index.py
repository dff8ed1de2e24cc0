"""Where the images of a tar file lie: its headers are scanned once, and the result is kept in the cache folder."""

import os
import tarfile
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from topovq.storage import atomic_file
from topovq.tokenizer.data.decode import EXTENSIONS
from topovq.tokenizer.data.files import DataError, cache_dir
from topovq.tokenizer.data.source import logger

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
    if cached.is_file():
        with np.load(cached, allow_pickle=False) as arrays:
            return TarIndex(**arrays)
    index = scan_tar(path)
    try:
        with atomic_file(cached) as temporary, open(temporary, "wb") as file:
            np.savez(file, **vars(index))
    except OSError as error:
        logger.warning("the index of %s is not kept, it will be made again next time: %s", path, error)
    return index


def scan_tar(path: str) -> TarIndex:
    """Read every header of the tar file at `path`.

    A member cut short by the end of the file is left out; behind a damaged header the scan goes on with the next sound
    one. Both are named in `damage_M`.
    """
    images: list[tuple[bytes, int, int]] = []
    damage: list[str] = []
    with open(path, "rb") as file:
        start = file.read(2)
        if start in _COMPRESSED:
            raise DataError(
                f"{path} is compressed ({_COMPRESSED[start]}); unpack it to a plain .tar, to be read at any place"
            )
        file.seek(0)
        length = os.fstat(file.fileno()).st_size
        expected = 0  # where the next header should be
        try:
            with tarfile.open(fileobj=file, mode="r:", ignore_zeros=True) as tar:
                for member in tar:
                    if member.offset > expected and _holds_data(path, expected, member.offset):
                        damage.append(f"{member.offset - expected} bytes from {expected} on have no readable header")
                    expected = tar.offset
                    if member.offset_data + member.size > length:
                        damage.append(f"{member.name} is cut short by the end of the file")
                    elif member.isreg() and not member.issparse() and is_image_member(member.name):
                        images.append((os.fsencode(member.name), member.offset_data, member.size))
                if _holds_data(path, expected, length):
                    damage.append(f"{length - expected} bytes from {expected} on have no readable header")
        except (tarfile.TarError, ValueError, OverflowError) as error:  # what headers made by chance or malice raise
            if expected <= length:  # else it only says what is known: the last member is cut short
                damage.append(f"unreadable from byte {expected} on ({error})")
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


def _holds_data(path: str, start: int, stop: int) -> bool:
    """Whether bytes [start, stop) are more than the zeros between archives and the header of a whole archive."""
    with open(path, "rb") as file:
        file.seek(start)
        gap = file.read(stop - start)
    return gap.count(0) < len(gap) and gap[156:157] != tarfile.XGLTYPE
