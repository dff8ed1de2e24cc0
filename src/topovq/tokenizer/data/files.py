"""Data files: the cache folder, checksums, opening, and the error that bad ones raise."""

import hashlib
import os
import stat
from pathlib import Path
from typing import BinaryIO

PathLike = str | os.PathLike[str]


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
    """Open a regular file to read. Anything else is refused at once: a named pipe would be waited at for ever."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError("not a regular file")
    return os.fdopen(handle, "rb")
