"""Several processes by gloo: whole, with nothing to do for some, and with one that is killed."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from campaign import sound
from campaign.apart import apart, end_of, must, start
from campaign.outcomes import Row
from campaign.targets import digest, encode, enter, tokens_of

STEPS = 24
WORLDS = (2, 4)


def make(folder: Path) -> None:
    enter(folder)
    for place, count in (("images", 16), ("few", 1)):
        Path(place).mkdir()
        for number in range(count):
            sound.picture(number).save(f"{place}/{number}.png")
    sound.trained("run")


def attack_ranks(times: int, seed: int, folder: Path) -> Iterator[Row]:
    """A row for each size of the world: runs that end, shares without images, ranks that are killed."""
    must(apart(lambda: make(folder), 120, None))
    few = must(apart(lambda: (enter(folder), encode("run", "few"))[1])).value
    for world in WORLDS:
        row = Row("ranks", f"{world} ranks")
        codes = together(world, lambda: train("whole"), folder)
        if codes != [0] * world:
            raise RuntimeError(f"nobody attacked: {world} ranks ended with {codes}")
        expected = digest(folder / "whole" / "model.safetensors")
        for number in range(times):
            rng = Random(f"{seed} {world} {number}")
            row.add(_empty_shares(world, folder, few), f"case {number}, ranks without an image")
            row.add(_one_killed(world, folder, expected, rng), f"case {number}, a rank was killed")
        shutil.rmtree(folder / "whole")
        yield row


def train(out: str) -> None:
    sound.trained(out, steps=STEPS, batch_size=8, resume=True, log_every=1)


def _empty_shares(world: int, folder: Path, expected: dict[str, bytes]) -> str:
    """One image for all ranks: the shards together hold its tokens, once."""
    if together(world, lambda: encode_share(), folder) != [0] * world:
        return "traceback"
    shards = sorted(folder.glob("out-*.npz"))
    found = [tokens_of(str(path)) for path in shards]
    for path in shards:
        path.unlink()
    merged = {name: tokens for shard in found for name, tokens in shard.items()}
    return "right" if merged == expected and sum(map(len, found)) == len(expected) else "silent"


def encode_share() -> None:
    from topovq.cli import main

    main(["encode", "run", "few", "-o", "out.npz", "--workers", "0", "--device", "cpu"])


def _one_killed(world: int, folder: Path, expected: str, rng: Random) -> str:
    """Kill a rank at a random step, and the others as torchrun does; all of them then go on as if nothing had been."""
    shutil.rmtree(folder / "lost", ignore_errors=True)
    together(world, lambda: train("lost"), folder, lambda pids: _kill_one(pids, folder / "lost", rng))
    codes = together(world, lambda: train("lost"), folder)
    if codes != [0] * world:
        return "hang" if None in codes else "traceback"
    return "right" if digest(folder / "lost" / "model.safetensors") == expected else "silent"


def _kill_one(pids: list[int], run: Path, rng: Random) -> None:
    """Wait for the first checkpoint and some more, kill one, and tell the others to stop, as torchrun does. gloo may
    wait for the lost one all the same: such processes are killed after a while, by torchrun as by `together`."""
    deadline = time.monotonic() + 60
    while not any((run / "checkpoints").glob("step-*")) and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(rng.uniform(0, 0.5))
    chosen = rng.choice(pids)
    os.kill(chosen, signal.SIGKILL)
    for pid in pids:
        os.kill(pid, signal.SIGTERM)


def together(
    world: int, work: Callable[[], Any], folder: Path, meanwhile: Callable[[list[int]], None] | None = None
) -> list[int | None]:
    """The exit codes of `world` processes that do `work` as under torchrun; None: one had to be killed."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    pids = []
    for rank in range(world):
        variables = {**where, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        pids.append(start(lambda: (enter(folder), work()), **variables))
    if meanwhile is not None:
        meanwhile(pids)
    deadline = time.monotonic() + (60 if meanwhile is None else 5)
    return [end_of(pid, deadline - time.monotonic()) for pid in pids]
