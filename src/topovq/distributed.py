"""Sums over the processes of a distributed run, asked for anew at each call: the group may come after the module."""

from __future__ import annotations

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
        return collectives.all_reduce(tensor, "sum", group)
    tensor = tensor.contiguous()
    dist.all_reduce(tensor)
    return tensor
