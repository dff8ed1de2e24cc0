"""Files that outlive a run: the cache folder, whole-or-nothing writes, checksums."""

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

PathLike = str | os.PathLike[str]


class DataError(ValueError):
    """Data that is not there, or not what it should be. The message says what was looked for."""


def cache_dir() -> Path:
    """The folder for what is fetched or indexed once: `$TOPOVQ_CACHE`, else `~/.cache/topovq`. May not exist yet."""
    return Path(os.environ.get("TOPOVQ_CACHE") or Path.home() / ".cache" / "topovq")


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write(temporary)` make a file, then put it in `path`'s place: others see the old file or all of the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # A folder of its own: writers such as numpy's add a suffix to the name they are given.
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as folder:
        temporary = Path(folder) / path.name
        write(temporary)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o644)  # some writers make private files; a cache may be shared
        os.replace(temporary, path)


def check_digest(path: Path, algorithm: str, expected: str) -> None:
    """Refuse a file whose `algorithm` (a name hashlib knows) digest is not `expected`."""
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, algorithm).hexdigest()
    if found != expected:
        raise DataError(f"{path} is damaged or another file: its {algorithm} is {found}, not {expected}")
