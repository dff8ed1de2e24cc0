"""Statistics on CUDA: sums and counts of the vectors that chose each code.

Atomic additions to one address wait for each other. So that a popular code is no bottleneck, small codebooks get
several copies of their statistics, added up afterwards, and a tile in which many chose one code adds those up first.
`FIXED` adds fixed-point integers instead of floats: their sum has no order, so it is deterministic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from topovq.ops.triton.replay import Work

ROWS = 16_384  # codes times copies
MOST_COPIES = 32
TOTAL = 64  # numbers of which a program adds up the copies
VECTORS = 16_384  # per copy, at least: with fewer, waiting costs less than another copy


@triton.jit
def add_rows(sums_ptr, place, leader, dim, D, x, valid, alike, crowded, unit_ptr, FIXED: tl.constexpr):
    """Add the rows of x to rows `place` of memory; in a crowded tile those that are alike are added up first."""
    inside = valid[:, None] & (dim[None, :] < D)
    if FIXED:
        x = (x.to(tl.float64) / tl.load(unit_ptr)).to(tl.int64)
    if crowded:
        together = tl.sum(tl.where(alike[:, None] & inside, x, 0), 0)
        tl.atomic_add(sums_ptr + leader * D + dim, together, dim < D, sem="relaxed")
        inside = inside & ~alike[:, None]
    tl.atomic_add(sums_ptr + place[:, None] * D + dim[None, :], x, inside, sem="relaxed")


@triton.jit
def add_counts(counts_ptr, place, leader, valid, BLOCK_N: tl.constexpr):
    """(alike, crowded): which rows are of the code `leader`, that of the first row, and whether those are many."""
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
    first = tl.program_id(0).to(tl.int64) * BLOCK_N
    row = first + tl.arange(0, BLOCK_N)
    copy = (tl.program_id(0) % copies).to(tl.int64) * K
    index = tl.load(index_ptr + row, row < N, -1)
    valid = index >= 0
    place = tl.where(valid, index, 0) + copy
    leader = tl.load(index_ptr + first) + copy
    alike, crowded = add_counts(counts_ptr, place, leader, valid, BLOCK_N)
    for start in range(0, D, BLOCK_D):
        dim = start + tl.arange(0, BLOCK_D)
        inside = valid[:, None] & (dim[None, :] < D)
        x = tl.load(x_ptr + row[:, None] * stride_n + dim[None, :] * stride_d, inside, 0.0).to(tl.float32)
        add_rows(sums_ptr, place, leader, dim, D, x, valid, alike, crowded, unit_ptr, FIXED)


@triton.jit
def _add_copies(copies_ptr, total_ptr, program, size, copies, BLOCK: tl.constexpr, COPIES: tl.constexpr):
    place = program * BLOCK + tl.arange(0, BLOCK)
    copy = tl.arange(0, COPIES)
    on = (copy[:, None] < copies) & (place[None, :] < size)
    values = tl.load(copies_ptr + copy[:, None] * size + place[None, :], on, 0.0)
    tl.store(total_ptr + place, tl.sum(values, 0), place < size)


@triton.jit
def mean_error(parts_ptr, mean_ptr, share_ptr, parts, D, PARTS: tl.constexpr):
    """The squared error that the programs of a launch left: its mean per element, and an element's share."""
    part = tl.arange(0, PARTS)
    error = tl.zeros([PARTS], tl.float32)
    number = tl.zeros([PARTS], tl.float32)
    for first in range(0, parts, PARTS):
        error += tl.load(parts_ptr + first + part, first + part < parts, 0.0)
        number += tl.load(parts_ptr + parts + first + part, first + part < parts, 0.0)
    share = 1.0 / tl.maximum(tl.sum(number, 0) * D, 1.0)
    tl.store(share_ptr, share)
    tl.store(mean_ptr, tl.sum(error, 0) * share)


@triton.jit
def _total_kernel(
    sums_ptr, counts_ptr, total_sums_ptr, total_counts_ptr, parts_ptr, mean_ptr, share_ptr,
    sums_size, counts_size, copies, sums_programs, counts_programs, parts, D,
    ERROR: tl.constexpr, BLOCK: tl.constexpr, COPIES: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The copies added up, and in the last program the squared error (`mean_error`)."""
    program = tl.program_id(0)
    if program < sums_programs:
        _add_copies(sums_ptr, total_sums_ptr, program, sums_size, copies, BLOCK, COPIES)
    elif program < sums_programs + counts_programs:
        _add_copies(counts_ptr, total_counts_ptr, program - sums_programs, counts_size, copies, BLOCK, COPIES)
    elif ERROR:
        mean_error(parts_ptr, mean_ptr, share_ptr, parts, D, PARTS)


@dataclass
class Errors:
    """Squared error and number of vectors by program of a launch, float32 [2, programs], and where the whole goes."""

    parts: Tensor
    mean: Tensor
    share: Tensor


class Stats:
    """Copies of the statistics to add to, and what they come to."""

    def __init__(self, work: Work, x_ND: Tensor, num_codes: int, deterministic: bool, later: bool = False) -> None:
        """`later`: a launch between this and the first addition sets them to 0, if `to_clear` is True then."""
        (n, d), device = x_ND.shape, x_ND.device
        self.work = work
        self.deterministic = deterministic
        self.copies = max(1, min(MOST_COPIES, ROWS // max(1, num_codes), n // VECTORS))
        self.to_clear = later and n > 0 and not deterministic
        rows = self.copies * num_codes
        self.done: Tensor | None = None  # programs that are done, set to 0 with the rest
        if self.to_clear:
            self.done = work.empty(1, dtype=torch.int32, device=device)
            self.sums = work.empty(rows, d, dtype=torch.float32, device=device)
            self.counts = work.empty(rows, dtype=torch.float32, device=device)
        else:
            self.sums = torch.zeros(rows, d, dtype=torch.int64 if deterministic else torch.float32, device=device)
            self.counts = torch.zeros(rows, dtype=torch.float32, device=device)
        self.unit = self.counts  # not read, unless:
        if deterministic and n:
            # Sums of n numbers up to the largest stay below 2^62 units.
            self.unit = torch.where(x_ND.isfinite(), x_ND, 0).abs().amax().double().clamp(min=1e-30) * n / 2.0**62

    def total(self, errors: Errors | None = None) -> tuple[Tensor, Tensor]:
        """(sums [K, D], counts [K]), float32; the errors too, in the same launch."""
        sums, counts, d = self.sums, self.counts, self.sums.shape[1]
        programs = (0, 0)
        if self.copies > 1 and not self.deterministic:
            k = len(counts) // self.copies
            sums = self.work.empty(k, d, dtype=torch.float32, device=sums.device)
            counts = self.work.empty(k, dtype=torch.float32, device=sums.device)
            programs = cdiv(sums.numel(), TOTAL), cdiv(k, TOTAL)
        launch = sum(programs) + (errors is not None)
        if launch:
            e = errors or Errors(self.counts[None], self.counts, self.counts)  # not read
            parts = e.parts.shape[1]
            self.work.launch(
                _total_kernel, (launch,), self.sums, self.counts, sums, counts, e.parts, e.mean, e.share,
                sums.numel(), counts.numel(), self.copies, *programs, parts, d,
                ERROR=errors is not None, BLOCK=TOTAL, COPIES=power_of_2(self.copies),
                PARTS=min(4096, power_of_2(parts)),
            )  # fmt: skip
        if self.deterministic:
            sums, counts = sums.view(self.copies, -1, d).sum(0), counts.view(self.copies, -1).sum(0)
            sums = (sums.double() * self.unit).float() if self.unit is not self.counts else sums.float()
        return sums, counts


def accumulate_triton(
    x_ND: Tensor, index_N: Tensor, num_codes: int, deterministic: bool = False
) -> tuple[Tensor, Tensor]:
    """(sums [K, D], counts [K]), float32."""
    n, d = x_ND.shape
    valid_ND = torch.where(index_N[:, None] < 0, 0, x_ND) if deterministic else x_ND
    stats = Stats(Work((x_ND,)), valid_ND, num_codes, deterministic)
    with on_device(x_ND):
        if n:
            _accumulate_kernel[(cdiv(n, 32),)](
                x_ND, index_N.contiguous(), stats.sums, stats.counts, stats.unit,
                n, num_codes, d, stats.copies, x_ND.stride(0), x_ND.stride(1),
                FIXED=deterministic, BLOCK_N=32, BLOCK_D=min(64, power_of_2(d)),
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
