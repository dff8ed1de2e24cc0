"""The search on CUDA: the closest code of each vector, without an N x K tensor.

Legend: N vectors x, K codes w, D dimensions (DP: padded to a power of two), tiles of BLOCK_N vectors by BLOCK_K codes.
TRITON_INTERPRET=1 runs these kernels on CPU tensors.

Products run on tensor cores, of numbers that are split into two float16 numbers, a = hi + lo (triton/codes.py).
    exact  hi.hi + hi.lo + lo.hi   the error of a float32 dot product
    fast   hi.hi                   11 bits, as TF32 has
The closest code minimizes bias_k - (x - center).w_k (ops/search.py); a row's scale is positive and changes no order.
For large shapes `exact` is hi.hi, too, with a proof for each vector that no code can be closer than those which are
then compared in float32 (triton/which.py). Vectors without a proof, mostly a few percent, are searched once more.
Of few dimensions all products and the bias are one product of longer rows (`Fold`), which is the score: what is left to
do for each score is to compare it. Where the codes do not fit that, a second launch searches as above.
Vectors of 16 bits have no lo as they are: there `exact` leaves x where it is, adds center.w_k to the bias instead, and
needs two products.

Which code is the best one is not asked tile by tile, which would cost time in each. Columns of a tile that lie in
one thread share a slot, a row has SLOTS of them, and each keeps its lowest score and the tile where that was: no thread
waits for another before the last tile. Then one small kernel compares the few codes of a row's best slot. With a small
codebook every column is a slot of its own (`each`), and that kernel is not needed. No tile costs more than another, and
the time does not depend on where the codes are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from topovq.ops.triton.accumulate import Stats, cdiv, power_of_2
from topovq.ops.triton.codes import BLOCK_K as CODES
from topovq.ops.triton.codes import Fold, folded, folded_scale, part_of_size, row_scale, split, split_codes
from topovq.ops.triton.replay import Work, replayed
from topovq.ops.triton.tiles import Pass, proves, shares_of, tile_sizes, width_of
from topovq.ops.triton.which import SLOTS, centered, which_kernel

WHICH = 4  # vectors per program that asks which code of a slot is the best
AT_ONCE = 128  # dimensions that it compares at a time
LISTED_WHICH = 8  # vectors of the list per program: few, so that programs without any cost little
LISTED_SHARES = 16  # of the codes, at most, among which vectors on the list are searched
LISTED = 2**20  # vectors times shares, at most
LOOKED_AT = 1024  # vectors at most that are asked for their proof, to know how many of all have one
PARTS = tl.constexpr(1024)  # of the codes, of which one program looks at what each has left


@triton.jit
def _score(dot, scale, bias_ptr, scale_ptr, code, not_code, OTHER: tl.constexpr):
    score = tl.load(bias_ptr + code)[None, :] * scale[:, None] - tl.load(scale_ptr + code)[None, :] * dot
    if OTHER:
        score = tl.where(code[None, :] == not_code[:, None], float("inf"), score)
    return score


@triton.jit
def _better_slots(score, tile, best, at, second, SECOND: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """The lowest score of each of a row's SLOTS and its tile; the first tile wins a tie, NaN never wins. With SECOND
    also the lowest of its other tiles.

    Columns that are a multiple of 8 apart, in the same half of the tile, share a slot, as they share a thread."""
    value = tl.reshape(tl.min(tl.reshape(score, [BLOCK_N, 2, BLOCK_K // SLOTS, 8]), 2), [BLOCK_N, SLOTS])
    if SECOND:
        second = tl.minimum(second, tl.maximum(best, value))
    better = value < best
    return tl.where(better, value, best), tl.where(better, tile, at), second


@triton.jit
def _better_each(score, tile, best, at):
    """The same with a slot for each column."""
    better = score < best
    return tl.where(better, score, best), tl.where(better, tile, at)


@triton.jit
def _search_kernel(
    x_ptr, keep_ptr, other_ptr, center_ptr, hi_ptr, lo_ptr, scale_ptr, bias_ptr,
    index_ptr, best_ptr, runner_ptr, valid_ptr, skipped_ptr, rows_ptr, number_ptr, longest_ptr, fold_ptr, unusual_ptr,
    N, D: tl.constexpr, share, parts, stride_n, stride_d,
    HAS_KEEP: tl.constexpr, OTHER: tl.constexpr, VALID: tl.constexpr, EXACT: tl.constexpr, WHOLE: tl.constexpr,
    EACH: tl.constexpr, CERTIFY: tl.constexpr, LISTED: tl.constexpr,
    FOLD: tl.constexpr, WIDTH: tl.constexpr, UNFOLDED: tl.constexpr,
    DP: tl.constexpr, DC: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The closest code of all with EACH, else the best slots of a share of the code tiles (_found); of the first share
    also which vectors are valid. With CERTIFY also the best score of all other slots and tiles, and the lengths that
    triton/codes.py left. LISTED: of the vectors on a list, whose number only the device knows. FOLD: by products of
    rows of WIDTH numbers, of so many halves; UNFOLDED: only where the codes are too unusual for that."""
    if WIDTH:
        unusual = tl.zeros([PARTS], tl.int32)
        for start in range(0, parts, PARTS):
            part = start + tl.arange(0, PARTS)
            unusual = unusual | tl.load(unusual_ptr + part, part < parts, 0)
        if (tl.max(unusual, 0) > 0) != UNFOLDED:
            return
    place_N = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = place_N
    wanted = row < N
    if LISTED:
        number = tl.load(number_ptr)
        if tl.program_id(0) * BLOCK_N >= number:
            return
        wanted = place_N < number
        row = tl.load(rows_ptr + place_N, wanted, 0).to(tl.int64)
    if CERTIFY:  # noqa: SIM102  known when this is compiled, and the next is not
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            for which in tl.static_range(2):
                some = tl.zeros([PARTS], tl.float32)
                for start in range(0, parts, PARTS):
                    part = start + tl.arange(0, PARTS)
                    some = tl.maximum(some, tl.load(longest_ptr + which * parts + part, part < parts, 0.0))
                tl.store(center_ptr + D + 1 + which, tl.sqrt(tl.max(some, 0)))
    dim = tl.arange(0, DC)
    first_tile = tl.program_id(1) * share

    # The size of each vector sets its scale; an infinity or NaN in it makes its size one, too.
    size = tl.zeros([BLOCK_N], tl.float32)
    for start in tl.static_range(0, DP, DC):
        x = centered(x_ptr, center_ptr, row, start + dim, wanted, D, stride_n, stride_d, WHOLE)
        size += part_of_size(x)
    finite = size < float("inf")
    if FOLD:
        reach = tl.load(center_ptr + D + 3)
        scale = folded_scale(size, reach)
    else:
        scale = row_scale(size)
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
        not_code = tl.load(other_ptr + row, wanted, 0).to(tl.int32)
    column = tl.arange(0, BLOCK_K)
    if EACH:
        best = tl.full([BLOCK_N, BLOCK_K], float("inf"), tl.float32)
        at = tl.zeros([BLOCK_N, BLOCK_K], tl.int32)
    else:
        best = tl.full([BLOCK_N, SLOTS], float("inf"), tl.float32)
        at = tl.zeros([BLOCK_N, SLOTS], tl.int32)
    second = best
    if FOLD:
        column_of_row = tl.arange(0, WIDTH)
        x = centered(x_ptr, center_ptr, row, column_of_row % D, wanted & finite, D, stride_n, stride_d, WHOLE)
        x = folded(tl.where(finite[:, None], x, 0.0), scale, reach, column_of_row, D, FOLD)
        for tile in range(first_tile, first_tile + share):
            code = tile * BLOCK_K + column
            place = code[None, :].to(tl.int64) * WIDTH + column_of_row[:, None]
            score = tl.dot(x, tl.load(fold_ptr + place))
            if OTHER:
                score = tl.where(code[None, :] == not_code[:, None], float("inf"), score)
            if EACH:
                best, at = _better_each(score, tile, best, at)
            else:
                best, at, second = _better_slots(score, tile, best, at, second, CERTIFY, BLOCK_N, BLOCK_K)
    elif DC == DP:
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
                best, at, second = _better_slots(score, tile, best, at, second, CERTIFY, BLOCK_N, BLOCK_K)
    else:
        # One loop over (tile, chunk), so that loads run ahead across tiles.
        dot = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        for step in range(share * (DP // DC)):
            tile = first_tile + step // (DP // DC)
            code = tile * BLOCK_K + column
            chunk = (step % (DP // DC)) * DC
            x = centered(x_ptr, center_ptr, row, chunk + dim, wanted & finite, D, stride_n, stride_d, WHOLE)
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
                best, at, second = _better_slots(score, tile, best, at, second, CERTIFY, BLOCK_N, BLOCK_K)
                dot = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    lowest = tl.min(best, 1)
    if EACH:
        code = at * BLOCK_K + column[None, :]
        index = tl.min(tl.where(best == lowest[:, None], code, 2147483647), 1)
        tl.store(index_ptr + row, index.to(tl.int64), row < N)
    else:
        place = tl.program_id(1).to(tl.int64) * N + place_N
        found = _found(best, at, lowest)
        tl.store(index_ptr + place, found, wanted)
        tl.store(best_ptr + place, lowest, wanted)
        if CERTIFY:
            taken = tl.arange(0, SLOTS)[None, :] == ((found >> 16) & 15)[:, None]
            others = tl.minimum(tl.where(taken, float("inf"), best), second)
            tl.store(runner_ptr + place, tl.min(others, 1), wanted)


@triton.jit
def _found(best, at, lowest):
    """A row's first tile with the lowest score, the first slot that has it there, and in 16 bits all that do."""
    as_good = best == lowest[:, None]
    tile = tl.min(tl.where(as_good, at, 2147483647), 1)
    as_good = as_good & (at == tile[:, None])
    slot = tl.arange(0, SLOTS)[None, :]
    first = tl.min(tl.where(as_good, slot, SLOTS - 1), 1)
    return (tile.to(tl.int64) << 20) | (first << 16) | tl.sum(tl.where(as_good, 1 << slot, 0), 1)


def nearest_triton(
    x_ND: Tensor,
    codes_KD: Tensor,
    metric: str,
    precision: str,
    other_than_N: Tensor | None = None,
    proof: bool = True,
) -> Tensor:
    """Index int64 [N] of the closest code, `other_than_N` (one for each vector) if given: the second closest, say.

    Without `proof` `exact` is three products at any shape: see `proof_pays`.
    """
    codes_KD = codes_KD.contiguous()
    key = ("nearest", *shape_of(x_ND), codes_KD.shape[0], metric, precision, other_than_N is None, proof)

    def body(work: Work, x_ND: Tensor, codes_KD: Tensor, other_N: Tensor | None) -> tuple[Tensor]:
        return (search(work, x_ND, codes_KD, metric, precision, other_than_N=other_N, proof=proof),)

    return replayed(key, (x_ND, codes_KD, other_than_N), body)[0]


def proof_pays(x_ND: Tensor, codes_KD: Tensor, metric: str) -> bool:
    """Whether most vectors have a proof, by a few of them: those without one are searched twice.

    Codes of a map that is still smooth lie so close together that no vector has one. This waits for the device.
    """
    (n, d), k = x_ND.shape, codes_KD.shape[0]
    if metric == "dot" or not proves(n, k, max(16, power_of_2(d))):
        return True
    some_ND = x_ND[:: -(-n // LOOKED_AT)].contiguous()
    key = ("unproven", *shape_of(some_ND), k, metric)

    def body(work: Work, x_ND: Tensor, codes_KD: Tensor) -> tuple[Tensor]:
        number = work.empty(1, dtype=torch.int32, device=x_ND.device)
        search(work, x_ND, codes_KD, metric, "exact", number=number)
        return (number,)

    number = replayed(key, (some_ND, codes_KD.contiguous()), body)[0]
    return int(number) <= len(some_ND) / 2


def shape_of(x_ND: Tensor) -> tuple[object, ...]:
    """What a key says of a tensor."""
    return x_ND.shape, x_ND.stride(), x_ND.dtype


def search(
    work: Work,
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
    learns: bool = False,
    proof: bool = True,
    number: Tensor | None = None,
) -> Tensor:
    """The launches of `nearest_triton`; the codes are contiguous. `number` asks for a proof at any shape, and becomes
    how many vectors have none (int32 [1]).

    Where given, valid_N (int8), skipped (int64) and kept_KD (a copy of the codes) are written to, and stats set to 0 if
    they are `to_clear`; with no vectors, none of it is.
    """
    (n, d), k = x_ND.shape, codes_KD.shape[0]
    device = x_ND.device
    index_N = work.empty(n, dtype=torch.int64, device=device)
    if n == 0:
        return index_N
    exact = precision == "exact"
    whole = exact and x_ND.dtype in (torch.bfloat16, torch.float16)
    padded = max(16, power_of_2(d))
    halves = (2 if whole else 3) if exact else 1
    width = width_of(k, d, halves)
    tiles = tile_sizes(k, d, precision, width)
    first, again = Pass.of(tiles, k, 1 if tiles.each else shares_of(n, k, tiles)), None
    if number is not None or (proof and exact and metric != "dot" and proves(n, k, padded)):
        width = 0
        again = Pass.of(tiles, k, max(1, min(LISTED_SHARES, LISTED // n)))
        tiles = tile_sizes(k, d, "fast")
        first = Pass.of(tiles, k, shares_of(n, k, tiles))
    fold = None
    rows, kept = max(first.rows, again.rows if again else 0), max(first.shares, again.shares if again else 0)
    found_SN = index_N if tiles.each else work.empty(kept, n, dtype=torch.int64, device=device)
    best_SN = index_N if tiles.each else work.empty(kept, n, dtype=torch.float32, device=device)
    runner_SN = work.empty(first.shares, n, dtype=torch.float32, device=device) if again else best_SN
    rows_N = work.empty(n, dtype=torch.int32, device=device) if again else index_N
    if again and number is None:
        number = work.empty(1, dtype=torch.int32, device=device)
    parts = cdiv(rows, CODES)
    longest = work.empty(2, parts, dtype=torch.float32, device=device) if again else None
    if width:
        folds = work.empty(rows, width, dtype=torch.float16, device=device)
        fold = Fold(folds, work.empty(parts, dtype=torch.int32, device=device), halves)
    other_N = index_N if other_than_N is None else other_than_N
    terms = split_codes(
        work, x_ND, codes_KD, rows, padded, metric, exact, whole, learns, skipped, stats, kept_KD, number, longest,
        fold,
    )  # fmt: skip
    for each in (first, again) if again else (first,):
        (tiles, shares, share), listed, certify = each, each is again, again is not None and each is first
        how = {"OTHER": other_than_N is not None, "WHOLE": whole, "CERTIFY": certify, "LISTED": listed}
        for unfolded in (False, True) if fold else (True,):
            work.launch(
                _search_kernel, (cdiv(n, tiles.block_n), shares), x_ND, index_N if keep_N is None else keep_N, other_N,
                *terms, found_SN, best_SN, runner_SN, index_N if valid_N is None else valid_N,
                index_N if skipped is None else skipped, rows_N, index_N if number is None else number,
                best_SN if longest is None else longest, index_N if fold is None else fold.rows,
                index_N if fold is None else fold.unusual, n, d, share, parts, x_ND.stride(0), x_ND.stride(1),
                HAS_KEEP=keep_N is not None, VALID=valid_N is not None and not listed, EXACT=exact and not certify,
                EACH=tiles.each, **how, FOLD=0 if unfolded else halves, WIDTH=width,
                UNFOLDED=unfolded, DP=padded, DC=tiles.chunk, BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k,
                num_warps=tiles.warps, num_stages=tiles.stages,
            )  # fmt: skip
        if not tiles.each:
            which = LISTED_WHICH if listed else WHICH
            work.launch(
                which_kernel, (cdiv(n, which),), found_SN, best_SN, runner_SN, x_ND, other_N, *terms, index_N,
                rows_N, index_N if number is None else number, n, d, k, shares, x_ND.stride(0), x_ND.stride(1),
                EXACT=exact, EUCLIDEAN=metric == "euclidean", **how,
                DP=padded, DC=min(AT_ONCE, padded), ROWS=which, BLOCK_K=tiles.block_k,
            )  # fmt: skip
    return index_N
