"""Decoding processes: how many there are, and how each begins."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from PIL import ImageFile

# Ctrl-C and a closed terminal (SIGHUP) reach the whole process group, and a batch system sends SIGTERM to every process
# of a job. Workers must outlast them: training still needs batches while it ends in good order. (macOS cannot tell who
# sent a signal; Windows has no SIGHUP.)
_HELD_BACK = {signal.SIGINT} | {getattr(signal, "SIGHUP", signal.SIGINT)}
if hasattr(signal, "sigwaitinfo"):
    _HELD_BACK.add(signal.SIGTERM)


def default_workers() -> int:
    """One a core this process may use, shared among the ranks of this machine; at most 16."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(16, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


@contextmanager
def signals_held_back() -> Iterator[None]:
    """Processes started here do not see Ctrl-C, SIGHUP and SIGTERM; this process gets them a moment later."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows, where there is nothing of the kind
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def begin(worker: int) -> None:
    """Run first in worker number `worker`: it ends when its parent is gone, or sends it SIGTERM."""
    ImageFile.MAXBLOCK = 1 << 20  # pixels come out of Pillow in one piece, not in several that are then joined
    sys.excepthook = _complain
    if signal.SIGTERM in _HELD_BACK:
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()


def _complain(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
    """Silent where a parent that is being stopped hangs up while multiprocessing's thread hands it a batch."""
    if not issubclass(kind, (EOFError, ConnectionError)):
        sys.__excepthook__(kind, error, where)


def _end_with(parent: int) -> None:
    told_by = 0
    while told_by != parent and os.getppid() == parent:
        received = signal.sigtimedwait({signal.SIGTERM}, 1.0)
        told_by = received.si_pid if received else 0
    os._exit(0)
