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

import torch
import triton
import triton.language as tl
from torch import Tensor

from topovq.grid import ROW_HEIGHT, Grid
from topovq.neighborhood import (
    GAIN,
    LEAST_WEIGHT,
    LONGEST_WAIT,
    MOST_SPREAD,
    NEAR,
    PULL,
    PULL_SPAN,
    WAIT,
    WAIT_VECTORS,
)
from topovq.ops.ride import LEAST_COUNT, axes_of
from topovq.ops.triton.accumulate import cdiv, on_device, power_of_2
from topovq.ops.triton.smooth import lattice
from topovq.ops.update import Batch, Rule, State
from topovq.ops.use import CHOSEN, NEVER

COUNTS = 1024  # codes per program of the first launch
SLOTS = 64  # places around a point that are read at a time: 8 x 8, of which a spacing of 4 cells needs no more
G, LEAST, NONE = tl.constexpr(GAIN), tl.constexpr(LEAST_WEIGHT), tl.constexpr(LEAST_COUNT)
PULL_SHARE, SPAN = tl.constexpr(PULL / GAIN), tl.constexpr(PULL_SPAN)
SHORT, LONG, VECTORS = tl.constexpr(WAIT), tl.constexpr(LONGEST_WAIT), tl.constexpr(WAIT_VECTORS)
CLOSE, MOST, PITCH = tl.constexpr(NEAR), tl.constexpr(MOST_SPREAD), tl.constexpr(ROW_HEIGHT)
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
def _window(point, axis_ptr, pitch, shift, ALL: tl.constexpr):
    """(the point's position, the spacing, the first place with a share in it) along an axis."""
    first, spacing = tl.load(axis_ptr), tl.load(axis_ptr + 1)
    at = first + point * spacing
    begin = tl.floor((at - spacing - shift) / pitch).to(tl.int32) + 1
    if ALL:
        begin = begin * 0
    return at, spacing, begin


@triton.jit
def _share(position, at, spacing, ALL: tl.constexpr):
    share = tl.maximum(1 - tl.abs(position - at) / spacing, 0.0)
    if ALL:
        share = share * 0 + 1
    return share


@triton.jit
def _gather_point(
    program, batch_ptr, raw_ptr, codes_ptr, points_ptr, points_counts_ptr, axes_ptr, kept, K, D, n0, n1, n2,
    p1, p2, width0, width1, width2, parts,
    ALL0: tl.constexpr, ALL1: tl.constexpr, ALL2: tl.constexpr,
    WRAP0: tl.constexpr, WRAP1: tl.constexpr, WRAP2: tl.constexpr, HEXAGONAL: tl.constexpr,
    BLOCK_D: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """P^T F and P^T c at one point, of some dimensions; few of the codes around it have a count."""
    point = program // parts
    dim = program % parts * BLOCK_D + tl.arange(0, BLOCK_D)
    pitch: tl.constexpr = PITCH if HEXAGONAL else 1.0
    shift: tl.constexpr = 0.5 if HEXAGONAL else 0.0
    at0, spacing0, begin0 = _window(point // (p1 * p2), axes_ptr, 1.0, 0.0, ALL0)
    at1, spacing1, begin1 = _window(point // p2 % p1, axes_ptr + 2, pitch, 0.0, ALL1)
    at2, spacing2, begin2 = _window(point % p2, axes_ptr + 4, 1.0, shift, ALL2)
    sums = tl.zeros([BLOCK_D], tl.float32)
    counts = tl.zeros([SLOTS], tl.float32)
    for start in range(0, width0 * width1 * width2, SLOTS):
        slot = start + tl.arange(0, SLOTS)
        c0 = begin0 + slot // (width1 * width2)
        c1 = begin1 + slot // width2 % width1
        c2 = begin2 + slot % width2
        x2 = c2.to(tl.float64)
        if HEXAGONAL:
            x2 += 0.5 * (c1 & 1)
        share = _share(c0.to(tl.float64), at0, spacing0, ALL0)
        share *= _share(c1.to(tl.float64) * pitch, at1, spacing1, ALL1)
        share *= _share(x2, at2, spacing2, ALL2)
        c0, c1, c2 = _around(c0, n0, WRAP0), _around(c1, n1, WRAP1), _around(c2, n2, WRAP2)
        on = (c0 >= 0) & (c0 < n0) & (c1 >= 0) & (c1 < n1) & (c2 >= 0) & (c2 < n2)
        code = (c0 * n1 + c1) * n2 + c2
        on = on & (code < K) & (slot < width0 * width1 * width2) & (share > 0)
        count = tl.load(raw_ptr + code, on, 0.0)
        here = code.to(tl.int64)[:, None] * D + dim[None, :]
        inside = (count > 0)[:, None] & (dim < D)[None, :]
        moved = tl.load(batch_ptr + here, inside, 0.0) - kept * count[:, None] * tl.load(codes_ptr + here, inside, 0.0)
        part = share.to(tl.float32)
        sums += tl.sum(part[:, None] * moved, 0)
        counts += part * count
    tl.store(points_ptr + point.to(tl.int64) * D + dim, sums, dim < D)
    tl.store(points_counts_ptr + point, tl.sum(counts, 0))


@triton.jit
def _counts_kernel(
    batch_ptr, raw_ptr, codes_ptr, counts_ptr, frozen_ptr, fresh_ptr, heard_ptr, total_ptr, live_ptr, step_ptr, now_ptr,
    points_ptr, points_counts_ptr, axes_ptr,
    K, D, programs, n0, n1, n2, p1, p2, width0, width1, width2, parts, decay, beta,
    UPDATE_EMPTY: tl.constexpr, ALL0: tl.constexpr, ALL1: tl.constexpr, ALL2: tl.constexpr,
    WRAP0: tl.constexpr, WRAP1: tl.constexpr, WRAP2: tl.constexpr, HEXAGONAL: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    pull = _pull_at(step_ptr, beta)
    if program >= programs:
        _gather_point(
            program - programs, batch_ptr, raw_ptr, codes_ptr, points_ptr, points_counts_ptr, axes_ptr, 1 - pull, K, D,
            n0, n1, n2, p1, p2, width0, width1, width2, parts, ALL0, ALL1, ALL2, WRAP0, WRAP1, WRAP2, HEXAGONAL,
            BLOCK_D, SLOTS,
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
    bits = _mixed(code.to(tl.uint32) ^ _mixed((step * 8 + draw).to(tl.uint32)))
    return ((bits >> 8).to(tl.float32) + 0.5) * (1.0 / 16777216)


@triton.jit
def _direction(code, step, draw, n):
    return tl.where(n > 1, 2 * _uniform(code, step, draw) - 1, 0.0)


@triton.jit
def _asked(
    code, step, K, n0, n1, n2, AXES: tl.constexpr,
    WRAP0: tl.constexpr, WRAP1: tl.constexpr, WRAP2: tl.constexpr, HEXAGONAL: tl.constexpr,
):  # fmt: skip
    """The place that each code asks, -1 where there is none; grids have three axes here, the last AXES of them real."""
    c0, c1, c2 = code // (n1 * n2), (code // n2) % n1, code % n2
    d0 = tl.zeros_like(_uniform(code, step, 0))
    d1 = d0
    if AXES > 2:
        d0 = _direction(code, step, AXES - 2, n0)
    if AXES > 1:
        d1 = _direction(code, step, AXES - 1, n1)
    d2 = _direction(code, step, AXES, n2)
    length = tl.maximum(tl.sqrt(d0 * d0 + d1 * d1 + d2 * d2), 1e-12)
    far = (tl.zeros_like(length) + CLOSE) / _uniform(code, step, 0) / length
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
def _cell(position, axis_ptr, points, WRAP: tl.constexpr, ALL: tl.constexpr):
    """(the point before a position, how far it is ahead of that, in spacings) along an axis."""
    along = (position - tl.load(axis_ptr)) / tl.load(axis_ptr + 1)
    before = tl.floor(along).to(tl.int32)
    if not WRAP:
        before = tl.minimum(before, points - 2)
    ahead = along - before
    if ALL:
        before, ahead = before * 0, ahead * 0
    return before, ahead


@triton.jit
def _end(before, ahead, points, LATER: tl.constexpr):
    """(point, share in it) at an end of the cell."""
    if LATER:
        point, share = (before + 1) % points, ahead
    else:
        point, share = before % points, 1 - ahead
    return point, share


@triton.jit
def _codes_kernel(
    batch_ptr, raw_ptr, points_ptr, points_counts_ptr, axes_ptr, fresh_ptr, total_ptr, live_ptr, now_ptr, asked_ptr,
    heard_ptr, codes_ptr, sums_ptr, counts_ptr, hits_ptr, idle_ptr, frozen_ptr, step_ptr,
    K, D, programs, n0, n1, n2, p0, p1, p2, decay, beta,
    UPDATE_EMPTY: tl.constexpr, COSINE: tl.constexpr, REVIVE: tl.constexpr, AXES: tl.constexpr,
    ALL0: tl.constexpr, ALL1: tl.constexpr, ALL2: tl.constexpr,
    WRAP0: tl.constexpr, WRAP1: tl.constexpr, WRAP2: tl.constexpr, HEXAGONAL: tl.constexpr,
    BLOCK_K: tl.constexpr, DP: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    part = tl.arange(0, PROGRAMS)
    vectors = tl.sum(tl.load(live_ptr + part, part < programs, 0.0), 0)
    code = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    live = (code < K) & (vectors + tl.zeros([BLOCK_K], tl.float32) > 0)
    moves = live & (tl.load(frozen_ptr + code, code < K, 1) == 0)
    dim = tl.arange(0, DP)
    inside = moves[:, None] & (dim[None, :] < D)
    here = code[:, None].to(tl.int64) * D + dim[None, :]
    pull = tl.load(now_ptr).to(tl.float32)
    raw = tl.load(raw_ptr + code, code < K, 0.0)
    counts = tl.load(fresh_ptr + code, code < K, 0.0)
    codes = tl.load(codes_ptr + here, inside, 0.0)
    x0, x1, x2 = (code // (n1 * n2)).to(tl.float64), (code // n2 % n1).to(tl.float64), (code % n2).to(tl.float64)
    if HEXAGONAL:
        x2 += 0.5 * (code // n2 % n1 & 1)
        x1 *= PITCH
    before0, ahead0 = _cell(x0, axes_ptr, p0, WRAP0, ALL0)
    before1, ahead1 = _cell(x1, axes_ptr + 2, p1, WRAP1, ALL1)
    before2, ahead2 = _cell(x2, axes_ptr + 4, p2, WRAP2, ALL2)
    around = tl.zeros([BLOCK_K, DP], tl.float32)
    weight = tl.zeros([BLOCK_K], tl.float32)
    for corner in tl.static_range(8):
        if (corner < 4 or not ALL0) and (corner // 2 % 2 == 0 or not ALL1) and (corner % 2 == 0 or not ALL2):
            q0, s0 = _end(before0, ahead0, p0, corner >= 4)
            q1, s1 = _end(before1, ahead1, p1, corner // 2 % 2 == 1)
            q2, s2 = _end(before2, ahead2, p2, corner % 2 == 1)
            point, share = (q0 * p1 + q1) * p2 + q2, (s0 * s1 * s2).to(tl.float32)
            weight += share * tl.load(points_counts_ptr + point, moves, 0.0)
            there = point.to(tl.int64)[:, None] * D + dim[None, :]
            around += share[:, None] * tl.load(points_ptr + there, inside, 0.0)
    rides = weight > LEAST
    along = tl.where(rides[:, None], (around / tl.where(rides, weight, 1.0)[:, None] - pull * codes) * G, 0.0)
    batch = tl.load(batch_ptr + here, inside & (raw > 0)[:, None], 0.0)
    before = tl.load(sums_ptr + here, inside, 0.0)
    sums = decay * before + beta * batch
    if not UPDATE_EMPTY:
        sums = tl.where((raw > 0)[:, None], sums, before)
    own = counts > NONE
    codes = tl.where(own[:, None], sums / tl.where(own, counts, 1.0)[:, None], codes) + along
    if COSINE:
        codes = codes / tl.maximum(tl.sqrt(tl.sum(tl.where(inside, codes * codes, 0.0), 1)), 1e-12)[:, None]
    tl.store(sums_ptr + here, sums + counts[:, None] * along, inside)
    tl.store(codes_ptr + here, codes, inside)
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
            place = _asked(code, step, K, n0, n1, n2, AXES, WRAP0, WRAP1, WRAP2, HEXAGONAL)
            asks = asks & (place >= 0)
            asks = asks & (tl.load(raw_ptr + place, asks, 0.0) >= IS_CHOSEN)
            asks = asks & (tl.load(fresh_ptr + place, asks, 0.0) > total / K)
            place = tl.where(asks, place, -1)
            tl.atomic_max(heard_ptr + place, code, asks, sem="relaxed")
        tl.store(asked_ptr + code, place, code < K)
    if tl.program_id(0) == 0:
        tl.store(step_ptr, tl.load(step_ptr) + tl.where(vectors > 0, 1, 0))


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


@lru_cache(maxsize=256)
def _points(grid: Grid, device: torch.device) -> tuple[Tensor, tuple[int, ...], tuple[int, ...]]:
    """(first point and spacing of each axis, float64 [6], on the device, made once; how many points each axis has; how
    many places can have a share in one), for three axes."""
    hexagonal = grid.topology == "hexagonal"
    axes = [(0.0, 1.0, 1)] * (3 - grid.ndim) + list(axes_of(grid))
    sizes = (1,) * (3 - grid.ndim) + grid.shape
    widths = []
    for number, ((_, spacing, points), n) in enumerate(zip(axes, sizes)):
        pitch = ROW_HEIGHT if hexagonal and number == 1 else 1.0
        reached = math.ceil(2 * spacing / pitch) + (hexagonal and number == 2)
        widths.append(n if points == 1 else reached)
    numbers = [number for first, spacing, _ in axes for number in (first, spacing)]
    table = torch.tensor(numbers, dtype=torch.float64, device=device)
    return table, tuple(points for _, _, points in axes), tuple(widths)


def ride_triton(state: State, batch: Batch, grid: Grid, rule: Rule) -> None:
    """Move the state in place (float32, contiguous; grids of up to 3 axes)."""
    codes_KD, sums_KD, counts_K, hits_K, idle_K, step, frozen_K = state
    k, d = codes_KD.shape
    device, beta = codes_KD.device, 1 - rule.decay
    axes, (p0, p1, p2), widths = _points(grid, device)
    sizes, how = lattice(grid)
    how |= {"ALL0": p0 == 1, "ALL1": p1 == 1, "ALL2": p2 == 1}
    programs, padded = cdiv(k, COUNTS), power_of_2(d)
    total, live = (torch.empty(programs, dtype=torch.float32, device=device) for _ in range(2))
    now = torch.empty(2, device=device, dtype=torch.float64)  # the pull, and the step
    fresh_K = torch.empty_like(counts_K)
    asked_K, heard_K = (torch.empty_like(idle_K) for _ in range(2))
    points_PD, points_P = sums_KD.new_empty(p0 * p1 * p2, d), counts_K.new_empty(p0 * p1 * p2)
    block, block_d = max(1, 2048 // padded), min(64, padded)
    parts = cdiv(d, block_d)
    with on_device(codes_KD):
        _counts_kernel[(programs + p0 * p1 * p2 * parts,)](
            *batch, codes_KD, counts_K, frozen_K, fresh_K, heard_K, total, live, step, now, points_PD, points_P, axes,
            k, d, programs, *sizes, p1, p2, *widths, parts, rule.decay, beta,
            UPDATE_EMPTY=rule.update_empty, BLOCK=COUNTS, BLOCK_D=block_d, SLOTS=SLOTS, **how,
        )  # fmt: skip
        _codes_kernel[(cdiv(k, block),)](
            *batch, points_PD, points_P, axes, fresh_K, total, live, now, asked_K, heard_K,
            codes_KD, sums_KD, counts_K, hits_K, idle_K, frozen_K, step,
            k, d, programs, *sizes, p0, p1, p2, rule.decay, beta,
            UPDATE_EMPTY=rule.update_empty, COSINE=rule.cosine, REVIVE=rule.revive, AXES=grid.ndim,
            BLOCK_K=block, DP=padded, PROGRAMS=power_of_2(programs), **how,
        )  # fmt: skip
        if rule.revive:
            block = max(1, 4096 // padded)
            _revive_kernel[(cdiv(k, block),)](
                *batch, fresh_K, asked_K, heard_K, codes_KD, sums_KD, counts_K, idle_K, frozen_K, k, d,
                COSINE=rule.cosine, BLOCK_K=block, DP=padded,
            )  # fmt: skip
