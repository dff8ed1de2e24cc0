"""One process or many: ranks, sums over them, and the world that torchrun's variables describe.

A layer asks for its rank and the number of ranks anew at each call: the group may come after the module.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if world_size() > 1 else 0


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """The sum over all processes, bit for bit the same on each; the tensor itself where there is one process."""
    if world_size() == 1:
        return tensor
    if torch.compiler.is_compiling():
        from torch.distributed import _functional_collectives as collectives

        group = dist.group.WORLD
        assert group is not None
        summed: Tensor = collectives.all_reduce(tensor, "sum", group)
        return summed
    tensor = tensor.contiguous()
    dist.all_reduce(tensor)
    return tensor


@dataclass(frozen=True)
class World:
    """This process's place: `rank` of `size`, on `device`."""

    rank: int
    size: int
    device: torch.device

    @property
    def leads(self) -> bool:
        """Whether this process writes files and shows progress."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """The tensor summed over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def any(self, flag: bool) -> bool:
        """Whether the flag is up in any process; all processes must ask."""
        if self.size == 1:
            return flag
        return bool(self.sum(torch.tensor(float(flag), device=self.device)) > 0)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Every process's tensor (same shape), in rank order, on the CPU."""
        if self.size == 1:
            return [tensor.cpu()]
        parts = [torch.empty_like(tensor, device=self.device) for _ in range(self.size)]
        dist.all_gather(parts, tensor.to(self.device))
        return [part.cpu() for part in parts]

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()


@contextlib.contextmanager
def join_world(device: str) -> Iterator[World]:
    """The world this process was started in: under torchrun (WORLD_SIZE is set) with a process group, else alone.

    device  "auto" (CUDA where there is one), "cpu", "cuda", "cuda:1"
    """
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    chosen = pick_device(device, int(os.environ.get("LOCAL_RANK", "0")))
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    ours = size > 1 and not dist.is_initialized()
    if ours:
        dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo")
    try:
        yield World(rank, size, chosen)
    finally:
        if ours:
            gc.collect()  # DDP is part of a cycle and holds the group, whose threads must end before the interpreter
            dist.destroy_process_group()


def pick_device(name: str, local_rank: int | None = 0) -> torch.device:
    """The torch device for "auto", "cpu", "cuda" (this process's one; the current one without a rank), "cuda:1"."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device={name!r} is unknown; use auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"device={name!r} was asked for, but torch finds no CUDA device; use cpu or auto")
        return device if device.index is not None or local_rank is None else torch.device("cuda", local_rank)
    if device.type != "cpu":
        raise ValueError(f"device={name!r} is not supported; use auto, cpu, cuda or cuda:N")
    return device
