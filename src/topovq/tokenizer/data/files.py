"""Data files: the cache folder, checksums, opening, and the error that bad ones raise."""

import hashlib
import os
import stat
from pathlib import Path
from typing import BinaryIO

PathLike = str | os.PathLike[str]
MOST_BYTES = 2**29  # of an image file: 89 million pixels, the most that are decoded, take no more without compression


class DataError(ValueError):
    """Data that is not there, or not what it should be. The message says what was looked for."""


def cache_dir() -> Path:
    """The folder for what is fetched or indexed once: `$TOPOVQ_CACHE`, else `~/.cache/topovq`. May not exist yet."""
    return Path(os.environ.get("TOPOVQ_CACHE") or Path.home() / ".cache" / "topovq")


def check_digest(path: Path, algorithm: str, expected: str) -> None:
    """Refuse a file whose `algorithm` (a name hashlib knows) digest is not `expected`."""
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, algorithm).hexdigest()
    if found != expected:
        raise DataError(f"{path} is damaged or another file: its {algorithm} is {found}, not {expected}")


def open_file(path: PathLike) -> BinaryIO:
    """Open a regular file to read, of an image's size. Others are refused at once: a named pipe would be waited at for
    ever, and some of Pillow's decoders take a whole file into memory."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode) or status.st_size > MOST_BYTES:
        os.close(handle)
        large = f"{status.st_size:,} bytes are more than an image has; at most {MOST_BYTES:,} are read"
        raise OSError(large if stat.S_ISREG(status.st_mode) else "not a regular file")
    return os.fdopen(handle, "rb")
