"""The rule "ride" on CUDA: beside the smoothing (triton/smooth.py) three launches, the last of them for dead codes.

Legend: K codes w, D dimensions; S, c the batch's sums and counts, n and m the running ones (codebook.py).
    counts   n = decay n + beta c
    codes    m = decay m + beta S;   w = m / n + u;   m += n u; and dead codes say which place they ask (ops/ride.py)
    revive   of those that asked a place, the last in order comes there
A code that was not chosen in a batch has sums of 0, which are not read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from topovq.grid import ROW_HEIGHT
from topovq.neighborhood import GAIN, LEAST_WEIGHT, LONGEST_WAIT, MOST_SPREAD, NEAR, WAIT, WAIT_VECTORS, Neighborhood
from topovq.ops.ride import LEAST_COUNT, residuals
from topovq.ops.smooth import method, smooth
from topovq.ops.triton.accumulate import cdiv, on_device, power_of_2
from topovq.ops.triton.smooth import gaussian_triton, lattice, pull_at
from topovq.ops.update import Batch, Rule, State
from topovq.ops.use import CHOSEN, NEVER

COUNTS = 1024  # codes per program of the first launch
G, LEAST, NONE = tl.constexpr(GAIN), tl.constexpr(LEAST_WEIGHT), tl.constexpr(LEAST_COUNT)
SHORT, LONG, VECTORS = tl.constexpr(WAIT), tl.constexpr(LONGEST_WAIT), tl.constexpr(WAIT_VECTORS)
CLOSE, MOST, PITCH = tl.constexpr(NEAR), tl.constexpr(MOST_SPREAD), tl.constexpr(ROW_HEIGHT)
IS_CHOSEN, NOT_YET = tl.constexpr(CHOSEN), tl.constexpr(NEVER)


@triton.jit
def _counts_kernel(
    raw_ptr, counts_ptr, frozen_ptr, fresh_ptr, heard_ptr, total_ptr, live_ptr, step_ptr, now_ptr, K, decay, beta,
    UPDATE_EMPTY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    code = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    raw = tl.load(raw_ptr + code, code < K, 0.0)
    before = tl.load(counts_ptr + code, code < K, 0.0)
    counts = tl.where(tl.load(frozen_ptr + code, code < K, 1) == 0, decay * before + beta * raw, before)
    if not UPDATE_EMPTY:
        counts = tl.where(raw > 0, counts, before)
    tl.store(fresh_ptr + code, counts, code < K)
    tl.store(heard_ptr + code, tl.full([BLOCK], -1, tl.int32), code < K)
    tl.store(total_ptr + tl.program_id(0), tl.sum(tl.where(code < K, counts, 0.0), 0))
    tl.store(live_ptr + tl.program_id(0), tl.sum(raw, 0))
    if tl.program_id(0) == 0:  # for the next launch, which moves the step
        tl.store(now_ptr, pull_at(step_ptr, beta).to(tl.float64))
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
def _around(place, n, WRAP: tl.constexpr):
    if WRAP:
        place = (place % n + n) % n
    return place


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
def _codes_kernel(
    batch_ptr, raw_ptr, around_ptr, weight_ptr, fresh_ptr, total_ptr, live_ptr, now_ptr, asked_ptr, heard_ptr,
    codes_ptr, sums_ptr, counts_ptr, hits_ptr, idle_ptr, frozen_ptr, step_ptr,
    K, D, programs, n0, n1, n2, decay, beta,
    UPDATE_EMPTY: tl.constexpr, COSINE: tl.constexpr, REVIVE: tl.constexpr, AXES: tl.constexpr,
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
    weight = tl.load(weight_ptr + code, code < K, 0.0)
    rides = weight > LEAST
    codes = tl.load(codes_ptr + here, inside, 0.0)
    around = tl.load(around_ptr + here, inside & rides[:, None], 0.0)
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


def ride_triton(state: State, batch: Batch, neighborhood: Neighborhood, rule: Rule) -> None:
    """Move the state in place (float32, contiguous; grids of up to 3 axes)."""
    codes_KD, sums_KD, counts_K, hits_K, idle_K, step, frozen_K = state
    k, d = codes_KD.shape
    device, grid, beta = codes_KD.device, neighborhood.grid, 1 - rule.decay
    around_KD, weight_K = _smoothed(state, batch, neighborhood, beta)
    sizes, how = lattice(grid)
    programs, padded = cdiv(k, COUNTS), power_of_2(d)
    total, live = (torch.empty(programs, dtype=torch.float32, device=device) for _ in range(2))
    now = torch.empty(2, device=device, dtype=torch.float64)  # the pull, and the step
    fresh_K = torch.empty_like(counts_K)
    asked_K, heard_K = (torch.empty_like(idle_K) for _ in range(2))
    block = max(1, 2048 // padded)
    with on_device(codes_KD):
        _counts_kernel[(programs,)](
            batch.counts_K, counts_K, frozen_K, fresh_K, heard_K, total, live, step, now, k, rule.decay, beta,
            UPDATE_EMPTY=rule.update_empty, BLOCK=COUNTS,
        )  # fmt: skip
        _codes_kernel[(cdiv(k, block),)](
            batch.sums_KD, batch.counts_K, around_KD, weight_K, fresh_K, total, live, now, asked_K, heard_K,
            codes_KD, sums_KD, counts_K, hits_K, idle_K, frozen_K, step, k, d, programs, *sizes, rule.decay, beta,
            UPDATE_EMPTY=rule.update_empty, COSINE=rule.cosine, REVIVE=rule.revive, AXES=grid.ndim,
            BLOCK_K=block, DP=padded, PROGRAMS=power_of_2(programs), **how,
        )  # fmt: skip
        if rule.revive:
            block = max(1, 4096 // padded)
            _revive_kernel[(cdiv(k, block),)](
                batch.sums_KD, batch.counts_K, fresh_K, asked_K, heard_K, codes_KD, sums_KD, counts_K, idle_K, frozen_K,
                k, d, COSINE=rule.cosine, BLOCK_K=block, DP=padded,
            )  # fmt: skip


def _smoothed(state: State, batch: Batch, neighborhood: Neighborhood, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A^T F and A^T c."""
    grid = neighborhood.grid
    if method(neighborhood) == "separable" and grid.topology == "rectangular" and grid.places > 1:
        return gaussian_triton(*batch, neighborhood, state.step, riding=(state.codes_KD, beta))
    moved_KD = residuals(state.codes_KD, *batch, state.step, 1 - beta)
    around_KD, weight_K = smooth(moved_KD, batch.counts_K, neighborhood, state.step)
    return around_KD.contiguous(), weight_K.contiguous()
