"""SIGTERM, SIGHUP and Ctrl-C as a request: the step in progress ends, a checkpoint is written, then the run stops."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import threading
from types import FrameType, TracebackType
from typing import Any


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


class StopRequest:
    """While active, the first SIGTERM, SIGHUP or SIGINT sets `signum`; a second one acts at once, as without it."""

    def __init__(self) -> None:
        self.signum = 0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            for signum in (signal.SIGINT, *ending_signals()):
                self._previous[signum] = signal.signal(signum, self._request)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._restore()

    def _request(self, signum: int, frame: FrameType | None) -> None:
        leave_lost_terminal()
        self.signum = signum
        self._restore()

    def _restore(self) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        self._previous = {}
