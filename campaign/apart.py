"""Do something in a forked process with a limit of time and memory, and see how that process ended.

Forked from one that has imported everything, it starts in hundredths of a second. That one must not have computed
anything: threads do not survive a fork.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SECONDS = 10.0
MEMORY = 2**30
OUT_OF_MEMORY = ("MemoryError", "can't allocate memory", "Cannot allocate memory", "bad_alloc", "malloc of size")


@dataclass(frozen=True)
class Ended:
    """How a process ended: `kind` is done, exit, raised, hang, memory or crash.

    value    what was returned, where it is done
    code     the exit code
    error    the exception, as "Type: message"
    text     what it wrote to standard output and error
    seconds  how long it took
    """

    kind: str
    value: Any = None
    code: int = 0
    error: str = ""
    text: str = ""
    seconds: float = 0.0


def apart(work: Callable[[], Any], seconds: float = SECONDS, memory: int | None = MEMORY) -> Ended:
    """The end of `work`, done in a process of its own. Its result must pickle."""
    began = time.monotonic()
    with tempfile.TemporaryFile() as said:
        inlet, outlet = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(inlet)
            _be_child(work, memory, said.fileno(), outlet)
        os.close(outlet)
        sent = _read_until(inlet, began + seconds)
        os.close(inlet)
        if sent is None:
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        said.seek(0)
        text = said.read().decode(errors="replace")
    took = time.monotonic() - began
    if sent is None:
        return Ended("hang", text=text, seconds=took)
    if os.WIFSIGNALED(status) or not sent:
        kind = "memory" if any(sign in text for sign in OUT_OF_MEMORY) else "crash"
        return Ended(kind, code=-os.WTERMSIG(status), text=text, seconds=took)
    kind, value, code, error, grown = pickle.loads(sent)
    if (memory and grown > memory) or any(sign in error + text for sign in OUT_OF_MEMORY):
        kind = "memory"
    return Ended(kind, value, code, error, text, took)


def must(ended: Ended) -> Ended:
    """The same, of what nobody has attacked."""
    if ended.kind != "done":
        raise RuntimeError(f"nobody attacked: {ended.kind} {ended.code} {ended.error}: {ended.text[-3000:]}")
    return ended


def start(work: Callable[[], Any], **variables: str) -> int:
    """The number of a process that does `work` and exits with 0, or with what it exits with, or with 1."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.environ.update(variables)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(nothing, stream)
        work()
        code = 0
    except SystemExit as stopped:
        code = stopped.code if isinstance(stopped.code, int) else 1
    finally:
        os._exit(code)


def end_of(child: int, seconds: float) -> int | None:
    """The exit code of a process, negative where a signal ended it; None where it had to be killed after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            break
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _be_child(work: Callable[[], Any], memory: int | None, errors: int, outlet: int) -> None:
    """What the child does; it never returns."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(errors, 1)
    os.dup2(errors, 2)
    sys.stdout, sys.stderr = (os.fdopen(stream, "w", 1, closefd=False) for stream in (1, 2))  # whatever they were
    if memory:
        limit = _memory("VmData") + memory
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    floor = _memory("VmRSS")
    value, code, error, kind = None, 0, "", "done"
    try:
        value = work()
    except SystemExit as stopped:
        kind, code = ("exit", int(stopped.code or 0)) if not isinstance(stopped.code, str) else ("exit", 1)
    except BaseException as raised:
        kind, error = "raised", f"{type(raised).__name__}: {raised}"
        if not isinstance(raised, ValueError | OSError):
            traceback.print_exc()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    grown = _memory("VmHWM") - floor
    with os.fdopen(outlet, "wb") as pipe:
        pickle.dump((kind, value, code, error, grown), pipe)
    os._exit(0)


def _memory(name: str) -> int:
    """Bytes of this process, by a name of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024


def _read_until(inlet: int, deadline: float) -> bytes | None:
    """All that comes out of a pipe; None where it is still open at the deadline."""
    parts = []
    while True:
        ready, _, _ = select.select([inlet], [], [], max(deadline - time.monotonic(), 0))
        if not ready:
            return None
        part = os.read(inlet, 1 << 16)
        if not part:
            return b"".join(parts)
        parts.append(part)
