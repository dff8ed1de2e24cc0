"""Statistics on CUDA: sums and counts of the vectors that chose each code.

Atomic additions to one address wait for each other. So that a popular code is no bottleneck, small codebooks get
several copies of their statistics, added up afterwards, and a tile in which many chose one code adds those up first.
`FIXED` adds fixed-point integers instead of floats: their sum has no order, so it is deterministic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16_384  # codes times copies
MOST_COPIES = 32
VECTORS = 16_384  # per copy, at least: with fewer, waiting costs less than another copy


@triton.jit
def add_rows(sums_ptr, place, dim, D, x, valid, alike, crowded, unit_ptr, FIXED: tl.constexpr):
    """Add the rows of x to rows `place` of memory; in a crowded tile those that are alike are added up first."""
    inside = valid[:, None] & (dim[None, :] < D)
    if FIXED:
        x = (x.to(tl.float64) / tl.load(unit_ptr)).to(tl.int64)
    if crowded:
        together = tl.sum(tl.where(alike[:, None] & inside, x, 0), 0)
        there = tl.max(tl.where(alike, place, 0), 0)
        tl.atomic_add(sums_ptr + there * D + dim, together, dim < D, sem="relaxed")
        inside = inside & ~alike[:, None]
    tl.atomic_add(sums_ptr + place[:, None] * D + dim[None, :], x, inside, sem="relaxed")


@triton.jit
def add_counts(counts_ptr, place, valid, BLOCK_N: tl.constexpr):
    """(alike, crowded): which rows chose the code of the first valid row, and whether those are many."""
    slot = tl.arange(0, BLOCK_N)
    first = tl.min(tl.where(valid, slot, BLOCK_N), 0)
    leader = tl.max(tl.where(slot == first, place, 0), 0)
    alike = valid & (place == leader)
    number = tl.sum(alike.to(tl.int32), 0)
    crowded = number * 4 > BLOCK_N
    single = valid
    if crowded:
        tl.atomic_add(counts_ptr + leader, number.to(tl.float32), sem="relaxed")
        single = valid & ~alike
    tl.atomic_add(counts_ptr + place, tl.full([BLOCK_N], 1.0, tl.float32), single, sem="relaxed")
    return alike, crowded


@triton.jit
def _accumulate_kernel(
    x_ptr, index_ptr, sums_ptr, counts_ptr, unit_ptr,
    N, K, D, copies, stride_n, stride_d,
    FIXED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    index = tl.load(index_ptr + row, row < N, -1)
    valid = index >= 0
    place = tl.where(valid, index, 0) + (tl.program_id(0) % copies).to(tl.int64) * K
    alike, crowded = add_counts(counts_ptr, place, valid, BLOCK_N)
    for start in range(0, D, BLOCK_D):
        dim = start + tl.arange(0, BLOCK_D)
        inside = valid[:, None] & (dim[None, :] < D)
        x = tl.load(x_ptr + row[:, None] * stride_n + dim[None, :] * stride_d, inside, 0.0).to(tl.float32)
        add_rows(sums_ptr, place, dim, D, x, valid, alike, crowded, unit_ptr, FIXED)


class Stats:
    """Copies of the statistics to add to, and what they come to."""

    def __init__(self, x_ND: Tensor, num_codes: int, deterministic: bool) -> None:
        (n, d), device = x_ND.shape, x_ND.device
        self.copies = max(1, min(MOST_COPIES, ROWS // max(1, num_codes), n // VECTORS))
        rows = self.copies * num_codes
        if deterministic or self.copies == 1:  # an operation may not return two views of one buffer
            dtype = torch.int64 if deterministic else torch.float32
            self.sums = torch.zeros(self.copies, num_codes, d, dtype=dtype, device=device)
            self.counts = torch.zeros(self.copies, num_codes, device=device)
        else:
            both = torch.zeros(rows * (d + 1), device=device)  # one buffer: one launch less
            self.sums = both[: rows * d].view(self.copies, num_codes, d)
            self.counts = both[rows * d :].view(self.copies, num_codes)
        self.unit = self.counts  # not read, unless:
        if deterministic and n:
            # Sums of n numbers up to the largest stay below 2^62 units.
            self.unit = torch.where(x_ND.isfinite(), x_ND, 0).abs().amax().double().clamp(min=1e-30) * n / 2.0**62

    def total(self) -> tuple[Tensor, Tensor]:
        """(sums [K, D], counts [K]), float32."""
        sums, counts = (self.sums[0], self.counts[0]) if self.copies == 1 else (self.sums.sum(0), self.counts.sum(0))
        return (sums.double() * self.unit).float() if self.unit is not self.counts else sums.float(), counts


def accumulate_triton(
    x_ND: Tensor, index_N: Tensor, num_codes: int, deterministic: bool = False
) -> tuple[Tensor, Tensor]:
    """(sums [K, D], counts [K]), float32."""
    n, d = x_ND.shape
    stats = Stats(x_ND, num_codes, deterministic)
    if n:
        block_d = min(64, power_of_2(d))
        with on_device(x_ND):
            _accumulate_kernel[(cdiv(n, 32),)](
                x_ND, index_N.contiguous(), stats.sums, stats.counts, stats.unit,
                n, num_codes, d, stats.copies, x_ND.stride(0), x_ND.stride(1),
                FIXED=deterministic, BLOCK_N=32, BLOCK_D=block_d,
            )  # fmt: skip
    return stats.total()


def on_device(tensor: Tensor) -> torch.cuda.device:
    """Launch on the tensor's device (index -1, for the interpreter, changes nothing)."""
    return torch.cuda.device(tensor.device.index if tensor.is_cuda else -1)


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up (Triton's own takes the host microseconds)."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The least power of two of at least n."""
    return 1 << max(0, n - 1).bit_length()
