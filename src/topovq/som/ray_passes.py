"""Passes over rows on a Ray cluster: only questions go there, and only what they add up to comes back.

The table is cut into parts by its rows alone, not by how many machines there are, and what the parts say is added in
their order. So the codes are the same bit for bit however many machines did it, and whichever were lost on the way: Ray
asks a part that was lost again. Files must be at the same paths on all machines; arrays are sent there once.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from topovq.cluster import ask_for, join_ray, original_errors
from topovq.som.questions import Question
from topovq.som.rows import ReadPasses, Rows, paths_of
from topovq.som.stats import Stats

PARTS = 256  # at most: each comes back as one Stats
Part = tuple[Rows, str, np.ndarray | None]  # rows, the device to look at them, their sample_weight


class RayPasses(ReadPasses):
    """Rows of which every part is asked on the cluster; the one that this process is connected to, if it is."""

    def __init__(self, here: ReadPasses, names: Any, device: str) -> None:
        """`here` says what the rows are; `names` which columns, where nobody chose any."""
        vars(self).update(vars(here) | {"keeps_labels": False})
        joined = contextlib.ExitStack()
        weakref.finalize(self, joined.close)
        self.ray = joined.enter_context(join_ray())
        self.at_once, _, gpus = ask_for(self.ray, None, device, 1)
        self.task = self.ray.remote(num_cpus=1, num_gpus=gpus, max_retries=-1)(_ask)
        self.parts = [self.ray.put(part) for part in _parts(here, names, "cuda" if gpus else "cpu")]

    def added(self, question: Question) -> Stats:
        return Stats.merge(stats for (stats,) in self._asked(question, True))

    def told(self, question: Question) -> Iterator[Any]:
        for blocks in self._asked(question, False):
            yield from blocks

    def _asked(self, question: Question, add: bool) -> Iterator[list[Any]]:
        """What the parts say, in order; a few more than can be asked at once are under way."""
        held = self.ray.put((question, self.prepared, add))
        waiting = deque(self.parts)
        asked: deque[Any] = deque()
        with original_errors(self.ray):
            while waiting or asked:
                while waiting and len(asked) < 2 * self.at_once:
                    asked.append(self.task.remote(waiting.popleft(), held))
                rows, told = self.ray.get(asked.popleft())
                self.advance(rows)
                yield told


def _parts(here: ReadPasses, names: Any, device: str) -> list[Part]:
    """The rows in parts, which each begin where a block does."""
    rows = here.rows
    source = [path.resolve() for path in paths_of(rows.source)] or rows.source
    columns = names if rows.columns is None else rows.columns  # a map's own, where its table has others beside them
    whole = Rows(source, columns, rows.weight, start=rows.start, stop=rows.stop)
    parts = []
    for part in whole.parts(PARTS, device):
        given = slice(part.start - rows.start, None if part.stop is None else part.stop - rows.start)
        weight_N = None if here.sample_weight is None else here.sample_weight[given]
        if isinstance(source, np.ndarray):  # its rows alone are sent
            part = Rows(np.asarray(source[part.start : part.stop]), rows.columns, rows.weight)
        parts.append((part, device, weight_N))
    return parts


def _ask(part: Part, held: tuple[Question, Any, bool]) -> tuple[int, list[Any]]:
    """On the cluster: how many rows there are, and what they say, added up or block by block."""
    (rows, device, weight_N), (question, prepared, add) = part, held
    passes = ReadPasses(rows, rows.reader(), torch.device(device), weight_N, prepared)
    if add:
        return passes.n or 0, [passes.added(question)]  # Stats travel on the CPU by themselves
    blocks = ([value if value is None else value.cpu() for value in told] for told in passes.told(question))
    return passes.n or 0, list(blocks)
