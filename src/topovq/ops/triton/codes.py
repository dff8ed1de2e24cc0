"""What the search on CUDA reads: the codes moved by their center (or normalized), scaled and split in two halves.

Legend: K codes w, D dimensions (DP: padded to a power of two).
A float32 number is split into two float16 numbers, a = hi + lo, after scaling each vector and each code by a power of
two so that its largest entry lies near 2^7: together they hold 22 bits.

Of few dimensions a code is also written as one row of WIDTH numbers whose product with a row of the search (`folded`)
is its whole score: -w in halves, side by side, and its bias in three. Then all codes must have one scale, which some of
them set (`_reach`). Where that does not suit some other code, the codes are `unusual`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from topovq.ops.bound import FAR as _FAR
from topovq.ops.bound import largest
from topovq.ops.search import GOLDEN as _GOLDEN
from topovq.ops.search import SAMPLE, SPREAD
from topovq.ops.triton.accumulate import Stats, cdiv
from topovq.ops.triton.replay import Work

GOLDEN, FAR = tl.constexpr(_GOLDEN), tl.constexpr(_FAR)
BEYOND = tl.constexpr(32.0)  # times `_reach`, a code is too far away to share a scale,
BELOW = tl.constexpr(2.0**-13)  # and too near, unless it is the center
LARGEST = tl.constexpr(largest(torch.float32) / 1024)
BLOCK_K = 16  # codes per program


@triton.jit
def power_of_two(exponent):
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def exponent(x):
    """The biased exponent of positive float32 numbers, kept where scaling by its inverse cannot overflow."""
    e = x.to(tl.int32, bitcast=True) >> 23
    return tl.minimum(tl.maximum(e, 74), 250)


@triton.jit
def split(x, scale):
    scaled = x * scale
    hi = scaled.to(tl.float16)
    return hi, (scaled - hi.to(tl.float32)).to(tl.float16)


@triton.jit
def _center(codes_ptr, dim, K, D, stride, SAMPLE: tl.constexpr):
    """ops/search.py: center_of, of SAMPLE codes; stride is SPREAD modulo K."""
    sample = tl.arange(0, SAMPLE)
    have = sample < K
    row = (sample * stride) % K
    here = have[:, None] & (dim < D)[None, :]
    some = tl.load(codes_ptr + row[:, None].to(tl.int64) * D + dim[None, :], here, 0.0)
    part = dim.to(tl.float32) * GOLDEN
    along = tl.sum(some * (part - tl.floor(part) + 0.5)[None, :], 1)
    before = (along[:, None] < along[None, :]) | ((along[:, None] == along[None, :]) & (sample[:, None] < sample))
    rank = tl.sum((before & have[:, None]).to(tl.int32), 0)
    count = tl.minimum(K, SAMPLE)
    middle = tl.sum(tl.where((have & (rank == count // 2))[:, None], some, 0.0), 0)
    apart = tl.where(here, some - middle[None, :], 0.0)
    near = have & (tl.sum(apart * apart, 1) < tl.sum(middle * middle, 0) / 4)
    helps = 4 * tl.sum(near.to(tl.int32), 0) >= 3 * count
    return tl.where(helps, middle, 0.0)


@triton.jit
def _reach(codes_ptr, center, dim, K, D, stride, SAMPLE: tl.constexpr):
    """The power of two below the distance from the center that a quarter of SAMPLE codes exceed."""
    sample = tl.arange(0, SAMPLE)
    here = (sample < K)[:, None] & (dim < D)[None, :]
    row = ((sample * stride) % K)[:, None].to(tl.int64)
    some = tl.where(here, tl.load(codes_ptr + row * D + dim[None, :], here, 0.0) - center[None, :], 0.0)
    square = tl.sum(some * some, 1)
    square = tl.where(square < float("inf"), square, 0.0)
    longer = (square[:, None] > square[None, :]) | (
        (square[:, None] == square[None, :]) & (sample[:, None] < sample[None, :])
    )
    rank = tl.sum(longer.to(tl.int32), 0)
    return power_of_two(exponent(tl.sqrt(tl.max(tl.where(rank == tl.minimum(K, SAMPLE) // 4, square, 0.0), 0))))


@triton.jit
def row_scale(size):
    """The power of two by which a vector of this `part_of_size` is multiplied; 1 where that is not finite."""
    e = tl.minimum(exponent(size) + 10, 250)
    return tl.where(size < float("inf"), power_of_two(261 - e), 1.0)


@triton.jit
def folded_scale(size, reach):
    """The same for `folded`: vectors much closer to the center than codes are do not become as long as others."""
    return tl.minimum(row_scale(size), 4096.0 / reach)


@triton.jit
def folded(x, scale, reach, column, D: tl.constexpr, PARTS: tl.constexpr):
    """Rows whose product with those of `_fold` is s (bias - x.w), with one s > 0 for each row; x has D columns again
    and again. PARTS: the halves hi, lo, hi; or hi, hi; or hi."""
    hi, lo = split(x, scale[:, None])
    if PARTS == 3:
        hi = tl.where((column // D == 1)[None, :], lo, hi)
    unit = tl.maximum(scale * reach * 8.0, 2.0**-24).to(tl.float16)  # 512 / 64, so that it suits w and bias below
    hi = tl.where((column < PARTS * D)[None, :], hi, unit[:, None])
    return tl.where((column < PARTS * D + 3)[None, :], hi, 0.0)


@triton.jit
def _fold(
    fold_ptr, code, w, bias, reach, dim,
    D: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A row of WIDTH numbers for each code, as `folded` has them for vectors: -w in the halves hi, hi, lo; or hi, lo;
    or hi; then its bias."""
    row = fold_ptr + code[:, None].to(tl.int64) * WIDTH
    hi, lo = split(-w, 512.0 / reach)
    for part in tl.static_range(PARTS):
        half = hi
        if part == PARTS - 1 and PARTS > 1:
            half = lo
        tl.store(row + part * D + dim[None, :], half, (dim < D)[None, :] & (code >= 0)[:, None])
    rest = tl.where(bias < float("inf"), bias * (64.0 / reach) / reach, 0.0)
    for part in tl.static_range(3):
        half = rest.to(tl.float16)
        rest -= half.to(tl.float32)
        if part == 0:
            half = tl.where(bias < float("inf"), half, float("inf"))
        tl.store(fold_ptr + code.to(tl.int64) * WIDTH + PARTS * D + part, half)
    column = tl.arange(0, WIDTH)[None, :]
    tl.store(row + column, tl.zeros([BLOCK_K, WIDTH], tl.float16), (column >= PARTS * D + 3) & (code >= 0)[:, None])


@triton.jit
def part_of_size(x):
    """A share of each row's sum of |x| that does not overflow."""
    return tl.sum(tl.abs(x) * 0.0009765625, 1)


@triton.jit
def _sizes(rows_ptr, row, wanted, D, stride_row, stride_dim, DP: tl.constexpr, ROWS: tl.constexpr):
    """`part_of_size` of some rows, 0 where that is not finite."""
    size = tl.zeros([ROWS], tl.float32)
    WIDTH: tl.constexpr = min(DP, 64)
    for start in tl.static_range(0, DP, WIDTH):  # unrolled: no load waits for the one before
        dim = start + tl.arange(0, WIDTH)
        inside = wanted[:, None] & (dim < D)[None, :]
        x = tl.load(rows_ptr + row[:, None] * stride_row + dim[None, :] * stride_dim, inside, 0.0).to(tl.float32)
        size += part_of_size(x)
    return tl.where(size < float("inf"), size, 0.0)


@triton.jit
def _limit(x_ptr, codes_ptr, N, K, D, stride_n, stride_d, x_stride, stride, DP: tl.constexpr, SAMPLE: tl.constexpr):
    """ops/bound.py: limit_of, as a `part_of_size`; the strides of the samples are SPREAD modulo N and K."""
    sample = tl.arange(0, SAMPLE).to(tl.int64)
    of_x = _sizes(x_ptr, (sample * x_stride) % N, sample < N, D, stride_n, stride_d, DP, SAMPLE)
    of_codes = _sizes(codes_ptr, (sample * stride) % K, sample < K, D, D, 1, DP, SAMPLE)
    number = tl.sum((of_x > 0).to(tl.int32), 0)
    longer = (of_x[:, None] > of_x[None, :]) | ((of_x[:, None] == of_x[None, :]) & (sample[:, None] < sample))
    rank = tl.sum(longer.to(tl.int32), 0)
    above = tl.maximum(tl.minimum((number + 3) // 4, number - 1), 0)
    usual = tl.maximum(tl.max(tl.where(rank == above, of_x, 0.0), 0), tl.max(of_codes, 0))
    return tl.minimum(usual * FAR, LARGEST)


@triton.jit(do_not_specialize=["N", "stride_n", "x_stride"])
def _codes_kernel(
    codes_ptr, center_ptr, hi_ptr, lo_ptr, scale_ptr, bias_ptr, skipped_ptr, sums_ptr, counts_ptr, done_ptr, kept_ptr,
    number_ptr, longest_ptr, fold_ptr, unusual_ptr, x_ptr,
    K, D: tl.constexpr, stride, N, stride_n, stride_d, x_stride, copies,
    EUCLIDEAN: tl.constexpr, COSINE: tl.constexpr, EXACT: tl.constexpr, WHOLE: tl.constexpr, VALID: tl.constexpr,
    LEARNS: tl.constexpr, CLEAR: tl.constexpr, KEPT: tl.constexpr, COUNT: tl.constexpr,
    PARTS: tl.constexpr, WIDTH: tl.constexpr,
    DP: tl.constexpr, BLOCK_K: tl.constexpr, SAMPLE: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    """What the search reads: codes moved by the center (or normalized), scaled and split; rows from K on never win.

    What later launches add to is set to 0 here, and the codes are copied where somebody will want them as they were.
    """
    code = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    dim = tl.arange(0, DP)
    inside = (code[:, None] < K) & (dim[None, :] < D)
    here = code[:, None].to(tl.int64) * D + dim[None, :]
    w = tl.load(codes_ptr + here, inside, 0.0)  # under way while the center is sought
    center = tl.zeros([DP], tl.float32)
    if EUCLIDEAN:
        center = _center(codes_ptr, dim, K, D, stride, SAMPLE)
    if tl.program_id(0) == 0:
        tl.store(center_ptr + dim, center, dim < D)
        if COUNT:
            tl.store(number_ptr, 0)
        if CLEAR:
            tl.store(done_ptr, 0)
        if VALID:
            tl.store(skipped_ptr, 0)
            limit = LARGEST
            if LEARNS:
                limit = _limit(x_ptr, codes_ptr, N, K, D, stride_n, stride_d, x_stride, stride, DP, SOME)
            tl.store(center_ptr + D, limit)
    if KEPT:
        tl.store(kept_ptr + here, w, inside)
    if CLEAR:
        for copy in range(copies):
            first = copy * K  # of few: copies are for small codebooks
            tl.store(sums_ptr + first * D + here, tl.zeros([BLOCK_K, DP], tl.float32), inside)
            tl.store(counts_ptr + first + code, tl.zeros([BLOCK_K], tl.float32), code < K)
    bias = tl.zeros([BLOCK_K], tl.float32)
    if EUCLIDEAN:
        w = tl.where(inside, w - center[None, :], 0.0)
        bias = tl.sum(w * w, 1) / 2
        if WHOLE:
            bias += tl.sum(w * center[None, :], 1)
    if COSINE:
        w = w / tl.maximum(tl.sqrt(tl.sum(w * w, 1)), 1e-12)[:, None]
    # A code that is not finite, or whose square is not, never wins.
    sound = (bias < float("inf")) & (part_of_size(w) < float("inf"))
    w = tl.where(sound[:, None], w, 0.0)
    e = exponent(tl.max(tl.abs(w), 1))
    hi, lo = split(w, power_of_two(261 - e)[:, None])
    if COUNT:
        left = w - hi.to(tl.float32) * power_of_two(e - 7)[:, None]
        tl.store(longest_ptr + tl.program_id(0), tl.max(tl.sum(w * w, 1), 0))
        tl.store(longest_ptr + tl.num_programs(0) + tl.program_id(0), tl.max(tl.sum(left * left, 1), 0))
    place = code[:, None].to(tl.int64) * DP + dim[None, :]
    tl.store(hi_ptr + place, hi)
    if EXACT:
        tl.store(lo_ptr + place, lo)
    tl.store(scale_ptr + code, power_of_two(e - 7))
    bias = tl.where((code < K) & sound, bias, float("inf"))
    tl.store(bias_ptr + code, bias)
    if WIDTH:
        reach = 1.0
        if not COSINE:
            reach = _reach(codes_ptr, center, dim, K, D, stride, SAMPLE)
        if tl.program_id(0) == 0:
            tl.store(center_ptr + D + 3, reach)
        length = tl.sqrt(tl.sum(w * w, 1))
        far = (length > reach * BEYOND) | ((length < reach * BELOW) & (length > 0))
        far = far | ((bias < float("inf")) & (tl.abs(bias / reach) > reach * (BEYOND * BEYOND / 2)))
        unusual = tl.max(far.to(tl.int32), 0)
        tl.store(unusual_ptr + tl.program_id(0), unusual)
        _fold(fold_ptr, code, w, bias, reach, dim, D, PARTS, WIDTH, BLOCK_K)


class Split(NamedTuple):
    """What `_codes_kernel` wrote; rows from K on never win."""

    center: Tensor
    """[D + 4]: the center, the largest `part_of_size` that counts (ops/bound.py), room for two lengths of `longest`,
    and `_reach`."""
    hi: Tensor
    lo: Tensor
    scale_K: Tensor
    bias_K: Tensor


class Fold(NamedTuple):
    """Codes as rows whose product with a vector's is a score, and whether some of each BLOCK_K do not fit that."""

    rows: Tensor
    unusual: Tensor
    parts: int


def split_codes(
    work: Work, x_ND: Tensor, codes_KD: Tensor, rows: int, padded: int, metric: str, exact: bool, whole: bool,
    learns: bool, skipped: Tensor | None, stats: Stats | None, kept_KD: Tensor | None,
    number: Tensor | None = None, longest: Tensor | None = None, fold: Fold | None = None,
) -> Split:  # fmt: skip
    """The codes as the search reads them, `rows` of `padded` dimensions; see `search` for the rest.

    Where given, `number` is set to 0, and each BLOCK_K codes leave two squared lengths in `longest`, float32
    [2, programs]: of the longest code, and of the most that a code's hi leaves out. `fold` is written to where given.
    """
    n, (k, d) = x_ND.shape[0], codes_KD.shape
    device = codes_KD.device
    center = unused = work.empty(d + 4, dtype=torch.float32, device=device)
    hi = work.empty(rows, padded, dtype=torch.float16, device=device)
    lo = work.empty(rows, padded, dtype=torch.float16, device=device) if exact else hi
    scale, bias = (work.empty(rows, dtype=torch.float32, device=device) for _ in range(2))
    terms = Split(center, hi, lo, scale, bias)
    sums, counts, done = (unused,) * 3 if stats is None else (stats.sums, stats.counts, stats.done)
    work.launch(
        _codes_kernel, (cdiv(rows, BLOCK_K),), codes_KD, *terms,
        unused if skipped is None else skipped, sums, counts, unused if done is None else done,
        unused if kept_KD is None else kept_KD,
        unused if number is None else number, unused if longest is None else longest,
        unused if fold is None else fold.rows, unused if fold is None else fold.unusual,
        x_ND, k, d, SPREAD % k, n, x_ND.stride(0), x_ND.stride(1), SPREAD % n,
        1 if stats is None else stats.copies,
        EUCLIDEAN=metric == "euclidean", COSINE=metric == "cosine", EXACT=exact, WHOLE=whole,
        VALID=skipped is not None, LEARNS=learns, CLEAR=stats is not None and stats.to_clear, KEPT=kept_KD is not None,
        COUNT=number is not None,
        PARTS=0 if fold is None else fold.parts, WIDTH=0 if fold is None else fold.rows.shape[1],
        DP=padded, BLOCK_K=BLOCK_K, SAMPLE=max(8, min(SAMPLE, 4096 // padded)), SOME=SAMPLE,
    )  # fmt: skip
    return terms
