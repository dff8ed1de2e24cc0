"""4x4 stride-2 convolutions between a few channels and many on CUDA, with the ReLU at their wide end: three kernels.

Legend: a wide map of B x H x W places with M channels; an image with a border of one pixel, B x (2 H + 2) x (2 W + 2)
pixels of C channels; the patch of a place is the 4 x 4 pixels from pixel (2 i, 2 j) on, rows of P >= 4 C numbers. BLOCK
places at a time; what is added up over places is added up by each program for itself first. Such layers do little but
read and write the wide map: each kernel goes through it once (`_narrow_kernel` with four places for each pixel).
TRITON_INTERPRET=1 runs these kernels on CPU tensors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from topovq.ops.triton.accumulate import cdiv, on_device, power_of_2

LEAST = 16  # of a side of a matrix product
BUSY = 132 * 8  # programs that add up, each over its share of the places
LEAST_TILES = 4  # in such a share: a program writes as much as it reads of two


class Tile(NamedTuple):
    """Places at a time, and how a kernel is compiled for that."""

    block: int
    warps: int
    stages: int


WIDEN, NARROW, WIDEN_BACKWARD, NARROW_BACKWARD = Tile(64, 4, 1), Tile(64, 4, 1), Tile(64, 4, 1), Tile(32, 4, 1)


@triton.jit
def _load_patches(image_ptr, place, N, H, W, C: tl.constexpr, P: tl.constexpr):
    """[BLOCK, 4 P]: the patches of places of the wide map."""
    row = place // W
    corner = ((row // H * (H + 1) + row % H) * (2 * W + 2) + place % W).to(tl.int64) * (2 * C)
    number = tl.arange(0, 4 * P)
    offset = number // P * ((2 * W + 2) * C) + number % P
    inside = (place < N)[:, None] & (number % P < 4 * C)[None, :]
    return tl.load(image_ptr + corner[:, None] + offset[None, :], inside, 0.0)


@triton.jit
def _relu(x):
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _widen_kernel(
    image_ptr, matrix_ptr, bias_ptr, wide_ptr, N, H, W,
    C: tl.constexpr, P: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    out = tl.arange(0, BLOCK_M)
    matrix = tl.load(matrix_ptr + tl.arange(0, 4 * P)[:, None] * M + out[None, :], (out < M)[None, :], 0.0)
    bias = tl.load(bias_ptr + out, out < M, 0.0).to(tl.float32)
    wide = _relu(tl.dot(_load_patches(image_ptr, place, N, H, W, C, P), matrix) + bias[None, :])
    address = wide_ptr + place.to(tl.int64)[:, None] * M + out[None, :]
    tl.store(address, wide.to(wide_ptr.dtype.element_ty), (place < N)[:, None] & (out < M)[None, :])


@triton.jit
def _thin_kernel(
    image_ptr, wide_ptr, grad_ptr, bias_ptr, matrix_ptr, parts_ptr, N, H, W,
    WIDEN: tl.constexpr, C: tl.constexpr, P: tl.constexpr, M: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """WIDEN: of `_widen_kernel`, from what it gave and the gradient of that. Otherwise of `_narrow_kernel`, from what
    it took and the gradient of the image it gave; the gradient of what it took is written to `grad`."""
    out = tl.arange(0, BLOCK_M)
    weights = tl.arange(0, 4 * P)[:, None] * M + out[None, :]
    if not WIDEN:
        matrix = tl.load(matrix_ptr + weights, (out < M)[None, :], 0.0)
        bias = tl.load(bias_ptr + out, out < M, 0.0).to(tl.float32)
    of_matrix = tl.zeros([4 * P, BLOCK_M], tl.float32)
    of_bias = tl.zeros([BLOCK_M], tl.float32)
    for start in range(tl.program_id(0) * BLOCK, N, tl.num_programs(0) * BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = (place < N)[:, None] & (out < M)[None, :]
        address = place.to(tl.int64)[:, None] * M + out[None, :]
        patch = _load_patches(image_ptr, place, N, H, W, C, P)
        if WIDEN:
            wide = tl.load(wide_ptr + address, inside, 0.0).to(tl.float32)
            grad = tl.load(grad_ptr + address, inside, 0.0).to(tl.float32)
            grad = tl.where(wide <= 0, 0.0, grad)
            of_matrix = tl.dot(tl.trans(patch), grad.to(patch.dtype), of_matrix)
        else:  # outside, patches are zeros, and the ReLU takes minus infinity
            taken = tl.load(wide_ptr + address, inside, -float("inf")).to(tl.float32) + bias[None, :]
            grad = tl.where(taken <= 0, 0.0, tl.dot(patch, matrix))
            tl.store(grad_ptr + address, grad.to(grad_ptr.dtype.element_ty), inside)
            of_matrix = tl.dot(tl.trans(patch), _relu(taken).to(patch.dtype), of_matrix)
        of_bias += tl.sum(grad, 0)
    part = parts_ptr + tl.program_id(0) * (4 * P + 1) * M
    tl.store(part + weights, of_matrix, (out < M)[None, :])
    tl.store(part + 4 * P * M + out, of_bias, out < M)


@triton.jit
def _narrow_kernel(
    wide_ptr, bias_ptr, matrix_ptr, image_ptr, N, H, W,
    C: tl.constexpr, P: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    # Four pixels at a time, (2 i, 2 j) and its neighbors: they are in the patches of four places, (i, j) the last.
    block = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, j = block // (W + 1), block % (W + 1)
    first, i = row // (H + 1) * H, row % (H + 1)
    out, number = tl.arange(0, BLOCK_M), tl.arange(0, P)
    bias = tl.load(bias_ptr + out, out < M, 0.0).to(tl.float32)
    pixels = tl.zeros([BLOCK, P], tl.float32)
    for corner in tl.static_range(4):
        up, left = corner // 2, corner % 2
        inside = (block < N) & (i >= up) & (i < H + up) & (j >= left) & (j < W + left)
        place = ((first + i - up) * W + j - left).to(tl.int64)
        address = place[:, None] * M + out[None, :]
        taken = tl.load(wide_ptr + address, inside[:, None] & (out < M)[None, :], -float("inf")).to(tl.float32)
        taken = _relu(taken + bias[None, :])
        number_in_patch = (2 * up + number // (2 * C)) * P + 2 * left * C + number % (2 * C)
        known = (number < 4 * C)[None, :] & (out < M)[:, None]
        matrix = tl.load(matrix_ptr + number_in_patch[None, :] * M + out[:, None], known, 0.0)
        pixels = tl.dot(taken.to(matrix.dtype), matrix, pixels)
    corner = (row * (2 * W + 2) + j).to(tl.int64) * (2 * C)
    offset = number // (2 * C) * ((2 * W + 2) * C) + number % (2 * C)
    known = (block < N)[:, None] & (number < 4 * C)[None, :]
    tl.store(image_ptr + corner[:, None] + offset[None, :], pixels.to(image_ptr.dtype.element_ty), known)


def _compiled(tile: Tile, c: int, matrix: Tensor | tuple[int, int]) -> dict[str, Any]:
    rows, m = matrix if isinstance(matrix, tuple) else matrix.shape
    how = {"num_warps": tile.warps, "num_stages": tile.stages}
    return {"C": c, "P": rows // 4, "M": m, "BLOCK": tile.block, "BLOCK_M": max(LEAST, power_of_2(m)), **how}


def widen_triton(image_BHWC: Tensor, matrix_4PM: Tensor, bias_M: Tensor) -> Tensor:
    b, height, width, c = image_BHWC.shape
    h, w = height // 2 - 1, width // 2 - 1
    wide_BHWM = image_BHWC.new_empty(b, h, w, matrix_4PM.shape[1])
    n = b * h * w
    if n:
        with on_device(image_BHWC):
            _widen_kernel[(cdiv(n, WIDEN.block),)](
                image_BHWC, matrix_4PM, bias_M, wide_BHWM, n, h, w, **_compiled(WIDEN, c, matrix_4PM)
            )
    return wide_BHWM


def narrow_triton(wide_BHWM: Tensor, bias_M: Tensor, matrix_4PM: Tensor, c: int) -> Tensor:
    b, h, w, _ = wide_BHWM.shape
    image_BHWC = wide_BHWM.new_empty(b, 2 * h + 2, 2 * w + 2, c)
    n = b * (h + 1) * (w + 1)
    if n:
        with on_device(wide_BHWM):
            _narrow_kernel[(cdiv(n, NARROW.block),)](
                wide_BHWM, bias_M, matrix_4PM, image_BHWC, n, h, w, **_compiled(NARROW, c, matrix_4PM)
            )
    return image_BHWC


def widen_backward_triton(image_BHWC: Tensor, wide_BHWM: Tensor, grad_BHWM: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The gradients (matrix [rows, M], bias [M]), float32."""
    how = _compiled(WIDEN_BACKWARD, image_BHWC.shape[3], (rows, wide_BHWM.shape[3]))
    return _backward(image_BHWC, wide_BHWM, grad_BHWM, None, None, how)


def narrow_backward_triton(
    wide_BHWM: Tensor, bias_M: Tensor, matrix_4PM: Tensor, grad_BHWC: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients (wide, matrix [4 P, M], bias [M]), the last two float32; from that of the image."""
    grad_BHWM = torch.empty_like(wide_BHWM)
    how = _compiled(NARROW_BACKWARD, grad_BHWC.shape[3], matrix_4PM)
    return grad_BHWM, *_backward(grad_BHWC, wide_BHWM, grad_BHWM, bias_M, matrix_4PM, how)


def _backward(
    image_BHWC: Tensor,
    wide_BHWM: Tensor,
    grad_BHWM: Tensor,
    bias_M: Tensor | None,
    matrix_4PM: Tensor | None,
    how: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    b, h, w, m = wide_BHWM.shape
    n = b * h * w
    programs = min(BUSY, cdiv(n, how["BLOCK"] * LEAST_TILES))
    parts = wide_BHWM.new_empty(programs, 4 * how["P"] + 1, m, dtype=torch.float32)
    if n:
        with on_device(wide_BHWM):
            _thin_kernel[(programs,)](
                image_BHWC, wide_BHWM, grad_BHWM, bias_M, matrix_4PM, parts, n, h, w, WIDEN=matrix_4PM is None, **how
            )
    total = parts.sum(0)
    return total[:-1], total[-1]
