"""Processes of Python that are forked from one that has imported torch, which alone takes them over a second.

They are as a fresh interpreter is in all else: with a folder, variables, arguments and a `__main__` of their own. What
is about importing, or about signals and groups of processes, starts a fresh one.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

# The child leaves the loop and goes on as the interpreter that it is: its way out is the usual one.
SERVER = """
import gc, json, os, runpy, socket, sys, types
import torch
gc.collect()
gc.freeze()  # else each child would go through it, and copy it, on its way out
door = socket.socket(fileno=int(sys.argv[1]))
while True:
    asked, streams, _, _ = socket.recv_fds(door, 1 << 20, 2)
    if not asked:
        sys.exit()
    child = os.fork()
    if child == 0:
        break
    for stream in streams:
        os.close(stream)
    door.send(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())
door.close()
folder, variables, (what, *arguments) = json.loads(asked)
os.chdir(folder)
os.environ.clear()
os.environ.update(variables)
for number, stream in enumerate(streams, 1):
    os.dup2(stream, number)
    os.close(stream)
if what == "-c":
    sys.argv = ["-c", *arguments[1:]]
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    exec(compile(arguments[0], "<string>", "exec"), vars(main))
elif what == "-m":
    sys.argv, sys.path[0] = arguments, folder
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
else:
    sys.argv, sys.path[0] = [what, *arguments], os.path.dirname(os.path.abspath(what))
    runpy.run_path(what, run_name="__main__")
"""


class Server:
    def __init__(self) -> None:
        self.door, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-c", SERVER, str(theirs.fileno())]
        self.process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        theirs.close()
        atexit.register(self.end)

    def end(self) -> None:
        self.door.close()
        self.process.wait()


servers: list[Server] = []


def python(
    *arguments: str | Path,
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 300,
) -> subprocess.CompletedProcess[str]:
    """What `python ARGUMENTS` does: `-c` with code, `-m` with a module, or a script, and its own arguments."""
    if not servers:
        servers.append(Server())
    server, words = servers[0], [str(word) for word in arguments]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        asked = json.dumps([str(cwd or Path.cwd()), dict(os.environ if env is None else env), words])
        server.door.settimeout(timeout)
        socket.send_fds(server.door, [asked.encode()], [out.fileno(), err.fileno()])
        try:
            code = server.door.recv(100)
        except TimeoutError:
            servers.clear()
            os.killpg(server.process.pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired(words, timeout) from None
        said = []
        for stream in (out, err):
            stream.seek(0)
            said.append(stream.read().decode())
    return subprocess.CompletedProcess(words, int(code), *said)
