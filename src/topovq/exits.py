"""How a command speaks and how it ends: the help, one line for a mistake, exit codes, signals."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import signal
import sys
import textwrap
from collections.abc import Iterable, Iterator
from functools import partial
from types import FrameType

from rich.console import Console

from topovq.tokenizer.training import CheckpointError, Diverged, Interrupted, MissingExtra
from topovq.tokenizer.training.interrupt import ending_signals, leave_lost_terminal


def leads() -> bool:
    """Whether this is the process that speaks for all that torchrun started."""
    return os.environ.get("RANK", "0") == "0"


def say(text: str) -> None:
    _write(Console(highlight=False), text)


def complain(text: str) -> None:
    _write(Console(stderr=True, highlight=False), text)


def _write(console: Console, text: str) -> None:
    """On a terminal lines end between words; elsewhere they are as they are, for other programs to read."""
    console.print(text, soft_wrap=not console.is_terminal, markup=False)


@contextlib.contextmanager
def sigterm_unwinds() -> Iterator[None]:
    """Have SIGTERM and SIGHUP end the command as an exception does, so that half-written files go and workers end.
    Training has its own answer to them."""

    def unwind(signum: int, frame: FrameType | None) -> None:
        leave_lost_terminal()
        sys.exit(128 + signum)

    before = {signum: signal.signal(signum, unwind) for signum in ending_signals()}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextlib.contextmanager
def one_line_errors(program: str) -> Iterator[None]:
    """Have a user's mistake end in one line on stderr and exit code 2, other failures in 1."""
    try:
        with sigterm_unwinds():
            yield
    except Interrupted as stopped:
        if leads():
            complain(f"{program}: {stopped}")
        sys.exit(stopped.exit_code)
    except KeyboardInterrupt:
        if leads():
            complain(f"{program}: stopped by Ctrl-C")
        sys.exit(130)
    except BrokenPipeError:  # `| head` has seen enough; what is still to be flushed goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except (ValueError, TypeError, FileExistsError, FileNotFoundError, MissingExtra) as error:
        complain(f"{program}: {error}")
        sys.exit(2)
    except (OSError, CheckpointError, Diverged) as error:
        complain(f"{program}: {error}")
        sys.exit(1)


@contextlib.contextmanager
def lines_that_fit(commands: Iterable[str]) -> Iterator[None]:
    """Have lines of the help end between words: tyro wraps those in boxes alone. The first names no commands."""

    class Help(io.StringIO):
        encoding = sys.stdout.encoding  # which decides how boxes are drawn

        def isatty(self) -> bool:
            return stdout.isatty()

    stdout, text = sys.stdout, Help()
    try:
        with contextlib.redirect_stdout(text):
            yield
    finally:
        printed = text.getvalue().replace(f"{{{','.join(commands)}}}", "COMMAND", 1)
        usage, boxes, rest = printed.partition("\n╭" if "\n╭" in printed else "\n -")
        if usage.startswith(("usage", "\x1b")):
            width = shutil.get_terminal_size().columns
            plain = [(line, re.sub(r"\x1b\[[0-9;]*m", "", line)) for line in usage.split("\n")]
            fill = partial(textwrap.fill, width=width, break_on_hyphens=False)
            usage = "\n".join(line if len(bare) <= width else fill(bare) for line, bare in plain)
        stdout.write(usage + boxes + rest)
