"""SIGTERM, SIGHUP and Ctrl-C as a request: the step in progress ends, a checkpoint is written, then the run stops.

A step or a validation that has not ended soon after the request is dropped, and done again when the run is resumed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

PATIENCE = 0.25  # seconds in which what is under way may end by itself
ANSWER = b"\nfinishing this step, then saving; press again to quit without saving\n"


def ending_signals() -> list[signal.Signals]:
    """What others send a process to end it: SIGTERM, and SIGHUP where it is not ignored, as nohup asks for."""
    hang_up = [signal.SIGHUP] if hasattr(signal, "SIGHUP") else []
    return [signal.SIGTERM, *(s for s in hang_up if signal.getsignal(s) is not signal.SIG_IGN)]


def leave_lost_terminal() -> None:
    """Where the terminal was closed, have what is still printed go nowhere: it would be an error."""
    for stream in (1, 2):
        with contextlib.suppress(OSError):  # it may be closed
            if stat.S_ISCHR(os.fstat(stream).st_mode) and not os.isatty(stream):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)


class Interrupted(Exception):
    """Training was asked to stop and did, with a checkpoint.

    `exit_code` is 130 for Ctrl-C, 143 for SIGTERM and 129 for SIGHUP.
    """

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = 128 + signum


class Dropped(Exception):
    """What was under way did not end soon enough after a request to stop."""


class StopRequest:
    """While active, the first SIGTERM, SIGHUP or SIGINT sets `signum`; a second one acts at once, as without it."""

    def __init__(self) -> None:
        self.signum = 0
        self._previous: dict[int, Any] = {}
        self._droppable = self._late = False
        self._lock = threading.RLock()

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            for signum in (signal.SIGINT, *ending_signals()):
                self._previous[signum] = signal.signal(signum, self._request)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._restore()

    @contextlib.contextmanager
    def droppable(self) -> Iterator[None]:
        """What is done within raises Dropped if it goes on for longer than PATIENCE after the request."""
        self._droppable = True
        try:
            yield
        finally:
            self._droppable = False

    def _request(self, signum: int, frame: FrameType | None) -> None:
        leave_lost_terminal()
        if not self.signum:
            self.signum = signum
            if signum == signal.SIGINT and os.environ.get("RANK", "0") == "0":
                with contextlib.suppress(OSError):  # not by print: it may be in the middle of a line of its own
                    os.write(2, ANSWER)
            timer = threading.Timer(PATIENCE, self._hurry)
            timer.daemon = True
            timer.start()
        elif self._late:
            self._late = False
            if self._droppable:
                raise Dropped
        else:
            self._restore()
            os.kill(os.getpid(), signum)

    def _hurry(self) -> None:
        """Have `_request` called in the main thread once more, also where it waits for something."""
        main = threading.main_thread().ident
        assert main is not None
        with self._lock:
            if self._previous:
                self._late = True
                signal.pthread_kill(main, self.signum)

    def _restore(self) -> None:
        with self._lock:
            for signum, handler in self._previous.items():
                signal.signal(signum, handler)
            self._previous = {}
