"""The Gaussian neighborhood on CUDA: one launch per axis of a rectangular grid, sums and counts in the same launch.

Legend: an axis of n places. Sums and counts are [batches, n, columns] seen along it: out_i = sum_j w_|i-j| x_j, with
w_r = exp(-r^2 / width^2). A program has BLOCK_I places times BLOCK_C columns and multiplies matrices of weights, which
exist in registers alone, with the places within reach, BLOCK_J at a time: its work falls with the width. Where few are
within reach it adds them up one by one: then it takes no longer than to read and write them.
Float32 throughout; a weight below CUTOFF is none, so places beyond it receive exactly 0.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from topovq.grid import Grid
from topovq.ops.kernel import CUTOFF, Course
from topovq.ops.triton_course import course_table, width_and_strength
from topovq.ops.triton_stats import cdiv, on_device

REACH = tl.constexpr(math.sqrt(-math.log(CUTOFF)))  # in widths
NEAR = 6  # places on either side, up to which they are added up one by one


class Tile(NamedTuple):
    block_i: int
    block_c: int
    block_j: int
    warps: int = 4
    precision: str = "tf32x3"
    """Of the products: the error of float32."""


SMALL, LARGE = Tile(16, 32, 16), Tile(64, 64, 32)
PROGRAMS = 256  # of LARGE tiles, from which on they are used: with fewer, processors of the device would idle


@triton.jit
def _smooth_tile(
    in_ptr, out_ptr, width, program, n, columns, batch_stride, place_stride, column_stride,
    WRAP: tl.constexpr, NEAR: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """One tile of out = W x. Programs that read the same places follow each other: what one read is still in cache."""
    column_tiles = tl.cdiv(columns, BLOCK_C)
    place_tiles = tl.cdiv(n, BLOCK_I)
    first = program % place_tiles * BLOCK_I
    column = (program // place_tiles) % column_tiles * BLOCK_C + tl.arange(0, BLOCK_C)
    base = (program // place_tiles // column_tiles).to(tl.int64) * batch_stride
    place = first + tl.arange(0, BLOCK_I)
    along = column.to(tl.int64) * column_stride
    reach = tl.minimum(width * REACH, n.to(tl.float64)).to(tl.int32)
    scale = (1.0 / (width * width)).to(tl.float32)
    # How far a place may be on either side: on a ring each one counts once, the short way round.
    back, ahead = reach, reach
    if WRAP:
        back, ahead = tl.minimum(reach, (n - 1) // 2), tl.minimum(reach, n // 2)
    total = tl.zeros([BLOCK_I, BLOCK_C], tl.float32)
    if reach <= NEAR:
        for shift in range(-back, ahead + 1):
            other = place + shift
            apart = other - place
            weights = tl.exp(-(apart * apart).to(tl.float32) * scale)
            if WRAP:
                other = (other + n) % n
            on = ((other >= 0) & (other < n))[:, None] & (column < columns)[None, :]
            there = base + other.to(tl.int64)[:, None] * place_stride + along[None, :]
            total += weights[:, None] * tl.load(in_ptr + there, on, 0.0)
    else:
        begin = first - back
        end = tl.minimum(first + BLOCK_I, n) + ahead
        if not WRAP:
            begin, end = tl.maximum(begin, 0), tl.minimum(end, n)
        for start in range(begin, end, BLOCK_J):
            other = start + tl.arange(0, BLOCK_J)
            apart = other[None, :] - place[:, None]
            near = (apart >= -back) & (apart <= ahead)
            squares = (apart * apart).to(tl.float32)
            weights = tl.where(near, tl.exp(-squares * scale), 0.0)
            source = other
            if WRAP:
                source = (other + n) % n
            on = (other < end)[:, None] & (column < columns)[None, :]
            there = base + source.to(tl.int64)[:, None] * place_stride + along[None, :]
            total += tl.dot(weights, tl.load(in_ptr + there, on, 0.0), input_precision=PRECISION)
    here = base + place.to(tl.int64)[:, None] * place_stride + along[None, :]
    tl.store(out_ptr + here, total, (place < n)[:, None] & (column < columns)[None, :])


@triton.jit
def _axis_kernel(
    sums_ptr, counts_ptr, out_sums_ptr, out_counts_ptr, step_ptr, course_ptr,
    n, counts_programs, sums_columns, counts_columns, counts_batch_stride, counts_place_stride, counts_column_stride,
    KIND: tl.constexpr, SCHEDULE: tl.constexpr,
    WRAP: tl.constexpr, NEAR: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    width, _ = width_and_strength(step_ptr, course_ptr, KIND, SCHEDULE)
    program = tl.program_id(0)
    if program < counts_programs:  # first: along the last axis these read from all over the map, and take longest
        _smooth_tile(
            counts_ptr, out_counts_ptr, width, program, n,
            counts_columns, counts_batch_stride, counts_place_stride, counts_column_stride,
            WRAP, NEAR, PRECISION, BLOCK_I, BLOCK_C, BLOCK_J,
        )  # fmt: skip
    else:
        _smooth_tile(
            sums_ptr, out_sums_ptr, width, program - counts_programs, n,
            sums_columns, n.to(tl.int64) * sums_columns, sums_columns, 1,
            WRAP, NEAR, PRECISION, BLOCK_I, BLOCK_C, BLOCK_J,
        )  # fmt: skip


def smooth_triton(
    sums_KD: Tensor, counts_K: Tensor, grid: Grid, course: Course | None, step: Tensor
) -> tuple[Tensor, Tensor]:
    """(A^T sums, A^T counts) of `gaussian` over a rectangular grid; float32, contiguous.

    Without a course, `step` is the width itself (float64). A single place gets its own tensors back.
    """
    course = course or Course("gaussian", "given", 0.0, 0.0, 0.0, 1)
    table = course_table(course, sums_KD.device)
    d = sums_KD.shape[1]
    for axis, (n, wraps) in enumerate(zip(grid.shape, grid.wrap)):
        if n == 1:
            continue
        before, after = math.prod(grid.shape[:axis]), math.prod(grid.shape[axis + 1 :])
        # Along the last axis the counts of one line are a single column: the lines are the columns then.
        batches, columns, strides = (1, before, (0, 1, n)) if after == 1 else (before, after, (n * after, after, 1))
        tiles = tile(n, after * d, before)
        places = cdiv(n, tiles.block_i)
        sums_programs = before * places * cdiv(after * d, tiles.block_c)
        counts_programs = batches * places * cdiv(columns, tiles.block_c)
        out_KD, out_K = torch.empty_like(sums_KD), torch.empty_like(counts_K)
        with on_device(sums_KD):
            _axis_kernel[(sums_programs + counts_programs,)](
                sums_KD, counts_K, out_KD, out_K, step, table,
                n, counts_programs, after * d, columns, *strides, KIND=course.kind, SCHEDULE=course.schedule,
                WRAP=wraps, NEAR=NEAR, PRECISION=tiles.precision,
                BLOCK_I=tiles.block_i, BLOCK_C=tiles.block_c, BLOCK_J=tiles.block_j, num_warps=tiles.warps,
            )  # fmt: skip
        sums_KD, counts_K = out_KD, out_K
    return sums_KD, counts_K


def tile(n: int, columns: int, batches: int) -> Tile:
    """The tile for sums of this shape along an axis."""
    large = batches * cdiv(n, LARGE.block_i) * cdiv(columns, LARGE.block_c)
    return LARGE if n > SMALL.block_i and large >= PROGRAMS else SMALL
