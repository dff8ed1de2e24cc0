"""One process at a time writes a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from topovq.distributed import World

LOCK = ".lock"


@contextlib.contextmanager
def alone(folder: Path, world: World) -> Iterator[None]:
    """Hold the run's folder, which is made: two processes never write one record. Of several ranks the first does.

    What was made goes again if an error comes before anything was written.
    """
    if not world.leads:
        yield
        return
    made = [path for path in (folder / LOCK, folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"cannot make the run's folder {folder}: {error.strerror}") from error
    lock = FileLock(folder / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise OSError(f"another process is training in {folder}; wait for it or choose another folder") from None
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # where another process has put something there meanwhile
            if made and [path.name for path in folder.iterdir()] == [LOCK]:
                made[0].unlink()
                for path in made[1:]:
                    path.rmdir()
        raise
    finally:
        lock.release()
