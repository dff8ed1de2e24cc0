"""Which code of a slot is the closest, and whether that is proven: what the search on CUDA asks last.

Legend: N vectors x, K codes w, D dimensions (DP: padded to a power of two).
The search (triton/search.py) knows for each vector the slot of a tile that holds its best code, a few codes. Here they
are compared in float32. Where the search had products of half numbers alone, the best of these is the closest code of
all if no other slot can hold a better one (`_bound`). Vectors without that proof are put on a list, and searched again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from topovq.ops.triton.codes import part_of_size, row_scale

SLOTS = tl.constexpr(16)  # of a row, which share the columns of a tile of codes
ROUNDING = tl.constexpr(2.0**-17)  # more than sums of products in float32 are off by


@triton.jit
def centered(x_ptr, center_ptr, row, dim, wanted, D, stride_n, stride_d, WHOLE: tl.constexpr):
    """The entries `dim` of the vectors wanted, from the center on; others are 0."""
    on = wanted[:, None] & (dim < D)[None, :]
    x = tl.load(x_ptr + row[:, None] * stride_n + dim[None, :] * stride_d, on, 0.0).to(tl.float32)
    if not WHOLE:
        x = tl.where(on, x - tl.load(center_ptr + dim, dim < D, 0.0)[None, :], 0.0)
    return x


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
        x = centered(x_ptr, center_ptr, row, dim, wanted, D, stride_n, stride_d, WHOLE) * scale[:, None]
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
def which_kernel(
    found_ptr, best_ptr, runner_ptr, x_ptr, other_ptr, center_ptr, hi_ptr, lo_ptr, scale_ptr, bias_ptr, out_ptr,
    rows_ptr, number_ptr,
    N, D, K, shares, stride_n, stride_d,
    OTHER: tl.constexpr, EXACT: tl.constexpr, WHOLE: tl.constexpr, CERTIFY: tl.constexpr, LISTED: tl.constexpr,
    EUCLIDEAN: tl.constexpr,
    DP: tl.constexpr, DC: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The best of all shares, in which codes rise, and which code of its slot it is; the lowest wins a tie.

    With CERTIFY vectors without a proof are put on the list."""
    place_N = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row = place_N
    inside = row < N
    if LISTED:
        number = tl.load(number_ptr)
        if tl.program_id(0) * ROWS >= number:
            return
        inside = place_N < number
        row = tl.load(rows_ptr + place_N, inside, 0).to(tl.int64)
    best = tl.load(best_ptr + place_N, inside, 0.0)
    found = tl.load(found_ptr + place_N, inside, 0)
    runner = best
    if CERTIFY:
        runner = tl.load(runner_ptr + place_N, inside, 0.0)
    for share in range(1, shares):
        place = tl.zeros([ROWS], tl.int64) + share
        place = place * N + place_N
        value = tl.load(best_ptr + place, inside, float("inf"))
        better = value < best
        found = tl.where(better, tl.load(found_ptr + place, inside, 0), found)
        if CERTIFY:
            others = tl.load(runner_ptr + place, inside, float("inf"))
            runner = tl.where(better, tl.minimum(best, others), tl.minimum(runner, value))
        best = tl.where(better, value, best)
    size = tl.zeros([ROWS], tl.float32)
    for start in range(0, DP, DC):
        dim = start + tl.arange(0, DC)
        size += part_of_size(centered(x_ptr, center_ptr, row, dim, inside, D, stride_n, stride_d, WHOLE))
    scale = row_scale(size)
    not_code = tl.zeros([ROWS], tl.int32)
    if OTHER:
        not_code = tl.load(other_ptr + row, inside, 0).to(tl.int32)
    tile, slot, slots = (found >> 20).to(tl.int32), (found >> 16).to(tl.int32) & 15, found.to(tl.int32) & 65535
    wanted = inside & (size < float("inf"))
    best = tl.full([ROWS], float("inf"), tl.float32)
    index = tl.minimum(tile * BLOCK_K, K - 1)
    best, index = _slot_best(
        x_ptr, center_ptr, hi_ptr, lo_ptr, scale_ptr, bias_ptr, row, scale, tile, slot, wanted, not_code, best, index,
        D, stride_n, stride_d, OTHER, EXACT, WHOLE, DP, DC, ROWS, BLOCK_K,
    )  # fmt: skip
    if CERTIFY:
        bound = _bound(
            x_ptr, center_ptr, row, scale, best, wanted, D, stride_n, stride_d, EUCLIDEAN, WHOLE, DP, DC, ROWS
        )  # fmt: skip
        unproven = wanted & ~(runner - bound > best)  # also where something is NaN
        place = tl.atomic_add(number_ptr + tl.zeros([ROWS], tl.int32), tl.full([ROWS], 1, tl.int32), unproven)
        tl.store(rows_ptr + place, row.to(tl.int32), unproven)
    else:
        more = tl.where(wanted, slots & ~(1 << slot), 0)
        if tl.max(more, 0) > 0:  # another slot of the tile is as good: rare, but for codes that are alike
            for other in range(SLOTS):
                best, index = _slot_best(
                    x_ptr, center_ptr, hi_ptr, lo_ptr, scale_ptr, bias_ptr, row, scale, tile,
                    tl.zeros([ROWS], tl.int32) + other, (more >> other) & 1 > 0, not_code, best, index,
                    D, stride_n, stride_d, OTHER, EXACT, WHOLE, DP, DC, ROWS, BLOCK_K,
                )  # fmt: skip
    tl.store(out_ptr + row, tl.minimum(index, K - 1).to(tl.int64), inside)


@triton.jit
def _bound(
    x_ptr, center_ptr, row, scale, best, wanted, D, stride_n, stride_d,
    EUCLIDEAN: tl.constexpr, WHOLE: tl.constexpr, DP: tl.constexpr, DC: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """How far the score hi.hi of a code that is closer than `best` can be from its true one.

    In units in which x has length |x|: such a code w lies within r of x, r^2 = |x|^2 + 2 best, so |w| <= |x| + r, and
    it is no longer than the longest code. Half numbers leave out x - hi, which is known, and of w at most `apart`: the
    most that they leave out of any code, or 2^-11 of each entry. So the product is off by at most
    |x - hi| |w| + |x| apart. Sums in float32 add less than ROUNDING (|x| + |w|) |w|.
    """
    rest = tl.zeros([ROWS], tl.float32)  # |x - hi|^2
    whole = rest  # |x|^2 as it is multiplied
    moved = rest  # |x|^2 from the center
    for start in range(0, DP, DC):
        dim = start + tl.arange(0, DC)
        x = centered(x_ptr, center_ptr, row, dim, wanted, D, stride_n, stride_d, WHOLE) * scale[:, None]
        left = x - x.to(tl.float16).to(tl.float32)
        rest += tl.sum(left * left, 1)
        whole += tl.sum(x * x, 1)
        if WHOLE:
            x = centered(x_ptr, center_ptr, row, dim, wanted, D, stride_n, stride_d, False) * scale[:, None]
        moved += tl.sum(x * x, 1)
    length = scale  # |w|, of codes that have length one
    if EUCLIDEAN:
        length = tl.sqrt(moved) + tl.sqrt(tl.maximum(moved + 2 * best * scale, 0.0))
        length = tl.minimum(length, tl.load(center_ptr + D + 1) * 1.0001 * scale)
    apart = tl.minimum(length * 0.00048828125, tl.load(center_ptr + D + 2) * 1.001 * scale)
    off = tl.sqrt(rest) + ROUNDING * (tl.sqrt(whole) + length)
    return (off * length + tl.sqrt(whole) * apart) / scale
