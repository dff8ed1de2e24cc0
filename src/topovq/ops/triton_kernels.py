"""Triton kernels behind `nearest`, `accumulate` and `smooth` on CUDA; TRITON_INTERPRET=1 runs them on CPU tensors.

Legend: N vectors, K codes, D dimensions, M steps on the map.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _nearest_kernel(
    x_ptr, center_ptr, w_ptr, bias_ptr, index_ptr,
    N, K, D, stride_n, stride_d,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    best = tl.full([BLOCK_N], float("inf"), tl.float32)
    index = tl.zeros([BLOCK_N], tl.int32)
    for first in range(0, K, BLOCK_K):
        code = first + tl.arange(0, BLOCK_K)
        dot = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        for start in range(0, D, BLOCK_D):
            dim = start + tl.arange(0, BLOCK_D)
            inside = (row[:, None] < N) & (dim[None, :] < D)
            x = tl.load(x_ptr + row[:, None] * stride_n + dim[None, :] * stride_d, inside, 0.0).to(tl.float32)
            x = x - tl.load(center_ptr + dim, dim < D, 0.0)[None, :]
            w = tl.load(w_ptr + code[None, :] * D + dim[:, None], (code[None, :] < K) & (dim[:, None] < D), 0.0)
            dot = tl.dot(x, w, dot, input_precision="tf32x3")
        bias = tl.load(bias_ptr + code, code < K, float("inf"))
        score, place = tl.min(bias[None, :] - dot, 1, return_indices=True, return_indices_tie_break_left=True)
        better = score < best  # false for NaN: such a row keeps a valid index
        best = tl.where(better, score, best)
        index = tl.where(better, first + place.to(tl.int32), index)
    tl.store(index_ptr + row, index.to(tl.int64), row < N)


def nearest_triton(x_ND: Tensor, center_D: Tensor, w_KD: Tensor, bias_K: Tensor) -> Tensor:
    """Index int64 [N] of the code that minimizes bias_k - (x - center) . w_k; products in three TF32 passes."""
    n, d = x_ND.shape
    index_N = torch.empty(n, dtype=torch.int64, device=x_ND.device)
    if n == 0:
        return index_N
    block_n, block_k, block_d = 64, 64, max(16, min(64, triton.next_power_of_2(d)))
    with _on(x_ND):
        _nearest_kernel[(triton.cdiv(n, block_n),)](
            x_ND, center_D, w_KD.contiguous(), bias_K, index_N,
            n, len(w_KD), d, x_ND.stride(0), x_ND.stride(1),
            BLOCK_N=block_n, BLOCK_K=block_k, BLOCK_D=block_d,
        )  # fmt: skip
    return index_N


@triton.jit
def _accumulate_kernel(
    x_ptr, index_ptr, sums_ptr, counts_ptr,
    N, D, stride_n, stride_d,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    dim = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    index = tl.load(index_ptr + row, row < N, -1)
    kept = index >= 0
    inside = kept[:, None] & (dim[None, :] < D)
    x = tl.load(x_ptr + row[:, None] * stride_n + dim[None, :] * stride_d, inside, 0.0).to(tl.float32)
    tl.atomic_add(sums_ptr + index[:, None] * D + dim[None, :], x, inside, sem="relaxed")
    if tl.program_id(1) == 0:
        tl.atomic_add(counts_ptr + index, tl.full([BLOCK_N], 1.0, tl.float32), kept, sem="relaxed")


def accumulate_triton(x_ND: Tensor, index_N: Tensor, num_codes: int) -> tuple[Tensor, Tensor]:
    """(sums [K, D], counts [K]), float32."""
    n, d = x_ND.shape
    sums_KD = torch.zeros(num_codes, d, dtype=torch.float32, device=x_ND.device)
    counts_K = torch.zeros(num_codes, dtype=torch.float32, device=x_ND.device)
    if n == 0:
        return sums_KD, counts_K
    block_n, block_d = 64, min(64, triton.next_power_of_2(d))
    with _on(x_ND):
        _accumulate_kernel[(triton.cdiv(n, block_n), triton.cdiv(d, block_d))](
            x_ND, index_N.contiguous(), sums_KD, counts_K, n, d, x_ND.stride(0), x_ND.stride(1),
            BLOCK_N=block_n, BLOCK_D=block_d,
        )  # fmt: skip
    return sums_KD, counts_K


@triton.jit
def _stencil_kernel(
    stats_ptr, steps_ptr, weights_ptr, out_ptr,
    K, C, M, n0, n1, n2,
    WRAP0: tl.constexpr, WRAP1: tl.constexpr, WRAP2: tl.constexpr, HEXAGONAL: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    code = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (code[:, None] < K) & (column[None, :] < C)
    c0, c1, c2 = code // (n1 * n2), (code // n2) % n1, code % n2
    out = tl.load(stats_ptr + code[:, None].to(tl.int64) * C + column[None, :], inside, 0.0)
    for m in range(M):
        s2 = tl.load(steps_ptr + 3 * m + 2)
        if HEXAGONAL:
            s1 = tl.load(steps_ptr + 3 * m + 1)
            # Steps along a row count half cells; from an odd row an odd step leads one column further.
            s2 = (s2 + (s1 & 1) * (2 * (c1 & 1) - 1)) >> 1
        a0, a1, a2 = c0 + tl.load(steps_ptr + 3 * m), c1 + tl.load(steps_ptr + 3 * m + 1), c2 + s2
        if WRAP0:
            a0 = (a0 + n0) % n0
        if WRAP1:
            a1 = (a1 + n1) % n1
        if WRAP2:
            a2 = (a2 + n2) % n2
        on = (a0 >= 0) & (a0 < n0) & (a1 >= 0) & (a1 < n1) & (a2 >= 0) & (a2 < n2)
        source = ((a0 * n1 + a1) * n2 + a2).to(tl.int64)
        value = tl.load(stats_ptr + source[:, None] * C + column[None, :], inside & on[:, None], 0.0)
        out += tl.load(weights_ptr + m) * value
    tl.store(out_ptr + code[:, None].to(tl.int64) * C + column[None, :], out, inside)


def stencil_triton(
    stats_KC: Tensor, steps_M3: Tensor, weights_M: Tensor, shape: tuple[int, ...], wrap: tuple[bool, ...],
    hexagonal: bool,
) -> Tensor:  # fmt: skip
    """out_k = stats_k + sum over m of weights_m * stats_{k + step_m} over a grid of up to 3 axes (float32)."""
    k, c = stats_KC.shape
    sizes = (1,) * (3 - len(shape)) + tuple(shape)
    wraps = (False,) * (3 - len(wrap)) + tuple(wrap)
    out_KC = torch.empty_like(stats_KC)
    block_c = min(64, triton.next_power_of_2(c))
    with _on(stats_KC):
        _stencil_kernel[(triton.cdiv(k, 32), triton.cdiv(c, block_c))](
            stats_KC, steps_M3, weights_M, out_KC, k, c, len(weights_M), *sizes,
            WRAP0=wraps[0], WRAP1=wraps[1], WRAP2=wraps[2], HEXAGONAL=hexagonal, BLOCK_K=32, BLOCK_C=block_c,
        )  # fmt: skip
    return out_KC


def _on(tensor: Tensor) -> torch.cuda.device:
    """Launch on the tensor's device (index -1, for the interpreter, changes nothing)."""
    return torch.cuda.device(tensor.device.index if tensor.is_cuda else -1)
