"""`kill -9` at a random moment of a command that writes files; the same command again must make up for it."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow
from pyarrow import parquet

from campaign import sound
from campaign.apart import Ended, apart, end_of, must, start
from campaign.outcomes import Row
from campaign.targets import digest, encode, enter, tokens_of
from topovq.cli import main

STEPS = 24


@dataclass(frozen=True)
class Victim:
    """A command: what it does, what it leaves, and whether what it left behind when it was killed is whole."""

    name: str
    work: Callable[[], Any]
    result: Callable[[], Any]
    writes: str  # a folder, or the file that must be whole or not there


def train() -> None:
    sound.trained("killed", steps=STEPS, resume=True)


def train_prior() -> None:
    sound.prior("killed-prior", steps=STEPS, resume=True)


def encode_many() -> None:
    encode("run", "many")


def map_table() -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        main(["map", "table.parquet", "--grid", "8x8", "--device", "cpu", "--force", "-o", "map"])


# A command that writes files has its place here.
VICTIMS = (
    Victim("train", train, lambda: digest(Path("killed/model.safetensors")), "killed"),
    Victim("prior", train_prior, lambda: digest(Path("killed-prior/model.safetensors")), "killed-prior"),
    Victim("encode", encode_many, lambda: tokens_of("out.npz"), "out.npz"),
    Victim("map", map_table, lambda: digest(Path("map/map.safetensors")), "map"),
)


def make(folder: Path) -> None:
    """A run, and images enough for a kill to hit."""
    enter(folder)
    Path("images").mkdir()
    Path("many").mkdir()
    for number in range(8):
        sound.picture(number).save(f"images/{number}.png")
    sound.trained("run")
    for number in range(400):
        sound.picture(number).save(f"many/{number:03}.png")
    column = np.random.default_rng(0).random(100_000)
    parquet.write_table(pyarrow.table({"a": column, "b": np.cos(9 * column)}), "table.parquet")


def attack_commands(kills: int, seed: int, folder: Path) -> Iterator[Row]:
    """A row for each command, which is killed `kills` times."""
    must(apart(lambda: make(folder), 300, None))
    for victim in VICTIMS:
        row = Row("kills", victim.name)
        began = time.monotonic()
        expected = must(_done(victim, folder)).value
        whole = time.monotonic() - began
        for number in range(kills):
            rng = Random(f"{seed} {victim.name} {number}")
            delay = _killed(victim, folder, rng, whole)
            row.add(_after(victim, folder, expected), f"case {number}, after {delay:.3f} s of {whole:.3f}")
        yield row


def _killed(victim: Victim, folder: Path, rng: Random, whole: float) -> float:
    """Start the command afresh and kill it while it is at work; after how many seconds."""
    while True:
        _clear(victim, folder)
        child = start(lambda: (enter(folder), victim.work()))
        delay = rng.uniform(0, whole)
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
        if end_of(child, 10) == -signal.SIGKILL:
            return delay


def _after(victim: Victim, folder: Path, expected: Any) -> str:
    """What has become of a command that was killed: of what it left, and of its second try."""
    left = folder / victim.writes
    if left.is_file():
        there = apart(lambda: (enter(folder), victim.result())[1])
        if there.value != expected:
            return "silent"
    again = _done(victim, folder)
    if again.kind != "done":
        return again.kind if again.kind in ("hang", "memory", "crash") else "traceback"
    within = left if left.is_dir() else folder
    if again.value != expected or list(within.rglob(".*.tmp")):
        return "silent"
    return "right"


def _done(victim: Victim, folder: Path) -> Ended:
    def work() -> Any:
        enter(folder)
        victim.work()
        return victim.result()

    return apart(work, 60)


def _clear(victim: Victim, folder: Path) -> None:
    for path in (folder / victim.writes, *folder.glob(".*.tmp")):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
