"""The search on CUDA: the closest code of each vector, without an N x K tensor.

Legend: N vectors x, K codes w, D dimensions (DP: padded to a power of two), tiles of BLOCK_N vectors by BLOCK_K codes.
TRITON_INTERPRET=1 runs these kernels on CPU tensors.

Products run on tensor cores, of numbers that are split into two float16 numbers, a = hi + lo (triton/codes.py).
    exact  hi.hi + hi.lo + lo.hi   the error of a float32 dot product
    fast   hi.hi                   11 bits, as TF32 has
The closest code minimizes bias_k - (x - center).w_k (ops/search.py); a row's scale is positive and changes no order.
Vectors of 16 bits have no lo as they are: there `exact` leaves x where it is, adds center.w_k to the bias instead, and
needs two products.

Which code is the best one is not asked tile by tile, which would cost time in each. Columns of a tile that lie in
one thread share a slot, a row has SLOTS of them, and each keeps its lowest score and the tile where that was: no thread
waits for another before the last tile. Then one small kernel compares the few codes of a row's best slot. With a small
codebook every column is a slot of its own (`each`), and that kernel is not needed. No tile costs more than another, and
the time does not depend on where the codes are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from topovq.ops.triton.accumulate import Stats, cdiv, on_device, power_of_2
from topovq.ops.triton.codes import exponent, part_of_size, power_of_two, split, split_codes

BUSY = 264  # programs of large tiles that run at the same time: two on each processor of an H200
SLOTS = tl.constexpr(16)  # of a row, which share the columns of a tile of codes
WHICH = 4  # vectors per program that asks which code of a slot is the best
LEAST_TILES = 8  # of codes in a share
CHUNK = 64  # dimensions at a time where a tile of vectors does not fit the registers


@triton.jit
def _centered(x_ptr, center_ptr, row, dim, wanted, D, stride_n, stride_d, WHOLE: tl.constexpr):
    """The entries `dim` of the vectors wanted, from the center on; others are 0."""
    on = wanted[:, None] & (dim < D)[None, :]
    x = tl.load(x_ptr + row[:, None] * stride_n + dim[None, :] * stride_d, on, 0.0).to(tl.float32)
    if not WHOLE:
        x = tl.where(on, x - tl.load(center_ptr + dim, dim < D, 0.0)[None, :], 0.0)
    return x


@triton.jit
def _row_scale(size):
    e = tl.minimum(exponent(size) + 10, 250)
    return tl.where(size < float("inf"), power_of_two(261 - e), 1.0)


@triton.jit
def _score(dot, scale, bias_ptr, scale_ptr, code, not_code, OTHER: tl.constexpr):
    score = tl.load(bias_ptr + code)[None, :] * scale[:, None] - tl.load(scale_ptr + code)[None, :] * dot
    if OTHER:
        score = tl.where(code[None, :] == not_code[:, None], float("inf"), score)
    return score


@triton.jit
def _better_slots(score, tile, best, at, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """The lowest score of each of a row's SLOTS and its tile; the first tile wins a tie, NaN never wins.

    Columns that are a multiple of 8 apart, in the same half of the tile, share a slot, as they share a thread."""
    value = tl.reshape(tl.min(tl.reshape(score, [BLOCK_N, 2, BLOCK_K // SLOTS, 8]), 2), [BLOCK_N, SLOTS])
    better = value < best
    return tl.where(better, value, best), tl.where(better, tile, at)


@triton.jit
def _better_each(score, tile, best, at):
    """The same with a slot for each column."""
    better = score < best
    return tl.where(better, score, best), tl.where(better, tile, at)


@triton.jit
def _search_kernel(
    x_ptr, keep_ptr, other_ptr, center_ptr, hi_ptr, lo_ptr, scale_ptr, bias_ptr,
    index_ptr, best_ptr, valid_ptr, skipped_ptr,
    N, D, share, stride_n, stride_d,
    HAS_KEEP: tl.constexpr, OTHER: tl.constexpr, VALID: tl.constexpr, EXACT: tl.constexpr, WHOLE: tl.constexpr,
    EACH: tl.constexpr,
    DP: tl.constexpr, DC: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The closest code of all with EACH, else the best slots of a share of the code tiles (_found); of the first share
    also which vectors are valid."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    dim = tl.arange(0, DC)
    first_tile = tl.program_id(1) * share

    # The size of each vector sets its scale; an infinity or NaN in it makes its size one, too.
    size = tl.zeros([BLOCK_N], tl.float32)
    for start in tl.static_range(0, DP, DC):
        x = _centered(x_ptr, center_ptr, row, start + dim, row < N, D, stride_n, stride_d, WHOLE)
        size += part_of_size(x)
    finite = size < float("inf")
    scale = _row_scale(size)
    if VALID:
        # From the center, which is a code, a vector is as long to a thousandth where it is too long.
        counts = size <= tl.load(center_ptr + D)
        valid = counts & (row < N)
        if HAS_KEEP:
            valid = valid & (tl.load(keep_ptr + row, row < N, 0) != 0)
        mine = (row < N) & (tl.program_id(1) == 0)
        tl.store(valid_ptr + row, valid.to(tl.int8), mine)
        bad = tl.sum((mine & ~counts).to(tl.int64), 0)
        if bad > 0:
            tl.atomic_add(skipped_ptr, bad, sem="relaxed")

    not_code = tl.zeros([BLOCK_N], tl.int32)
    if OTHER:
        not_code = tl.load(other_ptr + row, row < N, 0).to(tl.int32)
    column = tl.arange(0, BLOCK_K)
    if EACH:
        best = tl.full([BLOCK_N, BLOCK_K], float("inf"), tl.float32)
        at = tl.zeros([BLOCK_N, BLOCK_K], tl.int32)
    else:
        best = tl.full([BLOCK_N, SLOTS], float("inf"), tl.float32)
        at = tl.zeros([BLOCK_N, SLOTS], tl.int32)
    if DC == DP:
        hi, lo = split(tl.where(finite[:, None], x, 0.0), scale[:, None])
        for tile in range(first_tile, first_tile + share):
            code = tile * BLOCK_K + column
            place = code[None, :].to(tl.int64) * DP + dim[:, None]
            w_hi = tl.load(hi_ptr + place)
            dot = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
            if EXACT:
                if not WHOLE:
                    dot = tl.dot(lo, w_hi, dot)
                dot = tl.dot(hi, tl.load(lo_ptr + place), dot)
            dot = tl.dot(hi, w_hi, dot)
            score = _score(dot, scale, bias_ptr, scale_ptr, code, not_code, OTHER)
            if EACH:
                best, at = _better_each(score, tile, best, at)
            else:
                best, at = _better_slots(score, tile, best, at, BLOCK_N, BLOCK_K)
    else:
        # One loop over (tile, chunk), so that loads run ahead across tiles.
        dot = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        for step in range(share * (DP // DC)):
            tile = first_tile + step // (DP // DC)
            code = tile * BLOCK_K + column
            chunk = (step % (DP // DC)) * DC
            x = _centered(x_ptr, center_ptr, row, chunk + dim, (row < N) & finite, D, stride_n, stride_d, WHOLE)
            hi, lo = split(tl.where(finite[:, None], x, 0.0), scale[:, None])
            place = code[None, :].to(tl.int64) * DP + chunk + dim[:, None]
            w_hi = tl.load(hi_ptr + place)
            if EXACT:
                if not WHOLE:
                    dot = tl.dot(lo, w_hi, dot)
                dot = tl.dot(hi, tl.load(lo_ptr + place), dot)
            dot = tl.dot(hi, w_hi, dot)
            if chunk == DP - DC:
                score = _score(dot, scale, bias_ptr, scale_ptr, code, not_code, OTHER)
                best, at = _better_slots(score, tile, best, at, BLOCK_N, BLOCK_K)
                dot = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    lowest = tl.min(best, 1)
    if EACH:
        code = at * BLOCK_K + column[None, :]
        index = tl.min(tl.where(best == lowest[:, None], code, 2147483647), 1)
        tl.store(index_ptr + row, index.to(tl.int64), row < N)
    else:
        place = tl.program_id(1).to(tl.int64) * N + row
        tl.store(index_ptr + place, _found(best, at, lowest), row < N)
        tl.store(best_ptr + place, lowest, row < N)


@triton.jit
def _found(best, at, lowest):
    """A row's first tile with the lowest score, the first slot that has it there, and in 16 bits all that do."""
    as_good = best == lowest[:, None]
    tile = tl.min(tl.where(as_good, at, 2147483647), 1)
    as_good = as_good & (at == tile[:, None])
    slot = tl.arange(0, SLOTS)[None, :]
    first = tl.min(tl.where(as_good, slot, SLOTS - 1), 1)
    return (tile.to(tl.int64) << 20) | (first << 16) | tl.sum(tl.where(as_good, 1 << slot, 0), 1)


@triton.jit
def _slot_best(
    x_ptr, center_ptr, hi_ptr, lo_ptr, scale_ptr, bias_ptr, row, scale, tile, slot, wanted, not_code, best, index,
    D, stride_n, stride_d,
    OTHER: tl.constexpr, EXACT: tl.constexpr, WHOLE: tl.constexpr,
    DP: tl.constexpr, DC: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The best score so far and its code, with the codes of one slot of each row that is wanted."""
    step = tl.arange(0, BLOCK_K // SLOTS)
    code = (tile * BLOCK_K + slot // 8 * (BLOCK_K // 2) + slot % 8)[:, None] + step[None, :] * 8
    on = wanted[:, None]
    dot = tl.zeros([ROWS, BLOCK_K // SLOTS], tl.float32)
    for start in range(0, DP, DC):
        dim = start + tl.arange(0, DC)
        x = _centered(x_ptr, center_ptr, row, dim, wanted, D, stride_n, stride_d, WHOLE) * scale[:, None]
        place = code[:, :, None].to(tl.int64) * DP + dim[None, None, :]
        w = tl.load(hi_ptr + place, on[:, :, None], 0.0).to(tl.float32)
        if EXACT:
            w += tl.load(lo_ptr + place, on[:, :, None], 0.0).to(tl.float32)
        dot += tl.sum(w * x[:, None, :], 2)
    score = tl.load(bias_ptr + code, on, 0.0) * scale[:, None] - tl.load(scale_ptr + code, on, 0.0) * dot
    if OTHER:
        score = tl.where(code == not_code[:, None], float("inf"), score)
    value = tl.min(score, 1)
    first = tl.min(tl.where(score == value[:, None], code, 2147483647), 1)
    first = tl.where(value == best, tl.minimum(first, index), first)
    taken = wanted & (value <= best) & (first < 2147483647)
    return tl.where(taken, value, best), tl.where(taken, first, index)


@triton.jit
def _which_kernel(
    found_ptr, best_ptr, x_ptr, other_ptr, center_ptr, hi_ptr, lo_ptr, scale_ptr, bias_ptr, out_ptr,
    N, D, K, shares, stride_n, stride_d,
    OTHER: tl.constexpr, EXACT: tl.constexpr, WHOLE: tl.constexpr,
    DP: tl.constexpr, DC: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The best of all shares, in which codes rise, and which code of its slot it is; the lowest wins a tie."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    best = tl.load(best_ptr + row, row < N, 0.0)
    found = tl.load(found_ptr + row, row < N, 0)
    for share in range(1, shares):
        place = tl.zeros([ROWS], tl.int64) + share
        place = place * N + row
        value = tl.load(best_ptr + place, row < N, float("inf"))
        better = value < best
        found = tl.where(better, tl.load(found_ptr + place, row < N, 0), found)
        best = tl.where(better, value, best)
    size = tl.zeros([ROWS], tl.float32)
    for start in range(0, DP, DC):
        dim = start + tl.arange(0, DC)
        size += part_of_size(_centered(x_ptr, center_ptr, row, dim, row < N, D, stride_n, stride_d, WHOLE))
    scale = _row_scale(size)
    not_code = tl.zeros([ROWS], tl.int32)
    if OTHER:
        not_code = tl.load(other_ptr + row, row < N, 0).to(tl.int32)
    tile, slot, slots = (found >> 20).to(tl.int32), (found >> 16).to(tl.int32) & 15, found.to(tl.int32) & 65535
    wanted = (row < N) & (size < float("inf"))
    best = tl.full([ROWS], float("inf"), tl.float32)
    index = tl.minimum(tile * BLOCK_K, K - 1)
    best, index = _slot_best(
        x_ptr, center_ptr, hi_ptr, lo_ptr, scale_ptr, bias_ptr, row, scale, tile, slot, wanted, not_code, best, index,
        D, stride_n, stride_d, OTHER, EXACT, WHOLE, DP, DC, ROWS, BLOCK_K,
    )  # fmt: skip
    more = tl.where(wanted, slots & ~(1 << slot), 0)
    if tl.max(more, 0) > 0:  # another slot of the tile is as good: rare, but for codes that are alike
        for other in range(SLOTS):
            best, index = _slot_best(
                x_ptr, center_ptr, hi_ptr, lo_ptr, scale_ptr, bias_ptr, row, scale, tile,
                tl.zeros([ROWS], tl.int32) + other, (more >> other) & 1 > 0, not_code, best, index,
                D, stride_n, stride_d, OTHER, EXACT, WHOLE, DP, DC, ROWS, BLOCK_K,
            )  # fmt: skip
    tl.store(out_ptr + row, tl.minimum(index, K - 1).to(tl.int64), row < N)


class Tiles(NamedTuple):
    block_n: int
    block_k: int
    chunk: int
    """Dimensions at a time."""
    warps: int
    stages: int
    each: bool = False
    """Each column of the tiles is a slot: more registers, and no second kernel."""


def tile_sizes(k: int, d: int, precision: str) -> Tiles:
    """For a class of shapes, the fastest of those tried on one H200."""
    padded = max(16, power_of_2(d))
    if padded <= 64:
        return Tiles(64, 64, padded, 4, 2, each=True) if k <= 2048 else Tiles(128, 128, padded, 4, 2)
    if padded == 128:
        return Tiles(128, 128, padded, 8, 2) if precision == "exact" else Tiles(64, 128, padded, 4, 2)
    if padded == 256:
        return Tiles(128, 64, padded, 8, 1) if precision == "exact" else Tiles(64, 64, padded, 4, 2)
    return Tiles(128, 128, CHUNK, 8, 3)


def shares_of(programs: int, tiles: int) -> int:
    """Among how many programs the codes are shared, so that few vectors keep a whole device busy."""
    return max(1, min(BUSY // max(1, programs), tiles // LEAST_TILES))


def nearest_triton(
    x_ND: Tensor,
    codes_KD: Tensor,
    metric: str,
    precision: str,
    keep_N: Tensor | None = None,
    valid_N: Tensor | None = None,
    skipped: Tensor | None = None,
    stats: Stats | None = None,
    kept_KD: Tensor | None = None,
    other_than_N: Tensor | None = None,
    tiles: Tiles | None = None,
    learns: bool = False,
) -> Tensor:
    """Index int64 [N] of the closest code, `other_than_N` (one for each vector) if given: the second closest, say.

    Where given, valid_N (int8), skipped (int64) and kept_KD (a copy of the codes) are written to, and stats set to 0 if
    they are `to_clear`; with no vectors, none of it is.
    """
    (n, d), k = x_ND.shape, codes_KD.shape[0]
    device = x_ND.device
    index_N = torch.empty(n, dtype=torch.int64, device=device)
    if n == 0:
        return index_N
    tiles = tiles or tile_sizes(k, d, precision)
    padded = max(16, power_of_2(d))
    programs, tiles_K = cdiv(n, tiles.block_n), cdiv(k, tiles.block_k)
    shares = 1 if tiles.each else shares_of(programs, tiles_K)
    share = cdiv(tiles_K, shares)
    shares = cdiv(tiles_K, share)
    rows = shares * share * tiles.block_k
    exact = precision == "exact"
    whole = exact and x_ND.dtype in (torch.bfloat16, torch.float16)
    codes_KD = codes_KD.contiguous()
    found_SN = index_N if tiles.each else torch.empty(shares, n, dtype=torch.int64, device=device)
    best_SN = index_N if tiles.each else torch.empty(shares, n, dtype=torch.float32, device=device)
    with on_device(x_ND):
        terms = split_codes(x_ND, codes_KD, rows, padded, metric, exact, whole, learns, skipped, stats, kept_KD)
        _search_kernel[(programs, shares)](
            x_ND, index_N if keep_N is None else keep_N, index_N if other_than_N is None else other_than_N,
            *terms, found_SN, best_SN, index_N if valid_N is None else valid_N, index_N if skipped is None else skipped,
            n, d, share, x_ND.stride(0), x_ND.stride(1),
            HAS_KEEP=keep_N is not None, OTHER=other_than_N is not None, VALID=valid_N is not None,
            EXACT=exact, WHOLE=whole, EACH=tiles.each,
            DP=padded, DC=tiles.chunk, BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k,
            num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
        if not tiles.each:
            _which_kernel[(cdiv(n, WHICH),)](
                found_SN, best_SN, x_ND, index_N if other_than_N is None else other_than_N, *terms, index_N,
                n, d, k, shares, x_ND.stride(0), x_ND.stride(1), OTHER=other_than_N is not None,
                EXACT=exact, WHOLE=whole, DP=padded, DC=min(CHUNK, padded), ROWS=WHICH, BLOCK_K=tiles.block_k,
            )  # fmt: skip
    return index_N
