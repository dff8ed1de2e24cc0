"""The explorer's server with hostile and slow clients beside normal ones: what they get, how fast, at what memory."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from random import Random
from threading import Thread
from typing import Any

import httpx
import numpy as np

from campaign import sound
from campaign.apart import apart, must
from campaign.clients import SLOW, Answers, generated, hostile, normal, slow
from campaign.outcomes import Row
from campaign.targets import enter

NORMAL, HOSTILE = 3, 6  # clients at once
SHARES = {"normal": 0.4, "hostile": 0.4, "generated": 0.2}  # of all requests; slow clients come on top of them
LONGEST = 10.0  # seconds


def make(folder: Path) -> None:
    enter(folder)
    Path("images").mkdir()
    for number in range(8):
        sound.picture(number).save(f"images/{number}.png")
    os.mkfifo("images/pipe.png")
    sound.trained("run", steps=20, image_size=32)


def attack_explorer(requests: int, seed: int, folder: Path) -> Iterator[Row]:
    """A row for normal clients, one for hostile ones and one for slow ones; `requests` of all together."""
    must(apart(lambda: make(folder), 120, None))
    command = [sys.executable, "-m", "topovq", "explore", "run", "--port", "0", "--images", "images"]
    said = open(folder / "log", "w+")  # noqa: SIM115 (the server writes to it until it ends)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}
    server = subprocess.Popen(command, cwd=folder, stdout=said, stderr=subprocess.STDOUT, env=environment)
    try:
        address = _address(folder / "log", server)
        load = os.getloadavg()[0]  # what else the machine has to do
        warm = requests // 4 + 20
        _phase(address, warm, seed + 1)
        before = resident(server.pid)
        rows = _phase(address, requests, seed)
        time.sleep(1)
        grown = (resident(server.pid) - before) / 2**20
        for row in rows:
            row.figures |= {"grown_mib": grown, "load": load}
        log = (folder / "log").read_text()
        if "Traceback" in log:
            rows[1].add("traceback", log[log.index("Traceback") :][:2000])
        with httpx.Client(base_url=address, timeout=LONGEST) as client:  # it is still there
            rows[0].add("right" if client.get("/api/run").status_code == 200 else "crash", "after the attack")
        yield from rows
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)
        said.close()


def _address(log: Path, server: subprocess.Popen[Any]) -> str:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and server.poll() is None:
        found = re.search(r"http://127\.0\.0\.1:\d+", log.read_text())
        if found:
            return found.group()
        time.sleep(0.05)
    raise RuntimeError(f"the explorer did not start: {log.read_text()}")


def _phase(address: str, requests: int, seed: int) -> list[Row]:
    """All clients at once: normal ones in a process of its own, and the others until those have ended."""
    ended = threading.Event()
    answers: dict[str, Answers] = {"hostile": [], "generated": [], "slow": []}
    share = {name: max(1, int(requests * part)) for name, part in SHARES.items()}
    each = share["hostile"] // HOSTILE + 1
    threads = [
        *(Thread(target=slow, args=(address, kind, ended, answers["slow"])) for kind in SLOW),
        *(Thread(target=hostile, args=(address, each, Random(f"{seed} {n}"), ended, answers["hostile"]))
          for n in range(HOSTILE)),
        Thread(target=generated, args=(address, share["generated"], seed, answers["generated"])),
    ]  # fmt: skip
    with ProcessPoolExecutor(1, get_context("fork")) as apart_from_them:
        watched = apart_from_them.submit(normal, address, share["normal"], NORMAL)  # forked before there are threads
        for thread in threads:
            thread.start()
        measured = watched.result()
    ended.set()
    for thread in threads:
        thread.join()
    rows = [Row("requests", f"{name} clients") for name in ("normal", "hostile", "slow")]
    for kind, status, seconds in measured:
        rows[0].add(_outcome(status, seconds), f"{kind}: {status}")
    took = np.array([seconds for _, _, seconds in measured]) * 1000
    rows[0].figures |= {f"p{q}_ms": float(np.percentile(took, q)) for q in (50, 99)}
    for kind, status, seconds in answers["hostile"] + answers["generated"]:
        rows[1].add(_outcome(status, seconds), f"{kind}: status {status} after {seconds:.1f} s")
    for kind, status, seconds in answers["slow"]:
        rows[2].add("refused" if status == 0 else "hang", f"{kind}: still open after {seconds:.0f} s")
    return rows


def _outcome(status: int, seconds: float) -> str:
    """Of a hostile request; status 0 is a connection that was closed."""
    if seconds > LONGEST:
        return "hang"
    if status >= 500 and status != 503:
        return "traceback"
    return "right" if 200 <= status < 400 else "refused"


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
