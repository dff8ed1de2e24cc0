"""Smoothing and moving the codes on CUDA: two launches, whatever the neighborhood's window.

Legend: K codes, D dimensions, M steps on the map (0 where there is no window, or ops/smooth.py came before).
    counts   c~ = c + sum_m weight(length_m) c_{k + step_m};   N = decay N + beta c~
    codes    S~ likewise;   m = decay m + beta S~;   w = m / N~   (codebook.py)
A Gaussian that has become so narrow that only the next places count is such a window, too: the launches before then do
nothing. Of a large codebook most codes are chosen by no vector of a batch, and their sums, which are 0, are not read.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from topovq.neighborhood import Neighborhood
from topovq.ops.smooth import method, smooth, step_table
from topovq.ops.triton.accumulate import cdiv, power_of_2
from topovq.ops.triton.replay import Work, replayed
from topovq.ops.triton.smooth import gaussian_triton, is_narrow, lattice, schedule_table, weight, width_and_strength
from topovq.ops.update import Batch, Rule, State

COUNTS = 1024  # codes per program of the first launch
NEXT = math.sqrt(3)  # how far the next places are, over corners, on a grid of up to 3 axes


@triton.jit
def _neighbor(
    code, m, steps_ptr, K, n0, n1, n2,
    WRAP0: tl.constexpr, WRAP1: tl.constexpr, WRAP2: tl.constexpr, HEXAGONAL: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """(place, whether it holds a code) of step m from each code; grids have three axes here, the first of them 1."""
    c0, c1, c2 = code // (n1 * n2), (code // n2) % n1, code % n2
    s0 = tl.load(steps_ptr + 3 * m)
    s1 = tl.load(steps_ptr + 3 * m + 1)
    s2 = tl.load(steps_ptr + 3 * m + 2)
    if HEXAGONAL:
        # Steps along a row count half cells; from an odd row an odd step leads one column further.
        s2 = (s2 + (s1 & 1) * (2 * (c1 & 1) - 1)) >> 1
    a0, a1, a2 = c0 + s0, c1 + s1, c2 + s2
    if WRAP0:
        a0 = (a0 + n0) % n0
    if WRAP1:
        a1 = (a1 + n1) % n1
    if WRAP2:
        a2 = (a2 + n2) % n2
    on = (a0 >= 0) & (a0 < n0) & (a1 >= 0) & (a1 < n1) & (a2 >= 0) & (a2 < n2)
    place = (a0 * n1 + a1) * n2 + a2
    if not FULL:
        on = on & (place < K)
    return place, on


@triton.jit
def _counts_kernel(
    batch_ptr, raw_ptr, counts_ptr, smoothed_ptr, fresh_ptr, total_ptr, live_ptr, steps_ptr, lengths_ptr, step_ptr,
    schedule_ptr, now_ptr, K, M, n0, n1, n2, decay, beta,
    KIND: tl.constexpr, SCHEDULE: tl.constexpr,
    WRAP0: tl.constexpr, WRAP1: tl.constexpr, WRAP2: tl.constexpr, HEXAGONAL: tl.constexpr, FULL: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    code = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    batch = tl.load(batch_ptr + code, code < K, 0.0)
    if KIND != "none":
        width, strength = width_and_strength(step_ptr, schedule_ptr, KIND, SCHEDULE)
        if tl.program_id(0) == 0:  # for the second launch, which moves the step
            tl.store(now_ptr, width)
        if KIND == "hard" or is_narrow(width):
            batch = tl.load(raw_ptr + code, code < K, 0.0)
            for m in range(M):
                place, on = _neighbor(code, m, steps_ptr, K, n0, n1, n2, WRAP0, WRAP1, WRAP2, HEXAGONAL, FULL)
                share = weight(tl.load(lengths_ptr + m), width, strength, KIND)
                if tl.program_id(0) == 0:
                    tl.store(now_ptr + 1 + m, share)
                batch += share.to(tl.float32) * tl.load(raw_ptr + place, on & (code < K), 0.0)
    tl.store(smoothed_ptr + code, batch, code < K)
    counts = decay * tl.load(counts_ptr + code, code < K, 0.0) + beta * batch
    tl.store(fresh_ptr + code, counts, code < K)
    tl.store(total_ptr + tl.program_id(0), tl.sum(tl.where(code < K, counts, 0.0), 0))
    tl.store(live_ptr + tl.program_id(0), tl.sum(tl.load(raw_ptr + code, code < K, 0.0), 0))


@triton.jit
def _codes_kernel(
    batch_ptr, alone_ptr, raw_ptr, smoothed_ptr, fresh_ptr, total_ptr, live_ptr, steps_ptr, now_ptr,
    codes_ptr, sums_ptr, counts_ptr, hits_ptr, idle_ptr, frozen_ptr, step_ptr, skipped_ptr, new_skipped_ptr,
    K, D, M, programs, n0, n1, n2, decay, beta, eps,
    KIND: tl.constexpr, UPDATE_EMPTY: tl.constexpr, CARRIED: tl.constexpr, COSINE: tl.constexpr,
    WRAP0: tl.constexpr, WRAP1: tl.constexpr, WRAP2: tl.constexpr, HEXAGONAL: tl.constexpr, FULL: tl.constexpr,
    BLOCK_K: tl.constexpr, DP: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    part = tl.arange(0, PROGRAMS)
    total = tl.sum(tl.load(total_ptr + part, part < programs, 0.0), 0)
    vectors = tl.sum(tl.load(live_ptr + part, part < programs, 0.0), 0)
    code = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    live = (code < K) & (vectors + tl.zeros([BLOCK_K], tl.float32) > 0)
    dim = tl.arange(0, DP)
    inside = (code[:, None] < K) & (dim[None, :] < D)
    here = code[:, None].to(tl.int64) * D + dim[None, :]
    if KIND == "none":
        batch = tl.load(batch_ptr + here, inside, 0.0)
    else:
        if KIND == "hard" or is_narrow(tl.load(now_ptr)):
            chosen = tl.load(raw_ptr + code, code < K, 0.0) > 0
            batch = tl.load(alone_ptr + here, inside & chosen[:, None], 0.0)
            for m in range(M):
                place, on = _neighbor(code, m, steps_ptr, K, n0, n1, n2, WRAP0, WRAP1, WRAP2, HEXAGONAL, FULL)
                chosen = tl.load(raw_ptr + place, on & (code < K), 0.0) > 0
                there = place[:, None].to(tl.int64) * D + dim[None, :]
                share = tl.load(now_ptr + 1 + m).to(tl.float32)
                batch += share * tl.load(alone_ptr + there, (dim < D)[None, :] & chosen[:, None], 0.0)
        else:
            batch = tl.load(batch_ptr + here, inside, 0.0)
    # Not from counts_ptr, which is written below: warps do not wait for each other, and a row's threads read its count.
    counts = tl.load(fresh_ptr + code, code < K, 0.0)
    moves = live & (tl.load(frozen_ptr + code, code < K, 1) == 0)
    divisor = counts
    if UPDATE_EMPTY:
        divisor = (counts + eps) / (total + K * eps) * total
        if CARRIED:
            counts = divisor
    else:
        moves = moves & (tl.load(smoothed_ptr + code, code < K, 0.0) > 0)
    sums = decay * tl.load(sums_ptr + here, inside & moves[:, None], 0.0) + beta * batch
    codes = sums / divisor[:, None]
    if COSINE:
        codes = codes / tl.maximum(tl.sqrt(tl.sum(tl.where(inside, codes * codes, 0.0), 1)), 1e-12)[:, None]
    tl.store(sums_ptr + here, sums, inside & moves[:, None])
    tl.store(codes_ptr + here, codes, inside & moves[:, None])
    tl.store(counts_ptr + code, counts, moves)
    raw = tl.load(raw_ptr + code, code < K, 0.0)
    hits = decay * tl.load(hits_ptr + code, code < K, 0.0) + beta * raw
    tl.store(hits_ptr + code, hits, live)
    idle = tl.load(idle_ptr + code, code < K, 0)
    tl.store(idle_ptr + code, tl.where(raw >= 0.5, 0, idle + 1), live)  # update.py: CHOSEN
    if tl.program_id(0) == 0:
        tl.store(step_ptr, tl.load(step_ptr) + tl.where(vectors > 0, 1, 0))
        tl.store(skipped_ptr, tl.load(skipped_ptr) + tl.load(new_skipped_ptr))


def update_triton(state: State, batch: Batch, neighborhood: Neighborhood, rule: Rule) -> None:
    """Move the state in place (float32, contiguous; grids of up to 3 axes)."""
    key = ("update", state.codes_KD.shape, neighborhood, rule)
    replayed(key, (*state, *batch), _update, neighborhood, rule)


def _update(work: Work, *given: Any) -> tuple[()]:
    state, batch, (neighborhood, rule) = State(*given[:8]), Batch(*given[8:11]), given[11:]
    codes_KD, sums_KD, counts_K, hits_K, idle_K, step, skipped, frozen_K = state
    k, d = codes_KD.shape
    device, grid = codes_KD.device, neighborhood.grid
    kind, way = neighborhood.kind, method(neighborhood)
    steps_M3, lengths_M, window = batch.counts_K, batch.counts_K, 0
    if way == "box":
        smoothed_KD, smoothed_K = batch.sums_KD, batch.counts_K
        steps_M3, lengths_M = map(work.constant, step_table(grid, neighborhood.widest, device))
        window = len(lengths_M)
    elif way == "separable" and grid.topology == "rectangular":
        smoothed_KD, smoothed_K = gaussian_triton(
            batch.sums_KD, batch.counts_K, neighborhood, step, but_narrow=True, work=work
        )
        steps_M3, lengths_M = map(work.constant, step_table(grid, NEXT, device))
        window = len(lengths_M)
    else:
        smoothed_KD, smoothed_K = (
            part.contiguous() for part in smooth(batch.sums_KD, batch.counts_K, neighborhood, step)
        )
        kind = "none"  # one kernel for all of these
    sizes, how = lattice(grid)
    how["FULL"] = grid.size == grid.places
    programs = cdiv(k, COUNTS)
    total, live = (work.empty(programs, dtype=torch.float32, device=device) for _ in range(2))
    now = work.empty(1 + window, dtype=torch.float64, device=device)  # the width, and the weights of the window
    near_K, fresh_K = (work.empty(k, dtype=torch.float32, device=device) for _ in range(2))
    table = work.constant(schedule_table(neighborhood.schedule, neighborhood.widest, device))
    padded = power_of_2(d)
    block = max(1, 2048 // padded)
    work.launch(
        _counts_kernel, (programs,), smoothed_K, batch.counts_K, counts_K, near_K, fresh_K, total, live,
        steps_M3, lengths_M, step, table, now, k, window, *sizes, rule.decay, 1 - rule.decay,
        KIND=kind, SCHEDULE="harmonic" if kind == "none" else neighborhood.schedule.kind, BLOCK=COUNTS, **how,
    )  # fmt: skip
    work.launch(
        _codes_kernel, (cdiv(k, block),), smoothed_KD, batch.sums_KD, batch.counts_K, near_K, fresh_K,
        total, live, steps_M3, now, codes_KD, sums_KD, counts_K, hits_K, idle_K, frozen_K, step,
        skipped, batch.skipped, k, d, window, programs, *sizes, rule.decay, 1 - rule.decay, rule.eps,
        KIND=kind, UPDATE_EMPTY=rule.update_empty, CARRIED=rule.carried, COSINE=rule.cosine,
        BLOCK_K=block, DP=padded, PROGRAMS=power_of_2(programs), **how,
    )  # fmt: skip
    return ()
