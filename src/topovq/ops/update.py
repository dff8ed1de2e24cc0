"""update: one step of Kohonen's mini-batch rule on a codebook's state, in place (the equations are in codebook.py)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from topovq.grid import Grid
from topovq.ops.direct import plain
from topovq.ops.kernel import Course
from topovq.ops.smooth import smooth

NEVER = 2**30  # `idle` of a code that was never chosen, before it counts the updates since
CHOSEN = 0.5  # vectors in a batch that make a code a chosen one: soft choices give every code a little


def update(
    codes_KD: Tensor,
    sums_KD: Tensor,
    counts_K: Tensor,
    hits_K: Tensor,
    idle_K: Tensor,
    step: Tensor,
    frozen_K: Tensor,
    batch_KD: Tensor,
    batch_K: Tensor,
    grid: Grid,
    course: Course,
    *,
    decay: float,
    eps: float,
    update_empty: bool,
    carried: bool,
    cosine: bool,
) -> None:
    """Move the codes, their statistics and the step by a batch's sums and counts; nothing moves for an empty batch."""
    state = (codes_KD, sums_KD, counts_K, hits_K, idle_K, step, frozen_K, batch_KD, batch_K)
    rule = (decay, eps, update_empty, carried, cosine)
    if plain(codes_KD, batch_KD):
        _move(state, grid, course, *rule)
        torch.autograd.graph.increment_version(state[:6])  # as every in-place operation does
        return
    numbers = (course.kind, course.schedule, course.tau, course.start, course.end, course.steps)
    _update(*state, list(grid.shape), list(grid.wrap), grid.topology, *numbers, *rule)


def follow_use(hits_K: Tensor, idle_K: Tensor, batch_K: Tensor, decay: float) -> Tensor:
    """Move the running use of the codes by a batch's counts, in place; whether the batch held anything, bool, 0-dim."""
    live = batch_K.sum() > 0
    hits_K.copy_(torch.where(live, decay * hits_K + (1 - decay) * batch_K, hits_K))
    idle_K.copy_(torch.where(batch_K >= CHOSEN, 0, idle_K + live))
    return live


def _compute(
    codes_KD: Tensor,
    sums_KD: Tensor,
    counts_K: Tensor,
    hits_K: Tensor,
    idle_K: Tensor,
    step: Tensor,
    frozen_K: Tensor,
    batch_KD: Tensor,
    batch_K: Tensor,
    shape: list[int],
    wrap: list[bool],
    topology: str,
    kind: str,
    schedule: str,
    tau: float,
    start: float,
    end: float,
    steps: int,
    decay: float,
    eps: float,
    update_empty: bool,
    carried: bool,
    cosine: bool,
) -> None:
    grid = Grid(tuple(shape), topology=topology, wrap=tuple(wrap), size=len(codes_KD))
    course = Course(kind, schedule, tau, start, end, steps)
    state = (codes_KD, sums_KD, counts_K, hits_K, idle_K, step, frozen_K, batch_KD, batch_K)
    _move(state, grid, course, decay, eps, update_empty, carried, cosine)


MOVED = ("codes_KD", "sums_KD", "counts_K", "hits_K", "idle_K", "step")
_update = torch.library.custom_op("topovq::update", _compute, mutates_args=MOVED)


@_update.register_fake
def _(*_: object) -> None:
    return None


def _by_kernels(codes_KD: Tensor) -> bool:
    return codes_KD.is_cuda and codes_KD.dtype == torch.float32


def _move(
    state: Sequence[Tensor],
    grid: Grid,
    course: Course,
    decay: float,
    eps: float,
    update_empty: bool,
    carried: bool,
    cosine: bool,
) -> None:
    codes_KD, sums_KD, counts_K, hits_K, idle_K, step, frozen_K, batch_KD, batch_K = state
    if _by_kernels(codes_KD) and grid.ndim <= 3:
        from topovq.ops.triton.update import update_triton

        update_triton(
            codes_KD, sums_KD, counts_K, hits_K, idle_K, step, frozen_K, batch_KD.contiguous(), batch_K.contiguous(),
            grid, course, decay, eps, update_empty, carried, cosine,
        )  # fmt: skip
        return
    live = follow_use(hits_K, idle_K, batch_K, decay)
    batch_KD, batch_K = smooth(batch_KD, batch_K, grid, course.at(step))
    sums = decay * sums_KD + (1 - decay) * batch_KD
    counts = decay * counts_K + (1 - decay) * batch_K
    moves_K = live & ~frozen_K
    divisor = counts
    if update_empty:
        total = counts.sum()
        divisor = (counts + eps) / (total + counts.numel() * eps) * total
        counts = divisor if carried else counts
    else:
        moves_K = moves_K & (batch_K > 0)
    codes = sums / divisor[:, None]
    if cosine:
        codes = torch.nn.functional.normalize(codes, dim=1)
    moves_K1 = moves_K[:, None]
    codes_KD.copy_(torch.where(moves_K1, codes, codes_KD))
    sums_KD.copy_(torch.where(moves_K1, sums, sums_KD))
    counts_K.copy_(torch.where(moves_K, counts, counts_K))
    step += live
