"""The rule "ride" on CUDA: three launches, the last of them for dead codes.

Legend: K codes w, D dimensions; S, c the batch's sums and counts, n and m the running ones (codebook.py).
    counts   n = decay n + beta c; and P^T F, P^T c at the points through which neighbors share (ops/ride.py)
    codes    m = decay m + beta S;   w = m / n + u;   m += n u; and dead codes say which place they ask (ops/ride.py)
    revive   of those that asked a place, the last in order comes there
A code that was not chosen in a batch has sums of 0, which are not read.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from topovq.grid import ROW_HEIGHT, Grid
from topovq.neighborhood import (
    ENOUGH,
    GAIN,
    LONGEST_WAIT,
    MOST_SPREAD,
    NEAR,
    PULL,
    PULL_SPAN,
    TRIES,
    WAIT,
    WAIT_VECTORS,
)
from topovq.ops.ride import LEAST_COUNT, axes_of, shares
from topovq.ops.triton.accumulate import cdiv, power_of_2
from topovq.ops.triton.replay import Work, replayed
from topovq.ops.triton.smooth import lattice
from topovq.ops.update import Batch, Rule, State
from topovq.ops.use import CHOSEN, NEVER

COUNTS = 1024  # codes per program of the first launch
FEW = 16_384  # codes up to which programs of the second launch are small, so that there are enough of them
SLOTS = 64  # places around a point that are read at a time: 8 x 8, of which a spacing of 4 cells needs no more
G, FEWEST, NONE = tl.constexpr(GAIN), tl.constexpr(ENOUGH), tl.constexpr(LEAST_COUNT)
PULL_SHARE, SPAN = tl.constexpr(PULL / GAIN), tl.constexpr(PULL_SPAN)
SHORT, LONG, VECTORS = tl.constexpr(WAIT), tl.constexpr(LONGEST_WAIT), tl.constexpr(WAIT_VECTORS)
CLOSE, MOST, PITCH = tl.constexpr(NEAR), tl.constexpr(MOST_SPREAD), tl.constexpr(ROW_HEIGHT)
ATTEMPTS = tl.constexpr(TRIES)
IS_CHOSEN, NOT_YET = tl.constexpr(CHOSEN), tl.constexpr(NEVER)


@triton.jit
def _pull_at(step_ptr, beta):
    """ops/ride.py: the pull to the neighbors."""
    t = tl.load(step_ptr).to(tl.float64)
    return tl.minimum(1 / tl.sqrt(1 + t / SPAN) * PULL_SHARE * beta, 1.0).to(tl.float32)


@triton.jit
def _around(place, n, WRAP: tl.constexpr):
    if WRAP:
        place = (place % n + n) % n
    return place


@triton.jit
def _gather_point(
    program, batch_ptr, raw_ptr, codes_ptr, places_ptr, parts_ptr, points_ptr, points_counts_ptr, kept, D, many, blocks,
    BLOCK_D: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """P^T F and P^T c at one point, of some dimensions; few of the codes around it have a count."""
    point = program // blocks
    dim = program % blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    sums = tl.zeros([BLOCK_D], tl.float32)
    counts = tl.zeros([SLOTS], tl.float32)
    for start in range(0, many, SLOTS):
        slot = start + tl.arange(0, SLOTS)
        code = tl.load(places_ptr + point * many + slot, slot < many, 0)
        share = tl.load(parts_ptr + point * many + slot, slot < many, 0.0)
        count = tl.load(raw_ptr + code, share > 0, 0.0)
        here = code.to(tl.int64)[:, None] * D + dim[None, :]
        inside = (count > 0)[:, None] & (dim < D)[None, :]
        moved = tl.load(batch_ptr + here, inside, 0.0) - kept * count[:, None] * tl.load(codes_ptr + here, inside, 0.0)
        sums += tl.sum(share[:, None] * moved, 0)
        counts += share * count
    tl.store(points_ptr + point.to(tl.int64) * D + dim, sums, dim < D)
    tl.store(points_counts_ptr + point, tl.sum(counts, 0))


@triton.jit
def _counts_kernel(
    batch_ptr, raw_ptr, codes_ptr, counts_ptr, frozen_ptr, fresh_ptr, heard_ptr, total_ptr, live_ptr, step_ptr, now_ptr,
    places_ptr, parts_ptr, points_ptr, points_counts_ptr, K, D, programs, many, blocks, decay, beta,
    UPDATE_EMPTY: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    pull = _pull_at(step_ptr, beta)
    if program >= programs:
        _gather_point(
            program - programs, batch_ptr, raw_ptr, codes_ptr, places_ptr, parts_ptr, points_ptr, points_counts_ptr,
            1 - pull, D, many, blocks, BLOCK_D, SLOTS,
        )  # fmt: skip
    else:
        code = program * BLOCK + tl.arange(0, BLOCK)
        raw = tl.load(raw_ptr + code, code < K, 0.0)
        before = tl.load(counts_ptr + code, code < K, 0.0)
        counts = tl.where(tl.load(frozen_ptr + code, code < K, 1) == 0, decay * before + beta * raw, before)
        if not UPDATE_EMPTY:
            counts = tl.where(raw > 0, counts, before)
        tl.store(fresh_ptr + code, counts, code < K)
        tl.store(heard_ptr + code, tl.full([BLOCK], -1, tl.int32), code < K)
        tl.store(total_ptr + program, tl.sum(tl.where(code < K, counts, 0.0), 0))
        tl.store(live_ptr + program, tl.sum(raw, 0))
        if program == 0:  # for the next launch, which moves the step
            tl.store(now_ptr, pull.to(tl.float64))
            tl.store(now_ptr + 1, tl.load(step_ptr).to(tl.float64))


@triton.jit
def _mixed(bits):
    """ops/ride.py: a hash of 32 bits."""
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def _uniform(code, step, draw):
    bits = _mixed(code.to(tl.uint32) ^ _mixed((step * 4 * ATTEMPTS + draw).to(tl.uint32)))
    return ((bits >> 8).to(tl.float32) + 0.5) * (1.0 / 16777216)


@triton.jit
def _direction(code, step, draw, n):
    return tl.where(n > 1, 2 * _uniform(code, step, draw) - 1, 0.0)


@triton.jit
def _asked(
    code, step, attempt, K, n0, n1, n2, AXES: tl.constexpr,
    WRAP0: tl.constexpr, WRAP1: tl.constexpr, WRAP2: tl.constexpr, HEXAGONAL: tl.constexpr,
):  # fmt: skip
    """The place that each code asks, -1 where there is none; grids have three axes here, the last AXES of them real."""
    c0, c1, c2 = code // (n1 * n2), (code // n2) % n1, code % n2
    first = 4 * attempt
    near = _uniform(code, step, first)
    d0 = tl.zeros_like(near)
    d1 = d0
    if AXES > 2:
        d0 = _direction(code, step, first + AXES - 2, n0)
    if AXES > 1:
        d1 = _direction(code, step, first + AXES - 1, n1)
    d2 = _direction(code, step, first + AXES, n2)
    length = tl.maximum(tl.sqrt(d0 * d0 + d1 * d1 + d2 * d2), 1e-12)
    far = (tl.zeros_like(length) + CLOSE) / tl.sqrt(near) / length
    m0, m1, m2 = (far * d0).to(tl.float64), (far * d1).to(tl.float64), (far * d2).to(tl.float64)
    a0 = c0 + tl.floor(m0 + 0.5).to(tl.int32)
    if HEXAGONAL:
        a1 = tl.floor((c1 * PITCH + m1) / PITCH + 0.5).to(tl.int32)
        a2 = tl.floor(c2 + 0.5 * (c1 & 1) + m2 - 0.5 * (a1 & 1) + 0.5).to(tl.int32)
    else:
        a1 = c1 + tl.floor(m1 + 0.5).to(tl.int32)
        a2 = c2 + tl.floor(m2 + 0.5).to(tl.int32)
    a0, a1, a2 = _around(a0, n0, WRAP0), _around(a1, n1, WRAP1), _around(a2, n2, WRAP2)
    on = (a0 >= 0) & (a0 < n0) & (a1 >= 0) & (a1 < n1) & (a2 >= 0) & (a2 < n2)
    place = (a0 * n1 + a1) * n2 + a2
    return tl.where(on & (place < K), place, -1)


@triton.jit
def _codes_kernel(
    batch_ptr, raw_ptr, points_ptr, points_counts_ptr, corners_ptr, shares_ptr, fresh_ptr, total_ptr, live_ptr, now_ptr,
    asked_ptr, heard_ptr, codes_ptr, sums_ptr, counts_ptr, hits_ptr, idle_ptr, frozen_ptr, step_ptr,
    skipped_ptr, new_skipped_ptr, K, D, programs, n0, n1, n2, decay, beta,
    UPDATE_EMPTY: tl.constexpr, COSINE: tl.constexpr, REVIVE: tl.constexpr, AXES: tl.constexpr, CORNERS: tl.constexpr,
    WRAP0: tl.constexpr, WRAP1: tl.constexpr, WRAP2: tl.constexpr, HEXAGONAL: tl.constexpr,
    BLOCK_K: tl.constexpr, DP: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    code = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    dim = tl.arange(0, DP)
    inside = (code < K)[:, None] & (dim[None, :] < D)
    here = code[:, None].to(tl.int64) * D + dim[None, :]
    pull = tl.load(now_ptr).to(tl.float32)
    raw = tl.load(raw_ptr + code, code < K, 0.0)
    counts = tl.load(fresh_ptr + code, code < K, 0.0)
    codes = tl.load(codes_ptr + here, inside, 0.0)
    before = tl.load(sums_ptr + here, inside, 0.0)
    around = tl.zeros([BLOCK_K, DP], tl.float32)
    weight = tl.zeros([BLOCK_K], tl.float32)
    for corner in tl.static_range(CORNERS):
        point = tl.load(corners_ptr + corner * K + code, code < K, 0)
        share = tl.load(shares_ptr + corner * K + code, code < K, 0.0)
        weight += share * tl.load(points_counts_ptr + point)
        there = point.to(tl.int64)[:, None] * D + dim[None, :]
        around += share[:, None] * tl.load(points_ptr + there, inside, 0.0)
    part = tl.arange(0, PROGRAMS)
    vectors = tl.sum(tl.load(live_ptr + part, part < programs, 0.0), 0)
    live = (code < K) & (vectors + tl.zeros([BLOCK_K], tl.float32) > 0)
    moves = live & (tl.load(frozen_ptr + code, code < K, 1) == 0)
    along = (around - pull * weight[:, None] * codes) / tl.maximum(weight, FEWEST)[:, None] * G
    along = tl.where((weight > 0)[:, None], along, 0.0)
    batch = tl.load(batch_ptr + here, inside & (raw > 0)[:, None], 0.0)
    sums = decay * before + beta * batch
    if not UPDATE_EMPTY:
        sums = tl.where((raw > 0)[:, None], sums, before)
    own = counts > NONE
    codes = tl.where(own[:, None], sums / tl.where(own, counts, 1.0)[:, None], codes) + along
    if COSINE:
        codes = codes / tl.maximum(tl.sqrt(tl.sum(tl.where(inside, codes * codes, 0.0), 1)), 1e-12)[:, None]
    tl.store(sums_ptr + here, sums + counts[:, None] * along, inside & moves[:, None])
    tl.store(codes_ptr + here, codes, inside & moves[:, None])
    tl.store(counts_ptr + code, counts, moves)
    hits = decay * tl.load(hits_ptr + code, code < K, 0.0) + beta * raw
    tl.store(hits_ptr + code, hits, live)
    idle = tl.where(raw >= IS_CHOSEN, 0, tl.load(idle_ptr + code, code < K, 0) + 1)
    tl.store(idle_ptr + code, idle, live)
    if REVIVE:
        waited = tl.where(idle >= NOT_YET, idle - NOT_YET, idle)
        wait = tl.minimum(tl.maximum(K / tl.maximum(vectors, 1e-6) * VECTORS, SHORT), LONG)
        asks = moves & (waited.to(tl.float32) > wait)
        place = tl.full([BLOCK_K], -1, tl.int32)
        if tl.max(asks.to(tl.int32), 0) > 0:
            total = tl.sum(tl.load(total_ptr + part, part < programs, 0.0), 0)
            step = tl.load(now_ptr + 1).to(tl.int64)
            for attempt in range(ATTEMPTS):
                other = _asked(code, step, attempt, K, n0, n1, n2, AXES, WRAP0, WRAP1, WRAP2, HEXAGONAL)
                hears = asks & (place < 0) & (other >= 0)
                hears = hears & (tl.load(raw_ptr + other, hears, 0.0) >= IS_CHOSEN)
                hears = hears & (tl.load(fresh_ptr + other, hears, 0.0) > total / K)
                place = tl.where(hears, other, place)
            tl.atomic_max(heard_ptr + place, code, place >= 0, sem="relaxed")
        tl.store(asked_ptr + code, place, code < K)
    if tl.program_id(0) == 0:
        tl.store(step_ptr, tl.load(step_ptr) + tl.where(vectors > 0, 1, 0))
        tl.store(skipped_ptr, tl.load(skipped_ptr) + tl.load(new_skipped_ptr))


@triton.jit
def _revive_kernel(
    batch_ptr, raw_ptr, fresh_ptr, asked_ptr, heard_ptr, codes_ptr, sums_ptr, counts_ptr, idle_ptr, frozen_ptr, K, D,
    COSINE: tl.constexpr, BLOCK_K: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    code = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    place = tl.load(asked_ptr + code, code < K, -1)
    revived = place >= 0
    revived = revived & (tl.load(heard_ptr + place, revived, -1) == code)
    gives = (tl.load(heard_ptr + code, code < K, -1) >= 0) & (tl.load(frozen_ptr + code, code < K, 1) == 0)
    if tl.max((revived | gives).to(tl.int32), 0) > 0:
        dim = tl.arange(0, DP)
        inside = dim[None, :] < D
        here = code[:, None].to(tl.int64) * D + dim[None, :]
        there = place[:, None].to(tl.int64) * D + dim[None, :]
        counts = 0.5 * tl.where(
            revived, tl.load(fresh_ptr + place, revived, 0.0), tl.load(fresh_ptr + code, gives, 0.0)
        )
        chosen = tl.load(raw_ptr + place, revived, 1.0)
        near = tl.load(codes_ptr + there, inside & revived[:, None], 0.0)
        mean = tl.load(batch_ptr + there, inside & revived[:, None], 0.0) / chosen[:, None]
        new = near + tl.sqrt(tl.minimum(tl.maximum(chosen, 1.0), MOST))[:, None] * (mean - near)
        if COSINE:
            new = new / tl.maximum(tl.sqrt(tl.sum(tl.where(inside, new * new, 0.0), 1)), 1e-12)[:, None]
        half = 0.5 * tl.load(sums_ptr + here, inside & gives[:, None], 0.0)
        sums = tl.where(revived[:, None], new * counts[:, None], half)
        tl.store(codes_ptr + here, new, inside & revived[:, None])
        tl.store(sums_ptr + here, sums, inside & (revived | gives)[:, None])
        tl.store(counts_ptr + code, counts, revived | gives)
        tl.store(idle_ptr + code, tl.full([BLOCK_K], NOT_YET, tl.int32), revived)


class Points(NamedTuple):
    """P on a device: the points around each code, and the codes around each point (or a share of 0)."""

    corners: Tensor  # int32 [C, K], the points around each code
    shares: Tensor  # float32 [C, K], what each has in them
    places: Tensor  # int32 [points, M], the codes around each point
    parts: Tensor  # float32 [points, M]


@lru_cache(maxsize=16)
def _points(grid: Grid, device: torch.device) -> Points:
    corners_CK, shares_CK = (part.to(device) for part in shares(grid))
    entry = shares_CK.flatten().nonzero()[:, 0]
    entry = entry[corners_CK.flatten()[entry].argsort(stable=True)]
    point = corners_CK.flatten()[entry]
    number = torch.bincount(point, minlength=math.prod(axis.points for axis in axes_of(grid)))
    many = int(number.max())
    slot = torch.arange(len(entry), device=device) - (number.cumsum(0) - number)[point]
    places = torch.zeros(len(number), many, dtype=torch.int32, device=device)
    parts = torch.zeros(len(number), many, device=device)
    places[point, slot] = (entry % grid.size).int()
    parts[point, slot] = shares_CK.flatten()[entry].float()
    return Points(corners_CK.int(), shares_CK.float(), places, parts)


def ride_triton(state: State, batch: Batch, grid: Grid, rule: Rule) -> None:
    """Move the state in place (float32, contiguous; grids of up to 3 axes)."""
    replayed(("ride", state.codes_KD.shape, grid, rule), (*state, *batch), _ride, grid, rule)


def _ride(work: Work, *given: Any) -> tuple[()]:
    state, batch, (grid, rule) = State(*given[:8]), Batch(*given[8:11]), given[11:]
    of_batch = batch.sums_KD, batch.counts_K
    codes_KD, sums_KD, counts_K, hits_K, idle_K, step, skipped, frozen_K = state
    k, d = codes_KD.shape
    device, beta = codes_KD.device, 1 - rule.decay
    table = Points(*map(work.constant, _points(grid, device)))
    number, many = table.places.shape
    sizes, how = lattice(grid)
    programs, padded = cdiv(k, COUNTS), power_of_2(d)
    total, live = (work.empty(programs, dtype=torch.float32, device=device) for _ in range(2))
    now = work.empty(2, dtype=torch.float64, device=device)  # the pull, and the step
    fresh_K = work.empty(k, dtype=torch.float32, device=device)
    asked_K, heard_K = (work.empty(k, dtype=torch.int32, device=device) for _ in range(2))
    points_PD = work.empty(number, d, dtype=torch.float32, device=device)
    points_P = work.empty(number, dtype=torch.float32, device=device)
    block, block_d = max(1, (512 if k <= FEW else 2048) // padded), min(64, padded)
    blocks = cdiv(d, block_d)
    work.launch(
        _counts_kernel, (programs + number * blocks,),
        *of_batch, codes_KD, counts_K, frozen_K, fresh_K, heard_K, total, live, step, now,
        table.places, table.parts, points_PD, points_P, k, d, programs, many, blocks, rule.decay, beta,
        UPDATE_EMPTY=rule.update_empty, BLOCK=COUNTS, BLOCK_D=block_d, SLOTS=min(SLOTS, power_of_2(many)),
    )  # fmt: skip
    work.launch(
        _codes_kernel, (cdiv(k, block),),
        *of_batch, points_PD, points_P, table.corners, table.shares, fresh_K, total, live, now, asked_K, heard_K,
        codes_KD, sums_KD, counts_K, hits_K, idle_K, frozen_K, step,
        skipped, batch.skipped, k, d, programs, *sizes, rule.decay, beta,
        UPDATE_EMPTY=rule.update_empty, COSINE=rule.cosine, REVIVE=rule.revive, AXES=grid.ndim,
        CORNERS=len(table.corners), BLOCK_K=block, DP=padded, PROGRAMS=power_of_2(programs), **how,
    )  # fmt: skip
    if rule.revive:
        block = max(1, 4096 // padded)
        work.launch(
            _revive_kernel, (cdiv(k, block),),
            *of_batch, fresh_K, asked_K, heard_K, codes_KD, sums_KD, counts_K, idle_K, frozen_K, k, d,
            COSINE=rule.cosine, BLOCK_K=block, DP=padded,
        )  # fmt: skip
    return ()
