"""Files and folders that are either whole or not there."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


def write_atomic(path: Path, data: bytes) -> None:
    """Write `data` beside `path`, flush it to the disk, then rename it over `path`."""
    with atomic_file(path) as temporary:
        temporary.write_bytes(data)


def append(path: Path, data: bytes) -> None:
    """Add `data` to the end of `path` and flush it to the disk; after a failure the file may end in a part of it."""
    with naming(path), open(path, "ab") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Have the error of a full disk say what could not be written: the system's own names no file."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) and error.filename is None:
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        raise


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a name beside `path` to write to; if nothing fails that file becomes `path`, else it is removed.

    The folder is made if it is not there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _beside(path)
    try:
        with naming(path):
            yield temporary
            _sync(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync(path.parent)


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder beside `path` to fill; if nothing fails it becomes `path`, else it is removed."""
    temporary = _beside(path)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for file in temporary.iterdir():
            _sync(file)
        if path.exists():
            shutil.rmtree(path)
        os.replace(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _sync(path.parent)


def remove_leftovers(folder: Path) -> None:
    """Remove what an interrupted write left in `folder`: nothing that has its final name."""
    for path in folder.glob(".*.tmp"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def _sync(path: Path) -> None:
    """Have the disk hold a file's bytes or a folder's names, so that they last through a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
