"""Smoothing on CUDA: the Gaussian over a rectangular grid, axis by axis, and any neighborhood over a small grid.

The Gaussian. Legend: an axis of n places. Sums and counts are [batches, n, columns] seen along it. A launch computes
out_i = sum_j exp(-(i - j)^2 / width^2) x_j over the places j within reach. A program has a tile of BLOCK_I places times
BLOCK_C columns and takes BLOCK_J sources at a time: their weights, which exist in registers alone, times their values.
Where the width is `wide`, a long axis has two launches: from places to points that are a good part of the width apart,
and from those to places. So the work does not grow with the width. A Gaussian is two narrower ones after each other:
sum_u exp(-(i-u)^2/a^2) exp(-(u-j)^2/a^2) is a constant times exp(-(i-j)^2/width^2) for a = width / sqrt(2), with a
relative error of 2 exp(-(pi RATIO / 2)^2) where the points u are width / RATIO apart. All long axes go to points before
any goes back to places, so that the second has only the points of the first to go through.
Float32 throughout; weights below CUTOFF are none (over points, some far below it are).

Any neighborhood. Legend: K codes, D dimensions. out_i = sum_j A_ij x_j; a program has BLOCK_I codes times BLOCK_D
dimensions and goes over all K codes, BLOCK_J at a time. The weights A_ij exist in registers alone, in float64.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from topovq.grid import ROW_HEIGHT, Grid
from topovq.neighborhood import CUTOFF, NARROWEST, Neighborhood, Schedule
from topovq.ops.triton.accumulate import cdiv, on_device, power_of_2
from topovq.ops.triton.replay import Work

NARROW, PITCH = tl.constexpr(NARROWEST), tl.constexpr(ROW_HEIGHT)
REACH = tl.constexpr(math.sqrt(-math.log(CUTOFF)))  # in widths
WIDE = tl.constexpr(6.0)  # the width from which on there are points between
LEAST_PLACES = 64  # of an axis that is long enough for that: the others are as if the width were not
RATIO = tl.constexpr(2.75)  # points within a width: the error is 2e-8
POINT_REACH = tl.constexpr(3.6)  # in widths: what points farther away would add is 1e-6 of a weight of 1e-6
CONSTANT = tl.constexpr(2 / math.sqrt(math.pi))  # of the sum over points, for points one width apart
BLOCK_J = 16  # sources at a time
DENSE_I, DENSE_J = 16, 32


class Tile(NamedTuple):
    block_i: int
    block_c: int


SMALL, LARGE = Tile(16, 32), Tile(32, 64)
PROGRAMS = 256  # of LARGE tiles, from which on they are used: with fewer, processors of the device would idle


# The neighborhood at a step


@triton.jit
def width_and_strength(step_ptr, schedule_ptr, KIND: tl.constexpr, SCHEDULE: tl.constexpr):
    """neighborhood.py: width and strength, float64; schedule_ptr is a `schedule_table`."""
    t = tl.load(step_ptr).to(tl.float64)
    width = tl.load(schedule_ptr + 1)
    strength = tl.full((), 1.0, tl.float64)
    if SCHEDULE == "harmonic":
        share = 1.0 / (1.0 + t * tl.load(schedule_ptr))
        if KIND == "hard":
            strength = share
        elif KIND == "gaussian":
            width = width * tl.sqrt(share)
        else:
            width = width * share
    else:
        progress = tl.minimum(t / tl.load(schedule_ptr + 3), 1.0)
        if SCHEDULE == "linear":
            width = width + (tl.load(schedule_ptr + 2) - width) * progress
        else:
            width = width * tl.exp(progress * tl.load(schedule_ptr + 4))
        width = tl.maximum(width, tl.full((), NARROW, tl.float64))
    return width, strength


@lru_cache(maxsize=256)
def schedule_table(schedule: Schedule, widest: float, device: torch.device) -> Tensor:
    """tau, widest, end, steps and log(end / widest), on the device, made once.

    In float64: arguments of a kernel are rounded to float32, in which a place at distance sqrt(2) is no longer within
    sqrt(2). Compiled into the kernels, each schedule would need kernels of its own.
    """
    end, steps = schedule.end or 0.0, schedule.steps or 1
    log_ratio = math.log(end / widest) if schedule.kind == "exponential" else 0.0
    return torch.tensor([schedule.tau or 0.0, widest, end, steps, log_ratio], dtype=torch.float64, device=device)


@triton.jit
def weight(distance, width, strength, KIND: tl.constexpr):
    """neighborhood.py: the weights at distances above 0, all float64."""
    if KIND == "hard":
        weights = tl.where(distance <= width + 1e-9, strength, 0.0)
    elif KIND == "gaussian":
        weights = tl.exp(-distance * distance / (width * width))
    else:
        weights = tl.exp(-distance / width)
    return weights


# The Gaussian


@triton.jit
def is_narrow(width):
    """Whether no place is within reach but the next ones."""
    return width * REACH < 2


@triton.jit
def _points(width, n, WRAP: tl.constexpr):
    """The first of an axis' points, their distance and their number, in places."""
    first = tl.full((), 0.0, tl.float64)
    if WRAP:
        number = (n * RATIO / width).to(tl.int32) + 1
        step = n / number.to(tl.float64)
    else:  # beyond both ends: a point halfway between two places counts, and those around it
        first -= 0.5 * REACH * width
        span = n - 1 - 2 * first
        number = (span * RATIO / width).to(tl.int32) + 2
        step = span / (number - 1).to(tl.float64)
    return first, step, number


@triton.jit
def _smooth_tile(
    in_ptr, out_ptr, program, tiles, lines, per_line, gap, step_in, step_out, sources, number, back, ahead, scale,
    factor, columns, batch_stride, place_stride, column_stride,
    WRAP: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """A tile of out_i = factor sum_j exp(-scale apart_ij^2) x_j over sources j with -back <= apart_ij <= ahead, where
    apart_ij = gap + step_in j - step_out i; in float64 but for what is left within a tile.

    Programs that read the same places follow each other: what one read is still in cache.
    """
    first = program % tiles * BLOCK_I
    column = program // tiles % tl.cdiv(columns, BLOCK_C) * BLOCK_C + tl.arange(0, BLOCK_C)
    batch = program // tiles // tl.cdiv(columns, BLOCK_C)
    if (first < number) & (batch // per_line < lines):
        there = batch.to(tl.int64) * batch_stride + column.to(tl.int64)[None, :] * column_stride
        reached = step_out * first - gap - back
        begin = tl.floor(reached / step_in).to(tl.int32)
        end = tl.floor((reached + back + ahead + step_out * (BLOCK_I - 1)) / step_in).to(tl.int32) + 1
        if not WRAP:
            begin, end = tl.maximum(begin, 0), tl.minimum(end, sources)
        row, other = tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_J)
        ahead_of = step_in.to(tl.float32) * other.to(tl.float32)
        within = ahead_of[None, :] - (step_out.to(tl.float32) * row.to(tl.float32))[:, None]
        total = tl.zeros([BLOCK_I, BLOCK_C], tl.float32)
        for start in range(begin, end, BLOCK_J):
            apart = (gap + step_in * start - step_out * first).to(tl.float32) + within
            near = (apart >= -back.to(tl.float32)) & (apart <= ahead.to(tl.float32))
            weights = tl.where(near, tl.exp(-apart * apart * scale), 0.0)
            source = start + other
            on = (source < end)[:, None] & (column < columns)[None, :]
            if WRAP:
                source = (source + sources) % sources
            values = tl.load(in_ptr + source.to(tl.int64)[:, None] * place_stride + there, on, 0.0)
            total += tl.dot(weights, values, input_precision="tf32x3")  # the error of float32
        place = first + row
        on = (place < number)[:, None] & (column < columns)[None, :]
        tl.store(out_ptr + place.to(tl.int64)[:, None] * place_stride + there, total * factor, on)


@triton.jit
def _axis_kernel(
    sums_ptr, counts_ptr, points_sums_ptr, points_counts_ptr, out_sums_ptr, out_counts_ptr, step_ptr, schedule_ptr,
    n, tiles, ring, lead, per_line, counts_programs, sums_columns, counts_columns,
    counts_batch_stride, counts_place_stride, counts_column_stride,
    SCHEDULE: tl.constexpr, WRAP: tl.constexpr, LEAD: tl.constexpr, LONG: tl.constexpr, TO_POINTS: tl.constexpr,
    BUT_NARROW: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """From places, or from a LONG axis' points where the width is wide, to places; or TO_POINTS, if it is wide."""
    width, _ = width_and_strength(step_ptr, schedule_ptr, "gaussian", SCHEDULE)
    wide = (width >= WIDE) & (2 * REACH * width <= ring - 1)  # `ring` is the shortest long axis that wraps
    lines = lead
    if LEAD != "whole" and wide:  # the first axis has its points, and no more
        _, _, lines = _points(width, lead, LEAD == "ring")
    if (TO_POINTS and not wide) or (BUT_NARROW and is_narrow(width)):
        lines = lines * 0
    # How far a place may be on either side: on a ring each one counts once, the short way round.
    reach = tl.minimum(width * REACH, n.to(tl.float64)).to(tl.int32)
    back, ahead = reach.to(tl.float64), reach.to(tl.float64)
    if WRAP:
        back, ahead = tl.minimum(reach, (n - 1) // 2).to(tl.float64), tl.minimum(reach, n // 2).to(tl.float64)
    scale, factor = (1.0 / (width * width)).to(tl.float32), tl.full((), 1.0, tl.float32)
    gap, step_in, step_out = width * 0, width * 0 + 1, width * 0 + 1
    sources, number = n, n
    if LONG and wide:
        start, step, points = _points(width, n, WRAP)
        back, ahead, scale = width * POINT_REACH, width * POINT_REACH, 2 * scale
        if TO_POINTS:
            gap, step_out, number = -start, step, points
        else:
            gap, step_in, sources = start, step, points
            factor = (step / width).to(tl.float32) * CONSTANT
            sums_ptr, counts_ptr = points_sums_ptr, points_counts_ptr
    program = tl.program_id(0)
    if program < counts_programs:  # first: along the last axis these read from all over the map, and take longest
        _smooth_tile(
            counts_ptr, out_counts_ptr, program, tiles, lines, per_line, gap, step_in, step_out, sources, number,
            back, ahead, scale, factor, counts_columns, counts_batch_stride, counts_place_stride, counts_column_stride,
            WRAP, BLOCK_I, BLOCK_C, BLOCK_J,
        )  # fmt: skip
    else:
        _smooth_tile(
            sums_ptr, out_sums_ptr, program - counts_programs, tiles, lines, per_line, gap, step_in, step_out, sources,
            number, back, ahead, scale, factor, sums_columns, n.to(tl.int64) * sums_columns, sums_columns, 1,
            WRAP, BLOCK_I, BLOCK_C, BLOCK_J,
        )  # fmt: skip


def gaussian_triton(
    sums_KD: Tensor,
    counts_K: Tensor,
    neighborhood: Neighborhood,
    step: Tensor,
    but_narrow: bool = False,
    work: Work | None = None,
) -> tuple[Tensor, Tensor]:
    """(A^T sums, A^T counts) of `gaussian` over a rectangular grid; float32, contiguous.

    A single place gets its own tensors back. With `but_narrow`, nothing is done where the width `is_narrow`, and what
    comes back means nothing there.
    """
    grid, work = neighborhood.grid, work or Work(())
    axes = [axis for axis, n in enumerate(grid.shape) if n > 1]
    long = [axis for axis in axes if grid.shape[axis] >= LEAST_PLACES and neighborhood.widest >= WIDE.value]
    given = (step, work.constant(schedule_table(neighborhood.schedule, neighborhood.widest, step.device)))
    how = {"SCHEDULE": neighborhood.schedule.kind, "BUT_NARROW": but_narrow}
    if grid.size < grid.places:  # an empty place is one more whose sums are 0
        empty = grid.places - grid.size
        sums_KD, counts_K = (
            torch.nn.functional.pad(sums_KD, (0, 0, 0, empty)),
            torch.nn.functional.pad(counts_K, (0, empty)),
        )
    places = points = (sums_KD, counts_K)
    with on_device(sums_KD):
        for axis in long:
            out = _like(work, sums_KD, counts_K)
            _launch(work, (*points, *points, *out, *given), grid, axis, long, TO_POINTS=True, **how)
            points = out
        for axis in (*reversed(long), *(axis for axis in axes if axis not in long)):
            out = _like(work, sums_KD, counts_K)
            _launch(work, (*places, *points, *out, *given), grid, axis, long, TO_POINTS=False, **how)
            places = points = out
    return places if grid.size == grid.places else (places[0][: grid.size], places[1][: grid.size])


def _like(work: Work, sums_KD: Tensor, counts_K: Tensor) -> tuple[Tensor, Tensor]:
    sums, counts = (work.empty(*each.shape, dtype=each.dtype, device=each.device) for each in (sums_KD, counts_K))
    return sums, counts


def _launch(
    work: Work, pointers: tuple[Tensor, ...], grid: Grid, axis: int, long: list[int], TO_POINTS: bool, **how: object
) -> None:
    n, d, first = grid.shape[axis], pointers[0].shape[1], grid.shape[0]
    before, after = math.prod(grid.shape[:axis]), math.prod(grid.shape[axis + 1 :])
    # While one long axis after the first is smoothed, the first one has values at its points alone.
    led = axis > 0 and axis in long and 0 in long
    lead, per_line = (first, before // first) if led else (before, 1)
    if led and TO_POINTS:
        before = most_points(first) * per_line
    # Along the last axis the counts of one line are a single column: the lines are the columns then.
    batches, columns, strides = (1, before, (0, 1, n)) if after == 1 else (before, after, (n * after, after, 1))
    block_i, block_c = tile(n, after * d, before)
    tiles = cdiv(most_points(n) if TO_POINTS else n, block_i)
    sums_programs, counts_programs = before * cdiv(after * d, block_c) * tiles, batches * cdiv(columns, block_c) * tiles
    ring = min([grid.shape[i] for i in long if grid.wrap[i]], default=2**31 - 1)
    work.launch(
        _axis_kernel, (sums_programs + counts_programs,),
        *pointers, n, tiles, ring, lead, per_line, counts_programs, after * d, columns, *strides,
        WRAP=grid.wrap[axis], LEAD=("ring" if grid.wrap[0] else "open") if led else "whole", LONG=axis in long,
        TO_POINTS=TO_POINTS, BLOCK_I=block_i, BLOCK_C=block_c, BLOCK_J=BLOCK_J, **how,
    )  # fmt: skip


def most_points(n: int) -> int:
    """How many points there are at the most, which is where the width is just wide."""
    return int((n - 1) * RATIO.value / WIDE.value + REACH.value * RATIO.value) + 2


def tile(n: int, columns: int, batches: int) -> Tile:
    """The tile for sums of this shape along an axis."""
    large = batches * cdiv(n, LARGE.block_i) * cdiv(columns, LARGE.block_c)
    return LARGE if n > SMALL.block_i and large >= PROGRAMS else SMALL


# Any neighborhood


@triton.jit
def _apart(a, b, n, WRAP: tl.constexpr):
    """How far coordinates a are from b along an axis of n places."""
    apart = tl.abs(a[:, None] - b[None, :])
    if WRAP:
        apart = tl.minimum(apart, n - apart)
    return apart


@triton.jit
def _distance(
    i, j, n0, n1, n2,
    WRAP0: tl.constexpr, WRAP1: tl.constexpr, WRAP2: tl.constexpr, HEXAGONAL: tl.constexpr,
):  # fmt: skip
    """Distances on the map, float64; grids have three axes here, the first of them 1."""
    rows = _apart((i // n2) % n1, (j // n2) % n1, n1, WRAP1).to(tl.float64)
    if HEXAGONAL:  # columns in half cells: those of odd rows lie half a cell further
        columns = _apart(2 * (i % n2) + (i // n2) % 2, 2 * (j % n2) + (j // n2) % 2, 2 * n2, WRAP2).to(tl.float64) / 2
        rows = rows * PITCH
    else:
        columns = _apart(i % n2, j % n2, n2, WRAP2).to(tl.float64)
    planes = _apart(i // (n1 * n2), j // (n1 * n2), n0, WRAP0).to(tl.float64)
    return tl.sqrt(planes * planes + rows * rows + columns * columns)


@triton.jit
def _dense_kernel(
    sums_ptr, counts_ptr, out_sums_ptr, out_counts_ptr, step_ptr, schedule_ptr,
    K, D, n0, n1, n2,
    KIND: tl.constexpr, SCHEDULE: tl.constexpr,
    WRAP0: tl.constexpr, WRAP1: tl.constexpr, WRAP2: tl.constexpr, HEXAGONAL: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    width, strength = width_and_strength(step_ptr, schedule_ptr, KIND, SCHEDULE)
    i = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    dim = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    sums = tl.zeros([BLOCK_I, BLOCK_D], tl.float32)
    counts = tl.zeros([BLOCK_I], tl.float32)
    for first in range(0, K, BLOCK_J):
        j = first + tl.arange(0, BLOCK_J)
        distance = _distance(i, j, n0, n1, n2, WRAP0, WRAP1, WRAP2, HEXAGONAL)
        weights = tl.where(i[:, None] == j[None, :], 1.0, weight(distance, width, strength, KIND))
        weights = tl.where(j[None, :] < K, weights, 0.0).to(tl.float32)
        there = j[:, None] * D + dim[None, :]
        x = tl.load(sums_ptr + there, (j[:, None] < K) & (dim[None, :] < D), 0.0)
        sums += tl.dot(weights, x, input_precision="tf32x3")
        counts += tl.sum(weights * tl.load(counts_ptr + j, j < K, 0.0)[None, :], 1)
    tl.store(out_sums_ptr + i[:, None] * D + dim[None, :], sums, (i[:, None] < K) & (dim[None, :] < D))
    if tl.program_id(1) == 0:
        tl.store(out_counts_ptr + i, counts, i < K)


def lattice(grid: Grid) -> tuple[tuple[int, ...], dict[str, bool]]:
    """(sizes, constants) of a grid of up to 3 axes as one of three, the first of them 1."""
    sizes, wraps = (1,) * (3 - grid.ndim) + grid.shape, (False,) * (3 - grid.ndim) + grid.wrap
    hexagonal = grid.topology == "hexagonal"
    return sizes, {"WRAP0": wraps[0], "WRAP1": wraps[1], "WRAP2": wraps[2], "HEXAGONAL": hexagonal}


def dense_triton(sums_KD: Tensor, counts_K: Tensor, neighborhood: Neighborhood, step: Tensor) -> tuple[Tensor, Tensor]:
    """(A^T sums, A^T counts) at `step`; float32, contiguous; grids of up to 3 axes."""
    k, d = sums_KD.shape
    sizes, how = lattice(neighborhood.grid)
    block_d = min(64, max(16, power_of_2(d)))
    out_KD, out_K = torch.empty_like(sums_KD), torch.empty_like(counts_K)
    table = schedule_table(neighborhood.schedule, neighborhood.widest, step.device)
    with on_device(sums_KD):
        _dense_kernel[(cdiv(k, DENSE_I), cdiv(d, block_d))](
            sums_KD, counts_K, out_KD, out_K, step, table, k, d, *sizes, KIND=neighborhood.kind,
            SCHEDULE=neighborhood.schedule.kind, BLOCK_I=DENSE_I, BLOCK_J=DENSE_J, BLOCK_D=block_d, **how,
        )  # fmt: skip
    return out_KD, out_K
