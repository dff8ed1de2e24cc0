"""The forward pass on CUDA, the search and a second kernel for all the rest, and the backward pass in one kernel.

Legend: N vectors x, K codes w, D dimensions. The second kernel gathers codes, squared error and statistics
(triton/accumulate.py) in one more pass over x: in one kernel with the search they would cost it the registers it lives
on, and twice the time that the pass takes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from topovq.ops.bound import largest, lengths, limit_of
from topovq.ops.triton.accumulate import Errors, Stats, add_counts, add_rows, cdiv, mean_error, power_of_2
from topovq.ops.triton.replay import Work, replayed
from topovq.ops.triton.search import search, shape_of

PARTS = 512  # programs whose errors the last one adds up at a time


@triton.jit
def _gather_kernel(
    x_ptr, index_ptr, valid_ptr, codes_ptr, q_ptr, row_ptr, parts_ptr, sums_ptr, counts_ptr, unit_ptr,
    done_ptr, mean_ptr, share_ptr, N, K, copies, stride_n, stride_d,
    KEPT: tl.constexpr, STATS: tl.constexpr, FIXED: tl.constexpr, FINISH: tl.constexpr,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * BLOCK_N
    row = first + tl.arange(0, BLOCK_N)
    copy = (tl.program_id(0) % copies).to(tl.int64) * K
    index = tl.load(index_ptr + row, row < N, 0)
    if KEPT:
        tl.store(row_ptr + row, index.to(tl.int16), row < N)
    valid = tl.load(valid_ptr + row, row < N, 0) != 0
    place = index + copy
    leader = tl.load(index_ptr + first) + copy
    error = tl.zeros([BLOCK_N], tl.float32)
    for start in tl.static_range(0, D, BLOCK_D):
        dim = start + tl.arange(0, BLOCK_D)
        inside = (row[:, None] < N) & (dim[None, :] < D)
        x = tl.load(x_ptr + row[:, None] * stride_n + dim[None, :] * stride_d, inside, 0.0).to(tl.float32)
        q = tl.load(codes_ptr + index[:, None] * D + dim[None, :], inside, 0.0)
        if STATS and start == 0:  # when the loads have begun, which take longest
            alike, crowded = add_counts(counts_ptr, place, leader, valid, BLOCK_N)
        tl.store(q_ptr + row[:, None] * D + dim[None, :], q.to(q_ptr.dtype.element_ty), inside)
        apart = tl.where(inside & valid[:, None], x - q, 0.0)
        error += tl.sum(apart * apart, 1)
        if STATS:
            add_rows(sums_ptr, place, leader, dim, D, x, valid, alike, crowded, unit_ptr, FIXED)
    tl.store(parts_ptr + tl.program_id(0), tl.sum(error, 0))
    tl.store(parts_ptr + tl.num_programs(0) + tl.program_id(0), tl.sum(valid.to(tl.float32), 0))
    if FINISH:
        tl.debug_barrier()
        if tl.atomic_add(done_ptr, 1) == tl.num_programs(0) - 1:  # the last to end: all parts are written
            mean_error(parts_ptr, mean_ptr, share_ptr, tl.num_programs(0), D, PARTS)


def quantize_triton(
    x_ND: Tensor,
    codes_KD: Tensor,
    keep_N: Tensor | None,
    metric: str,
    precision: str,
    stats: bool,
    learns: bool = False,
    deterministic: bool = False,
    keep_codes: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What the operation topovq::quantize returns (ops/quantize.py), whether vectors are valid as int8."""
    how = metric, precision, stats, learns, deterministic, keep_codes
    key = ("quantize", *shape_of(x_ND), codes_KD.shape[0], keep_N is None, *how)
    return replayed(key, (x_ND, codes_KD.contiguous(), keep_N), _quantize, *how)  # type: ignore[return-value]


def _quantize(
    work: Work,
    x_ND: Tensor,
    codes_KD: Tensor,
    keep_N: Tensor | None,
    metric: str,
    precision: str,
    stats: bool,
    learns: bool,
    deterministic: bool,
    keep_codes: bool,
) -> tuple[Tensor, ...]:
    (n, d), k = x_ND.shape, codes_KD.shape[0]
    device = x_ND.device
    valid_N = work.empty(n, dtype=torch.int8, device=device)
    skipped = work.empty(dtype=torch.int64, device=device) if n else torch.zeros((), dtype=torch.int64, device=device)
    # The unit of deterministic sums is a share of the largest number: one that is left out must not set it.
    within_ND = x_ND if not (deterministic and n) else x_ND.clamp(*_most(x_ND, codes_KD, learns))
    gathered = Stats(work, within_ND, k if stats else 0, deterministic, later=stats)
    kept_KD = work.empty(k if keep_codes else 0, d, dtype=torch.float32, device=device)
    row_of_N = work.empty(n if keep_codes else 0, dtype=torch.int16, device=device)
    index_N = search(
        work, x_ND, codes_KD, metric, precision, keep_N, valid_N, skipped, gathered, kept_KD if keep_codes else None,
        learns=learns,
    )  # fmt: skip
    q_ND = work.empty(n, d, dtype=x_ND.dtype, device=device)
    block_d = min(64, power_of_2(d))
    block_n = max(1, 2048 // block_d)
    programs = cdiv(n, block_n)
    errors = Errors(
        work.empty(2, programs, dtype=torch.float32, device=device),
        work.empty(dtype=torch.float32, device=device),
        work.empty(dtype=torch.float32, device=device),
    )
    finish = gathered.done is not None and gathered.copies == 1  # else another launch adds up copies and errors
    if n:
        work.launch(
            _gather_kernel, (programs,), x_ND, index_N, valid_N, codes_KD, q_ND, row_of_N, errors.parts,
            gathered.sums, gathered.counts, gathered.unit, gathered.done if finish else index_N,
            errors.mean, errors.share, n, k, gathered.copies, x_ND.stride(0), x_ND.stride(1),
            KEPT=keep_codes, STATS=stats, FIXED=deterministic, FINISH=finish,
            D=d, BLOCK_N=block_n, BLOCK_D=block_d, PARTS=min(PARTS, power_of_2(programs)),
        )  # fmt: skip
    sums_KD, counts_K = gathered.total(None if finish else errors)
    return q_ND, errors.mean, index_N, sums_KD, counts_K, skipped, valid_N, errors.share, kept_KD, row_of_N


def _most(x_ND: Tensor, codes_KD: Tensor, learns: bool) -> tuple[Tensor, Tensor]:
    """The lowest and the highest number that a vector which counts may hold, and a little more (ops/bound.py)."""
    length_N = lengths(x_ND)
    most = limit_of(length_N, codes_KD) if learns else length_N.new_full((), largest(length_N.dtype))
    most = (1.01 * most).to(x_ND.dtype)
    return -most, most


@triton.jit
def _backward_kernel(
    grad_ptr, scale_ptr, share_ptr, x_ptr, rows_ptr, row_ptr, valid_ptr, out_ptr,
    N, D, grad_n, grad_d, stride_n, stride_d,
    GATHER: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    dim = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = (row[:, None] < N) & (dim[None, :] < D)
    valid = tl.load(valid_ptr + row, row < N, 0) != 0
    factor = 2 * tl.load(scale_ptr).to(tl.float32) * tl.load(share_ptr)
    grad = tl.load(grad_ptr + row[:, None] * grad_n + dim[None, :] * grad_d, inside, 0.0).to(tl.float32)
    x = tl.load(x_ptr + row[:, None] * stride_n + dim[None, :] * stride_d, inside, 0.0).to(tl.float32)
    source = row
    if GATHER:
        source = tl.load(row_ptr + row, row < N, 0).to(tl.int64)
    q = tl.load(rows_ptr + source[:, None] * D + dim[None, :], inside, 0.0)
    q = q.to(out_ptr.dtype.element_ty).to(tl.float32)  # as the forward pass handed it on
    out = grad + factor * tl.where(valid[:, None], x - q, 0.0)
    tl.store(out_ptr + row[:, None] * D + dim[None, :], out.to(out_ptr.dtype.element_ty), inside)


def backward_triton(
    grad_ND: Tensor,
    grad_error: Tensor,
    x_ND: Tensor,
    rows: Tensor,
    row_of_N: Tensor | None,
    valid_N: Tensor,
    share: Tensor,
) -> Tensor:
    """grad_q + 2 grad_error share (x - q) where valid (int8), in the type of x."""
    key = ("backward", *shape_of(grad_ND), *shape_of(x_ND), grad_error.dtype, rows.dtype, rows.shape, row_of_N is None)
    inputs = (grad_ND, grad_error, x_ND, rows.contiguous(), row_of_N, valid_N, share)
    return replayed(key, inputs, _backward)[0]


def _backward(
    work: Work,
    grad_ND: Tensor,
    grad_error: Tensor,
    x_ND: Tensor,
    rows: Tensor,
    row_of_N: Tensor | None,
    valid_N: Tensor,
    share: Tensor,
) -> tuple[Tensor]:
    n, d = x_ND.shape
    out_ND = work.empty(n, d, dtype=x_ND.dtype, device=x_ND.device)
    if n:
        block_d = min(256, power_of_2(d))
        block_n = max(1, 4096 // block_d)
        work.launch(
            _backward_kernel, (cdiv(n, block_n), cdiv(d, block_d)), grad_ND, grad_error, share, x_ND, rows,
            valid_N if row_of_N is None else row_of_N, valid_N, out_ND,
            n, d, grad_ND.stride(0), grad_ND.stride(1), x_ND.stride(0), x_ND.stride(1),
            GATHER=row_of_N is not None, BLOCK_N=block_n, BLOCK_D=block_d,
        )  # fmt: skip
    return (out_ND,)
