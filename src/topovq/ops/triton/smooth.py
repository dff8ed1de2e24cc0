"""The Gaussian neighborhood on CUDA: one or two launches per axis of a rectangular grid, sums and counts together.

Legend: an axis of n places. Sums and counts are [batches, n, columns] seen along it: out_i = sum_j w_|i-j| x_j, with
w_r = exp(-r^2 / width^2). A program has a tile of places times columns. How many places are within reach of it depends
on the width:
    narrow  few places are within reach: they are added up one by one, in the time it takes to read and write them
    wide    the values first go to points a good part of the width apart, and from there to the places. A Gaussian is
            two narrower ones after each other: sum_u exp(-(i-u)^2/a^2) exp(-(u-j)^2/a^2) is a constant times
            exp(-(i-j)^2/width^2), for a = width / sqrt(2), with a relative error of 2 exp(-(pi RATIO / 2)^2) where the
            points u are width / RATIO apart. So the work does not grow with the width. All long axes go to points
            before any goes back to places: the second has only the points of the first to go through.
The sums of a batch on a large map are 0 but for the few codes it chose: the first pass over them goes through lists of
those. How a tile is added up is in triton/sums.py.
Float32 throughout; weights below CUTOFF are none (on the wide way, some far below it are).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from topovq.grid import Grid
from topovq.neighborhood import CUTOFF, Neighborhood
from topovq.ops.triton.accumulate import cdiv, on_device, power_of_2
from topovq.ops.triton.course import Course, course_of, course_table, width_and_strength
from topovq.ops.triton.sums import LONGEST, chosen_sum, list_line, near_sum, weighted_sum

REACH = tl.constexpr(math.sqrt(-math.log(CUTOFF)))  # in widths
NEAR = 6  # places on either side, up to which they are added up one by one
WIDE = 6.0  # the width from which on there are points between
LEAST_PLACES = 64  # of an axis that is long enough for that: the others are as if the width were not
RATIO = tl.constexpr(2.75)  # points within a width: the error is 2e-8
POINT_REACH = tl.constexpr(3.6)  # in widths: what points farther away would add is 1e-6 of a weight of 1e-6


class Tile(NamedTuple):
    block_i: int
    block_c: int
    block_j: int
    block_u: int
    """Points at a time, where there are any."""
    warps: int = 4
    precision: str = "tf32x3"
    """Of the products: the error of float32."""


SMALL, LARGE = Tile(16, 32, 16, 16), Tile(32, 64, 16, 32)
GIVEN = Course("gaussian", "given", 0.0, 0.0, 0.0, 1)  # by its width
MANY = 16_384  # codes, from which on a launch of its own comes first: the width, once for all programs, and the lists
PROGRAMS = 256  # of LARGE tiles, from which on they are used: with fewer, processors of the device would idle


@triton.jit
def is_narrow(width):
    """Whether no place is within reach but the next ones."""
    return width * REACH < 2


@triton.jit
def _is_wide(width, ring, WIDE: tl.constexpr):
    """Whether long axes go over points; `ring` is the shortest of those that wrap."""
    return (width >= WIDE) & (2 * REACH * width <= ring - 1)


@triton.jit
def _begin_kernel(
    counts_ptr, step_ptr, course_ptr, width_ptr, chosen_ptr, ranks_ptr, n, after, lines, n_wide, after_wide, lines_wide,
    ring, K, KIND: tl.constexpr, SCHEDULE: tl.constexpr, WIDE: tl.constexpr, LISTS: tl.constexpr, FULL: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The width, and the lists of chosen codes along the axis that comes first: another one where there are points."""
    width, _ = width_and_strength(step_ptr, course_ptr, KIND, SCHEDULE)
    line = tl.program_id(0)
    if line == 0:
        tl.store(width_ptr, width)
    if LISTS:
        wide = _is_wide(width, ring, WIDE)
        if (line < tl.where(wide, lines_wide, lines)) & (not is_narrow(width)):
            along, apart = tl.where(wide, n_wide, n), tl.where(wide, after_wide, after)
            list_line(counts_ptr, chosen_ptr, ranks_ptr, line, along, apart, K, FULL, BLOCK)


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
def _lines(width, wide, lead, LEAD: tl.constexpr):
    """How many of the first axis' `lead` places hold anything while an axis after it is smoothed."""
    lines = lead
    if LEAD != "whole" and wide:
        _, _, lines = _points(width, lead, LEAD == "ring")
    return lines


@triton.jit
def _tile_of(program, places, columns, batch_stride, column_stride, BLOCK_I: tl.constexpr, BLOCK_C: tl.constexpr):
    """The first place of a program's tile, its columns, its batch, and where its batch and its columns begin.

    Programs that read the same places follow each other: what one read is still in cache.
    """
    column_tiles = tl.cdiv(columns, BLOCK_C)
    place_tiles = tl.cdiv(places, BLOCK_I)
    column = (program // place_tiles) % column_tiles * BLOCK_C + tl.arange(0, BLOCK_C)
    batch = program // place_tiles // column_tiles
    base = batch.to(tl.int64) * batch_stride
    return program % place_tiles * BLOCK_I, column, batch, base, column.to(tl.int64) * column_stride


@triton.jit
def _line(batch, column, columns, D: tl.constexpr):
    """The line of codes that a tile of columns is of."""
    return batch * (columns // D) + tl.min(column, 0) // D


@triton.jit
def _to_points(
    in_ptr, limit, chosen_ptr, ranks_ptr, out_ptr, width, lines, per_line, program, n, places, columns,
    batch_stride, place_stride, column_stride, D: tl.constexpr, LISTED: tl.constexpr, FULL: tl.constexpr,
    WRAP: tl.constexpr, PRECISION: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    first, column, batch, base, along = _tile_of(
        program, places, columns, batch_stride, column_stride, BLOCK_I, BLOCK_C
    )
    start, step, number = _points(width, n, WRAP)
    if (first < number) & (batch // per_line < lines):
        reach = POINT_REACH * width
        scale = (2.0 / (width * width)).to(tl.float32)
        if LISTED:
            total = chosen_sum(
                in_ptr, chosen_ptr, ranks_ptr, _line(batch, column, columns, D), first, column, base, along, n, -start,
                step, reach, reach, scale, columns, place_stride, WRAP, PRECISION, BLOCK_I, BLOCK_C, BLOCK_J,
            )  # fmt: skip
        else:
            total = weighted_sum(
                in_ptr, limit, first, column, base, along, n, -start, step, tl.full((), 1.0, tl.float64), reach, reach,
                scale, columns, place_stride, WRAP, FULL, PRECISION, BLOCK_I, BLOCK_C, BLOCK_J,
            )  # fmt: skip
        point = first + tl.arange(0, BLOCK_I)
        here = base + point.to(tl.int64)[:, None] * place_stride + along[None, :]
        tl.store(out_ptr + here, total, (point < number)[:, None] & (column < columns)[None, :])


@triton.jit
def _points_kernel(
    sums_ptr, counts_ptr, out_sums_ptr, out_counts_ptr, step_ptr, course_ptr, chosen_ptr, ranks_ptr,
    n, places, ring, lead, per_line, counts_programs, sums_columns, counts_columns,
    counts_batch_stride, counts_place_stride, counts_column_stride, K,
    KIND: tl.constexpr, SCHEDULE: tl.constexpr, D: tl.constexpr, LISTED: tl.constexpr, FULL: tl.constexpr,
    WRAP: tl.constexpr, LEAD: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """From places to points, of which there are `places` at the most; nothing where the width is not wide."""
    width, _ = width_and_strength(step_ptr, course_ptr, KIND, SCHEDULE)
    program = tl.program_id(0)
    if _is_wide(width, ring, WIDE):
        lines = _lines(width, True, lead, LEAD)
        if program < counts_programs:
            _to_points(
                counts_ptr, K, chosen_ptr, ranks_ptr, out_counts_ptr, width, lines, per_line, program, n, places,
                counts_columns, counts_batch_stride, counts_place_stride, counts_column_stride, D, False, FULL,
                WRAP, PRECISION, BLOCK_I, BLOCK_C, BLOCK_J,
            )  # fmt: skip
        else:
            _to_points(
                sums_ptr, K.to(tl.int64) * D, chosen_ptr, ranks_ptr, out_sums_ptr, width, lines, per_line,
                program - counts_programs, n,
                places, sums_columns, n.to(tl.int64) * sums_columns, sums_columns, 1, D, LISTED, FULL,
                WRAP, PRECISION, BLOCK_I, BLOCK_C, BLOCK_J,
            )  # fmt: skip


@triton.jit
def _smooth_tile(
    in_ptr, limit, chosen_ptr, ranks_ptr, points_ptr, out_ptr, width, wide, lines, per_line, program, n, places,
    columns, batch_stride, place_stride, column_stride, D: tl.constexpr, LISTED: tl.constexpr, FULL: tl.constexpr,
    WRAP: tl.constexpr, NEAR: tl.constexpr, LONG: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """One tile of out = W x."""
    first, column, batch, base, along = _tile_of(
        program, places, columns, batch_stride, column_stride, BLOCK_I, BLOCK_C
    )
    if batch // per_line < lines:
        scale = (1.0 / (width * width)).to(tl.float32)
        # How far a place may be on either side: on a ring each one counts once, the short way round.
        reach = tl.minimum(width * REACH, n.to(tl.float64)).to(tl.int32)
        back, ahead = reach, reach
        if WRAP:
            back, ahead = tl.minimum(reach, (n - 1) // 2), tl.minimum(reach, n // 2)
        one = tl.full((), 1.0, tl.float64)
        if LONG and wide:
            start, step, number = _points(width, n, WRAP)
            far = POINT_REACH * width
            total = weighted_sum(
                points_ptr, limit, first, column, base, along, number, start, one, step, far, far, 2 * scale, columns,
                place_stride, WRAP, True, PRECISION, BLOCK_I, BLOCK_C, BLOCK_J,
            )  # fmt: skip
            total *= (step / width).to(tl.float32) * 1.1283791670955126  # 2 / sqrt(pi)
        elif LISTED:
            total = chosen_sum(
                in_ptr, chosen_ptr, ranks_ptr, _line(batch, column, columns, D), first, column, base, along, n,
                one - 1.0, one, back.to(tl.float64), ahead.to(tl.float64), scale, columns, place_stride,
                WRAP, PRECISION, BLOCK_I, BLOCK_C, BLOCK_J,
            )  # fmt: skip
        elif reach <= NEAR:
            total = near_sum(
                in_ptr, limit, first, column, base, along, n, back, ahead, scale, columns, place_stride,
                WRAP, FULL, BLOCK_I, BLOCK_C,
            )  # fmt: skip
        else:
            total = weighted_sum(
                in_ptr, limit, first, column, base, along, n, one - 1.0, one, one, back.to(tl.float64),
                ahead.to(tl.float64), scale, columns, place_stride, WRAP, FULL, PRECISION, BLOCK_I, BLOCK_C, BLOCK_J,
            )  # fmt: skip
        place = first + tl.arange(0, BLOCK_I)
        here = base + place.to(tl.int64)[:, None] * place_stride + along[None, :]
        tl.store(out_ptr + here, total, (place < n)[:, None] & (column < columns)[None, :])


@triton.jit
def _axis_kernel(
    sums_ptr, counts_ptr, points_sums_ptr, points_counts_ptr, out_sums_ptr, out_counts_ptr, step_ptr, course_ptr,
    chosen_ptr, ranks_ptr,
    n, places, ring, lead, per_line, counts_programs, sums_columns, counts_columns,
    counts_batch_stride, counts_place_stride, counts_column_stride, K,
    KIND: tl.constexpr, SCHEDULE: tl.constexpr, D: tl.constexpr, LISTED: tl.constexpr, FULL: tl.constexpr,
    WRAP: tl.constexpr, LEAD: tl.constexpr, NEAR: tl.constexpr,
    LONG: tl.constexpr, WIDE: tl.constexpr, BUT_NARROW: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """From places, or from a long axis' points where the width is wide, to places."""
    width, _ = width_and_strength(step_ptr, course_ptr, KIND, SCHEDULE)
    wide = _is_wide(width, ring, WIDE)
    lines = _lines(width, wide, lead, LEAD)
    if BUT_NARROW and is_narrow(width):
        lines = lines * 0
    program = tl.program_id(0)
    if program < counts_programs:  # first: along the last axis these read from all over the map, and take longest
        _smooth_tile(
            counts_ptr, K, chosen_ptr, ranks_ptr, points_counts_ptr, out_counts_ptr, width, wide, lines, per_line,
            program, n, places, counts_columns, counts_batch_stride, counts_place_stride, counts_column_stride,
            D, False, FULL,
            WRAP, NEAR, LONG, PRECISION, BLOCK_I, BLOCK_C, BLOCK_J,
        )  # fmt: skip
    else:
        _smooth_tile(
            sums_ptr, K.to(tl.int64) * D, chosen_ptr, ranks_ptr, points_sums_ptr, out_sums_ptr, width, wide, lines,
            per_line, program - counts_programs, n, places, sums_columns, n.to(tl.int64) * sums_columns, sums_columns,
            1, D, LISTED, FULL,
            WRAP, NEAR, LONG, PRECISION, BLOCK_I, BLOCK_C, BLOCK_J,
        )  # fmt: skip


def gaussian_triton(
    sums_KD: Tensor, counts_K: Tensor, neighborhood: Neighborhood, step: Tensor, of_a_batch: bool = False
) -> tuple[Tensor, Tensor]:
    """(A^T sums, A^T counts) of `gaussian` over a rectangular grid; float32, contiguous.

    Those `of_a_batch` are 0 where the count is; and where the width `is_narrow` nothing is done with them, so that what
    comes back means nothing. A single place gets its own tensors back. What is between the first launch and the last
    has values at empty places too: they lie between codes.
    """
    grid, course, widest = neighborhood.grid, course_of(neighborhood), neighborhood.widest
    axes = [axis for axis, n in enumerate(grid.shape) if n > 1]
    long = [axis for axis in axes if grid.shape[axis] >= LEAST_PLACES and widest >= WIDE]
    back = [*reversed(long), *(axis for axis in axes if axis not in long)]
    listed = False
    lists = (counts_K, counts_K)
    if of_a_batch and grid.size >= MANY:
        listed = max(grid.shape) <= LONGEST
        step, chosen, ranks = _begin(counts_K, grid, course, step, back[0], long, listed)
        course = GIVEN
        lists = (chosen, ranks)
    given = (step, course_table(course, sums_KD.device), *lists)
    how = {"KIND": course.kind, "SCHEDULE": course.schedule, "WIDE": WIDE}
    places = points = (sums_KD, counts_K)
    with on_device(sums_KD):
        for axis in long:
            out = (sums_KD.new_empty(grid.places, sums_KD.shape[1]), counts_K.new_empty(grid.places))
            raw = points[0] is sums_KD  # as they came
            _launch(_points_kernel, (*points, *out, *given), grid, axis, long, raw, listed, how)
            points = out
        for axis in back:
            out = (sums_KD.new_empty(grid.places, sums_KD.shape[1]), counts_K.new_empty(grid.places))
            raw = places[0] is sums_KD
            more = {"NEAR": NEAR, "LONG": axis in long, "BUT_NARROW": of_a_batch}
            _launch(_axis_kernel, (*places, *points, *out, *given), grid, axis, long, raw, listed, how | more)
            places = points = out
    return places if grid.size == grid.places else (places[0][: grid.size], places[1][: grid.size])


def _begin(
    counts_K: Tensor, grid: Grid, course: Course, step: Tensor, axis: int, long: list[int], lists: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The width, and the lists and ranks along an axis, or where the width is wide along the first long one."""
    first = [(grid.shape[i], _after(grid, i), grid.places // grid.shape[i]) for i in (axis, long[0] if long else axis)]
    lines = max(of for _, _, of in first) if lists else 1
    width = torch.empty((), dtype=torch.float64, device=step.device)
    sizes = (grid.places, grid.places + lines) if lists else (0, 0)
    chosen, ranks = (counts_K.new_empty(size, dtype=torch.int32) for size in sizes)
    with on_device(step):
        _begin_kernel[(lines,)](
            counts_K, step, course_table(course, step.device), width, chosen, ranks, *first[0], *first[1],
            _ring(grid, long), grid.size, KIND=course.kind, SCHEDULE=course.schedule, WIDE=WIDE, LISTS=lists,
            FULL=grid.size == grid.places, BLOCK=power_of_2(max(grid.shape)),
        )  # fmt: skip
    return width, chosen, ranks


def _launch(
    kernel: Any, pointers: tuple[Tensor, ...], grid: Grid, axis: int, long: list[int], raw: bool, listed: bool,
    how: dict[str, Any],
) -> None:  # fmt: skip
    to_points = kernel is _points_kernel
    n, d, first = grid.shape[axis], pointers[0].shape[1], grid.shape[0]
    before, after = math.prod(grid.shape[:axis]), _after(grid, axis)
    # While one long axis after the first is smoothed, the first one has values at its points alone.
    led = axis > 0 and axis in long and 0 in long
    lead, per_line = (first, before // first) if led else (before, 1)
    if led and to_points:
        before = most_points(first) * per_line
    # Along the last axis the counts of one line are a single column: the lines are the columns then.
    batches, columns, strides = (1, before, (0, 1, n)) if after == 1 else (before, after, (n * after, after, 1))
    tiles = tile(n, after * d, before)
    out, block = (most_points(n), tiles.block_u) if to_points else (n, tiles.block_i)
    sums_programs = before * cdiv(after * d, tiles.block_c) * cdiv(out, block)
    counts_programs = batches * cdiv(columns, tiles.block_c) * cdiv(out, block)
    kernel[(sums_programs + counts_programs,)](
        *pointers, n, out, _ring(grid, long), lead, per_line, counts_programs, after * d, columns, *strides,
        grid.size, D=d, LISTED=raw and listed and (after == 1 or d % tiles.block_c == 0),  # a tile is of one line
        FULL=grid.size == grid.places or not raw,
        WRAP=grid.wrap[axis], LEAD=("ring" if grid.wrap[0] else "open") if led else "whole", PRECISION=tiles.precision,
        BLOCK_I=block, BLOCK_C=tiles.block_c, BLOCK_J=tiles.block_j, num_warps=tiles.warps, **how,
    )  # fmt: skip


def _after(grid: Grid, axis: int) -> int:
    """How many codes lie between two places along an axis."""
    return math.prod(grid.shape[axis + 1 :])


def _ring(grid: Grid, long: list[int]) -> int:
    return min([grid.shape[i] for i in long if grid.wrap[i]], default=2**31 - 1)


def most_points(n: int) -> int:
    """How many points there are at the most, which is where the width is just wide."""
    return int((n - 1) * RATIO.value / WIDE + REACH.value * RATIO.value) + 2


def tile(n: int, columns: int, batches: int) -> Tile:
    """The tile for sums of this shape along an axis."""
    large = batches * cdiv(n, LARGE.block_i) * cdiv(columns, LARGE.block_c)
    return LARGE if n > SMALL.block_i and large >= PROGRAMS else SMALL
