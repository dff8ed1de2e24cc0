"""Any neighborhood over any small grid on CUDA: one launch, sums and counts in it.

Legend: K codes, D dimensions. out_i = sum_j A_ij x_j; a program has BLOCK_I codes times BLOCK_D dimensions and goes
over all K codes, BLOCK_J at a time. The weights A_ij exist in registers alone: those of neighborhood.py, in float64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from topovq.grid import ROW_HEIGHT
from topovq.neighborhood import Neighborhood
from topovq.ops.triton.accumulate import cdiv, on_device, power_of_2
from topovq.ops.triton.course import course_of, course_table, width_and_strength

PITCH = tl.constexpr(ROW_HEIGHT)
BLOCK_I, BLOCK_J = 16, 32


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
    sums_ptr, counts_ptr, out_sums_ptr, out_counts_ptr, step_ptr, course_ptr,
    K, D, n0, n1, n2,
    KIND: tl.constexpr, SCHEDULE: tl.constexpr,
    WRAP0: tl.constexpr, WRAP1: tl.constexpr, WRAP2: tl.constexpr, HEXAGONAL: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    width, strength = width_and_strength(step_ptr, course_ptr, KIND, SCHEDULE)
    i = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    dim = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    sums = tl.zeros([BLOCK_I, BLOCK_D], tl.float32)
    counts = tl.zeros([BLOCK_I], tl.float32)
    for first in range(0, K, BLOCK_J):
        j = first + tl.arange(0, BLOCK_J)
        distance = _distance(i, j, n0, n1, n2, WRAP0, WRAP1, WRAP2, HEXAGONAL)
        if KIND == "hard":
            weights = tl.where(distance <= width + 1e-9, strength, 0.0)
        elif KIND == "gaussian":
            weights = tl.exp(-distance * distance / (width * width))
        else:
            weights = tl.exp(-distance / width)
        weights = tl.where(i[:, None] == j[None, :], 1.0, weights)
        weights = tl.where(j[None, :] < K, weights, 0.0).to(tl.float32)
        there = j[:, None] * D + dim[None, :]
        x = tl.load(sums_ptr + there, (j[:, None] < K) & (dim[None, :] < D), 0.0)
        sums += tl.dot(weights, x, input_precision="tf32x3")
        counts += tl.sum(weights * tl.load(counts_ptr + j, j < K, 0.0)[None, :], 1)
    tl.store(out_sums_ptr + i[:, None] * D + dim[None, :], sums, (i[:, None] < K) & (dim[None, :] < D))
    if tl.program_id(1) == 0:
        tl.store(out_counts_ptr + i, counts, i < K)


def dense_triton(sums_KD: Tensor, counts_K: Tensor, neighborhood: Neighborhood, step: Tensor) -> tuple[Tensor, Tensor]:
    """(A^T sums, A^T counts) at `step`; float32, contiguous; grids of up to 3 axes."""
    grid, course = neighborhood.grid, course_of(neighborhood)
    k, d = sums_KD.shape
    sizes = (1,) * (3 - grid.ndim) + grid.shape
    wraps = (False,) * (3 - grid.ndim) + grid.wrap
    block_d = min(64, max(16, power_of_2(d)))
    out_KD, out_K = torch.empty_like(sums_KD), torch.empty_like(counts_K)
    with on_device(sums_KD):
        _dense_kernel[(cdiv(k, BLOCK_I), cdiv(d, block_d))](
            sums_KD, counts_K, out_KD, out_K, step, course_table(course, sums_KD.device), k, d, *sizes,
            KIND=course.kind, SCHEDULE=course.schedule, WRAP0=wraps[0], WRAP1=wraps[1], WRAP2=wraps[2],
            HEXAGONAL=grid.topology == "hexagonal", BLOCK_I=BLOCK_I, BLOCK_J=BLOCK_J, BLOCK_D=block_d,
        )  # fmt: skip
    return out_KD, out_K
