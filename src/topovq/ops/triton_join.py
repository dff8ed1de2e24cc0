"""What comes after a convolution, in one pass each way on CUDA: bias, skip connection and ReLU; and back.

Legend: rows are the B x H x W places of channels-last maps, C channels. forward: s = y + b (+ x), r = max(s, 0);
backward: g = ds + dr [r > 0], and the bias's gradient, the sum of g over all rows, by parts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from topovq.ops.triton_stats import cdiv, on_device, power_of_2

TILE = 4096  # numbers of a tile
PROGRAMS = 1056  # of the backward pass, at most: each leaves a part of the bias's gradient


@triton.jit
def _forward_kernel(
    y_ptr, bias_ptr, x_ptr, s_ptr, r_ptr,
    rows, C, HAS_BIAS: tl.constexpr, HAS_X: tl.constexpr, KEEP: tl.constexpr,
    ROWS: tl.constexpr, CP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, CP)
    inside = (row[:, None] < rows) & (channel[None, :] < C)
    here = row[:, None] * C + channel[None, :]
    s = tl.load(y_ptr + here, inside, 0.0).to(tl.float32)
    if HAS_BIAS:
        s += tl.load(bias_ptr + channel, channel < C, 0.0).to(tl.float32)[None, :]
    if HAS_X:
        s += tl.load(x_ptr + here, inside, 0.0).to(tl.float32)
    if KEEP:
        tl.store(s_ptr + here, s.to(s_ptr.dtype.element_ty), inside)
    tl.store(r_ptr + here, tl.maximum(s, 0.0).to(r_ptr.dtype.element_ty), inside)


@triton.jit
def _backward_kernel(
    ds_ptr, dr_ptr, r_ptr, g_ptr, parts_ptr,
    rows, C, tiles, HAS_S: tl.constexpr, HAS_R: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, CP: tl.constexpr,
):  # fmt: skip
    channel = tl.arange(0, CP)
    total = tl.zeros([ROWS, CP], tl.float32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = (tl.zeros([ROWS], tl.int64) + tile) * ROWS + tl.arange(0, ROWS)
        inside = (row[:, None] < rows) & (channel[None, :] < C)
        here = row[:, None] * C + channel[None, :]
        g = tl.zeros([ROWS, CP], tl.float32)
        if HAS_S:
            g += tl.load(ds_ptr + here, inside, 0.0).to(tl.float32)
        if HAS_R:
            dr = tl.load(dr_ptr + here, inside, 0.0).to(tl.float32)
            g += tl.where(tl.load(r_ptr + here, inside, 0.0).to(tl.float32) > 0, dr, 0.0)
        stored = g.to(g_ptr.dtype.element_ty)
        tl.store(g_ptr + here, stored, inside)
        if HAS_BIAS:
            total += stored.to(tl.float32)
    if HAS_BIAS:
        tl.store(parts_ptr + tl.program_id(0) * C + channel, tl.sum(total, 0), channel < C)


def join_triton(y: Tensor, bias_C: Tensor | None, x: Tensor | None, keep: bool) -> tuple[Tensor, Tensor]:
    """(s, or nothing where it need not be kept, and r), channels last as y is."""
    y, c = _last(y), y.shape[1]
    r = torch.empty_like(y)
    s = torch.empty_like(y) if keep else y.new_empty(0)
    rows, padded = y.numel() // c, power_of_2(c)
    block = max(1, TILE // padded)
    if rows:
        with on_device(y):
            _forward_kernel[(cdiv(rows, block),)](
                y, y if bias_C is None else bias_C, y if x is None else _last(x), s, r, rows, c,
                HAS_BIAS=bias_C is not None, HAS_X=x is not None, KEEP=keep, ROWS=block, CP=padded,
            )  # fmt: skip
    return s, r


def join_backward_triton(ds: Tensor | None, dr: Tensor | None, r: Tensor, has_bias: bool) -> tuple[Tensor, Tensor]:
    """(g, the bias's gradient in float32, or nothing)."""
    c = r.shape[1]
    g = torch.empty_like(r)
    rows, padded = r.numel() // c, power_of_2(c)
    block = max(1, TILE // padded)
    tiles = cdiv(rows, block)
    programs = max(1, min(PROGRAMS, tiles))
    parts = torch.zeros(programs, c, device=r.device) if not rows else torch.empty(programs, c, device=r.device)
    if rows:
        with on_device(r):
            _backward_kernel[(programs,)](
                r if ds is None else _last(ds), r if dr is None else _last(dr), r, g, parts, rows, c, tiles,
                HAS_S=ds is not None, HAS_R=dr is not None, HAS_BIAS=has_bias, ROWS=block, CP=padded,
            )  # fmt: skip
    return g, parts.sum(0) if has_bias else parts[:0, 0].clone()


def _last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)
