"""update: one step of Kohonen's rule, or of "ride", on a codebook's state, in place (codebook.py has the equations)."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from topovq.neighborhood import Neighborhood
from topovq.ops.direct import plain
from topovq.ops.registered import registered
from topovq.ops.ride import LEAST_COUNT, revive_on_map, ride
from topovq.ops.smooth import smooth
from topovq.ops.use import follow_use


class State(NamedTuple):
    """The tensors of a codebook that an update reads; all but the last are moved in place."""

    codes_KD: Tensor
    sums_KD: Tensor
    counts_K: Tensor
    hits_K: Tensor
    idle_K: Tensor
    step: Tensor
    skipped: Tensor
    frozen_K: Tensor


class Batch(NamedTuple):
    """The sums and counts of the vectors of a batch that chose each code, and how many did not count (int64)."""

    sums_KD: Tensor
    counts_K: Tensor
    skipped: Tensor


class Rule(NamedTuple):
    """The numbers of the rule, as codebook.py explains them."""

    decay: float
    eps: float
    update_empty: bool
    carried: bool
    """Smoothed counts replace the counts: count_smoothing="carried"."""
    cosine: bool
    """Codes have length one."""
    ride: bool = False
    """Codes have their own means and ride along with their neighbors: not Kohonen's rule."""
    revive: bool = False
    """With `ride`, dead codes come back beside busy ones."""


def update(state: State, batch: Batch, neighborhood: Neighborhood, rule: Rule) -> None:
    """Move the codes, their statistics and the step by a batch; for an empty one nothing moves but `skipped`."""
    if plain(state.codes_KD, batch.sums_KD):
        _move(state, batch, neighborhood, rule)
        torch.autograd.graph.increment_version(state[:-1])  # as every in-place operation does
        return
    _update(*state, *batch, *neighborhood.numbers, *rule)


def _compute(
    codes_KD: Tensor,
    sums_KD: Tensor,
    counts_K: Tensor,
    hits_K: Tensor,
    idle_K: Tensor,
    step: Tensor,
    skipped: Tensor,
    frozen_K: Tensor,
    batch_KD: Tensor,
    batch_K: Tensor,
    batch_skipped: Tensor,
    shape: list[int],
    wrap: list[bool],
    topology: str,
    kind: str,
    schedule: str,
    tau: float,
    widest: float,
    end: float,
    steps: int,
    decay: float,
    eps: float,
    update_empty: bool,
    carried: bool,
    cosine: bool,
    ride: bool,
    revive: bool,
) -> None:
    """`update` with tensors and plain numbers alone, which is what a registered operation may take."""
    state = State(codes_KD, sums_KD, counts_K, hits_K, idle_K, step, skipped, frozen_K)
    numbers = (tuple(shape), tuple(wrap), topology, kind, schedule, tau, widest, end, steps)
    neighborhood = _neighborhood(len(codes_KD), *numbers)
    rule = Rule(decay, eps, update_empty, carried, cosine, ride, revive)
    _move(state, Batch(batch_KD, batch_K, batch_skipped), neighborhood, rule)
    torch.autograd.graph.increment_version(state[:-1])


_neighborhood = lru_cache(maxsize=64)(Neighborhood.from_numbers)
_update = registered("update", _compute, lambda *_: None, mutates=State._fields[:-1])


def _by_kernels(codes_KD: Tensor) -> bool:
    return codes_KD.is_cuda and codes_KD.dtype == torch.float32


def _move(state: State, batch: Batch, neighborhood: Neighborhood, rule: Rule) -> None:
    codes_KD, sums_KD, counts_K, hits_K, idle_K, step, skipped, frozen_K = state
    if _by_kernels(codes_KD) and neighborhood.grid.ndim <= 3:
        from topovq.ops.triton.ride import ride_triton
        from topovq.ops.triton.update import update_triton

        batch = Batch(batch.sums_KD.contiguous(), batch.counts_K.contiguous(), batch.skipped)
        if rule.ride:
            ride_triton(state, batch, neighborhood.grid, rule)
        else:
            update_triton(state, batch, neighborhood, rule)
        return
    skipped.add_(batch.skipped)
    if rule.ride:
        _ride(state, batch, neighborhood, rule)
        return
    live = follow_use(hits_K, idle_K, batch.counts_K, rule.decay)
    batch_KD, batch_K = smooth(batch.sums_KD, batch.counts_K, neighborhood, step)
    sums = rule.decay * sums_KD + (1 - rule.decay) * batch_KD
    counts = rule.decay * counts_K + (1 - rule.decay) * batch_K
    moves_K = live & ~frozen_K
    divisor = counts
    if rule.update_empty:
        total = counts.sum()
        divisor = (counts + rule.eps) / (total + counts.numel() * rule.eps) * total
        counts = divisor if rule.carried else counts
    else:
        moves_K = moves_K & (batch_K > 0)
    codes = sums / divisor[:, None]
    if rule.cosine:
        codes = torch.nn.functional.normalize(codes, dim=1)
    moves_K1 = moves_K[:, None]
    codes_KD.copy_(torch.where(moves_K1, codes, codes_KD))
    sums_KD.copy_(torch.where(moves_K1, sums, sums_KD))
    counts_K.copy_(torch.where(moves_K, counts, counts_K))
    step += live


def _ride(state: State, batch: Batch, neighborhood: Neighborhood, rule: Rule) -> None:
    codes_KD, sums_KD, counts_K, hits_K, idle_K, step, _, frozen_K = state
    live = follow_use(hits_K, idle_K, batch.counts_K, rule.decay)
    along_KD = ride(codes_KD, batch.sums_KD, batch.counts_K, neighborhood.grid, step, rule.decay)
    decays_K = (batch.counts_K > 0) | rule.update_empty
    counts = torch.where(decays_K, rule.decay * counts_K + (1 - rule.decay) * batch.counts_K, counts_K)
    sums = torch.where(decays_K[:, None], rule.decay * sums_KD + (1 - rule.decay) * batch.sums_KD, sums_KD)
    own_K1 = (counts > LEAST_COUNT)[:, None]
    codes = torch.where(own_K1, sums / torch.where(own_K1, counts[:, None], 1), codes_KD) + along_KD
    sums = sums + counts[:, None] * along_KD
    if rule.cosine:
        codes = torch.nn.functional.normalize(codes, dim=1)
    moves_K = live & ~frozen_K
    codes_KD.copy_(torch.where(moves_K[:, None], codes, codes_KD))
    sums_KD.copy_(torch.where(moves_K[:, None], sums, sums_KD))
    counts_K.copy_(torch.where(moves_K, counts, counts_K))
    if rule.revive:
        moved = (codes_KD, sums_KD, counts_K, idle_K, frozen_K)
        revive_on_map(*moved, batch.sums_KD, batch.counts_K, step, neighborhood.grid, rule.cosine)
    step += live
