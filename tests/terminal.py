"""The command in a pseudo-terminal, and what a person sees there."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import sys
import termios
import time
from dataclasses import dataclass, field
from pathlib import Path

CODE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])")


@dataclass
class Screen:
    """As much of a terminal as the command uses: lines, the cursor, and whether a line was too long."""

    width: int
    lines: list[str] = field(default_factory=lambda: [""])
    row: int = 0
    column: int = 0
    wrapped: list[str] = field(default_factory=list)

    def feed(self, text: str) -> None:
        place = 0
        while place < len(text):
            code = CODE.match(text, place)
            if code:
                place = code.end()
                if code[2] == "A":
                    self.row -= int(code[1] or 1)
                elif code[2] == "K":
                    self.lines[self.row] = ""
                continue
            self._put(text[place])
            place += 1

    def _put(self, character: str) -> None:
        if character == "\r":
            self.column = 0
        elif character == "\n":
            self.row += 1
            self.lines += [""] * (self.row + 1 - len(self.lines))
        else:
            if self.column == self.width:
                self.wrapped.append(self.lines[self.row])
                self._put("\r")
                self._put("\n")
            line = self.lines[self.row].ljust(self.column)
            self.lines[self.row] = line[: self.column] + character + line[self.column + 1 :]
            self.column += 1


class Terminal:
    """`python -m topovq ARGUMENTS` at a width; what it draws is kept as `frames`, the last line each time."""

    def __init__(self, width: int, folder: Path, *arguments: str) -> None:
        self.screen, self.raw, self.frames, self.rest = Screen(width), "", list[str](), ""
        self.process, self.handle = pty.fork()
        if self.process == 0:
            os.chdir(folder)
            environment = {**os.environ, "TERM": "xterm", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
            environment.pop("COLUMNS", None)  # given whole: readline sets some behind Python's back
            os.execve(sys.executable, [sys.executable, "-m", "topovq", *arguments], environment)
        fcntl.ioctl(self.handle, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))

    def until(self, text: str | None, seconds: float = 120) -> float:
        """Watch until `text` is there, or without it until the command has ended; the seconds that took."""
        began = time.monotonic()
        while text is None or text not in self.raw:
            assert time.monotonic() - began < seconds, self.raw[-2_000:]
            if not select.select([self.handle], [], [], 0.1)[0]:
                continue
            try:
                data = os.read(self.handle, 65_536).decode(errors="replace")
            except OSError:  # what Linux says when the other side is gone
                data = ""
            if not data:
                assert text is None, self.raw[-2_000:]
                break
            self.raw += data
            data, self.rest = self.rest + data, ""
            cut = re.search(r"\x1b(\[[0-9;?]*)?$", data)  # a code of which the rest is still to come
            if cut:
                data, self.rest = data[: cut.start()], cut[0]
            for part in re.split(r"(?<=\r)|(?=\x1b\[2K)", data):
                self.screen.feed(part)
                self.frames.append(self.screen.lines[self.screen.row])
        return time.monotonic() - began

    def press(self, keys: bytes) -> None:
        os.write(self.handle, keys)

    def end(self, seconds: float = 120) -> int:
        """The exit code."""
        self.until(None, seconds)
        return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])
