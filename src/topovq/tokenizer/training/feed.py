"""Batches on the device without the host waiting for it.

A feed is used in two halves, so that the second can be captured in a CUDA graph: `prepare()` runs on the host before
each step, `batch()` gives the step's images uint8 [B, C, H, W] from addresses that stay the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from topovq.distributed import World
from topovq.tokenizer.data import Source

AHEAD = 256  # batches of indices sent to the device at once


class Feed(Protocol):
    def prepare(self) -> None: ...

    def batch(self) -> Tensor: ...

    def close(self) -> None: ...


def open_feed(source: Source, batch_size: int, seed: int, start: int, world: World) -> Feed:
    """The training images of `source` from global batch `start` on, gathered on the device if the whole set fits."""
    if world.device.type == "cuda":
        images = source.resident()
        if images is not None:
            return ResidentFeed(images, source, batch_size, seed, start, world)
    batches = source.train(batch_size, seed=seed, start=start, rank=world.rank, world_size=world.size)
    return CudaFeed(batches, world.device) if world.device.type == "cuda" else HostFeed(batches)


class HostFeed:
    """Batches as they come, for training on the CPU."""

    def __init__(self, batches: Iterator[Tensor]) -> None:
        self.batches = chain([next(batches)], batches)  # here: what is wrong with the images is known before a step

    def prepare(self) -> None:
        self.current = next(self.batches)

    def batch(self) -> Tensor:
        return self.current

    def close(self) -> None:
        pass


class CudaFeed:
    """Batches copied to the device one ahead, on a stream of their own, from pinned memory that a thread fills."""

    def __init__(self, batches: Iterator[Tensor], device: torch.device) -> None:
        self.batches, self.device = batches, device
        self.stream, self.sent = torch.cuda.Stream(device), torch.cuda.Event()
        first = self._pinned()  # here: a loader watches its processes from the main thread
        self.current, self.upcoming = torch.empty_like(first, device=device), torch.empty_like(first, device=device)
        self.stream.wait_stream(torch.cuda.current_stream(device))
        self._send(first)
        self.pool = ThreadPoolExecutor(1)
        self.next = self.pool.submit(self._pinned)

    def prepare(self) -> None:
        steps = torch.cuda.current_stream(self.device)
        steps.wait_stream(self.stream)
        self.current.copy_(self.upcoming)
        self.stream.wait_stream(steps)
        self.sent.synchronize()  # the host goes no further ahead: each step would hold another batch of pinned memory
        self._send(self.next.result())
        self.next = self.pool.submit(self._pinned)

    def batch(self) -> Tensor:
        return self.current

    def close(self) -> None:
        """Wait for the thread, which may be in the middle of a batch: who owns the batches may close them then."""
        self.pool.shutdown()

    def _pinned(self) -> Tensor:
        with torch.cuda.device(self.device):
            return next(self.batches).pin_memory()

    def _send(self, batch: Tensor) -> None:
        with torch.cuda.stream(self.stream):
            self.upcoming.copy_(batch, non_blocking=True)
        self.sent.record(self.stream)


class ResidentFeed:
    """The whole data set on the device; only row numbers travel, AHEAD batches at a time."""

    def __init__(
        self, images_NCHW: Tensor, source: Source, batch_size: int, seed: int, start: int, world: World
    ) -> None:
        # Rows of one block of memory each, whatever the order of their axes.
        self.last = not images_NCHW.is_contiguous()
        self.images = (images_NCHW.permute(0, 2, 3, 1) if self.last else images_NCHW).to(world.device)
        self.source, self.batch_size, self.seed, self.upcoming, self.world = source, batch_size, seed, start, world
        local = batch_size // world.size
        self.rows = slice(world.rank * local, (world.rank + 1) * local)
        self.indices_AB = torch.empty(AHEAD, local, dtype=torch.int64, device=world.device)
        self.position_1 = torch.zeros(1, dtype=torch.int64, device=world.device)
        self.left = 0

    def prepare(self) -> None:
        if self.left == 0:
            batches = [
                self.source.indices(i, self.batch_size, self.seed)[self.rows]
                for i in range(self.upcoming, self.upcoming + AHEAD)
            ]
            self.indices_AB.copy_(torch.stack(batches).pin_memory(), non_blocking=True)
            self.position_1.zero_()
            self.upcoming += AHEAD
            self.left = AHEAD
        self.left -= 1

    def batch(self) -> Tensor:
        index_B = self.indices_AB.index_select(0, self.position_1).view(-1)
        self.position_1.add_(1)
        images = self.images.index_select(0, index_B)
        return images.permute(0, 3, 1, 2) if self.last else images

    def close(self) -> None:
        pass
