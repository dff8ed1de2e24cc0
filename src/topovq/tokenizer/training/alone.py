"""One process at a time writes a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from topovq.distributed import World


@contextlib.contextmanager
def alone(folder: Path, world: World) -> Iterator[None]:
    """Hold the run's folder, which is made: two processes never write one record. Of several ranks the first does."""
    if not world.leads:
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"cannot make the run's folder {folder}: {error.strerror}") from error
    lock = FileLock(folder / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise OSError(f"another process is training in {folder}; wait for it or choose another folder") from None
    try:
        yield
    finally:
        lock.release()
