"""A tile of a Gaussian's sums, out_i = sum_j exp(-scale apart_ij^2) x_j, in one of three ways.

    near      place by place, where few are within reach: in the time it takes to read them
    weighted  BLOCK_J sources at a time, as the product of their weights, which exist in registers alone, and values
    chosen    likewise, but only through the codes that a batch chose: of a large codebook few, and other sums are 0

Legend for the last: along an axis of n places the map is lines of n codes. A line's list has the places of its chosen
codes, in order; its ranks say how many of those come before each place, and the last one how many there are.
    chosen_ptr + line n          the list
    ranks_ptr + line (n + 1)     the ranks
Where a map is not FULL its last places, from code K on, hold none: values from `limit` on, which would be theirs, are
not there and count as 0.
"""

import triton
import triton.language as tl

LONGEST = 4096  # places of an axis with lists: one program makes that of a line


@triton.jit
def near_sum(
    in_ptr, limit, first, column, base, along, n, back, ahead, scale, columns, place_stride,
    WRAP: tl.constexpr, FULL: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    place = first + tl.arange(0, BLOCK_I)
    total = tl.zeros([BLOCK_I, BLOCK_C], tl.float32)
    for shift in range(-back, ahead + 1):
        other = place + shift
        apart = other - place
        weights = tl.exp(-(apart * apart).to(tl.float32) * scale)
        if WRAP:
            other = (other + n) % n
        on = ((other >= 0) & (other < n))[:, None] & (column < columns)[None, :]
        there = base + other.to(tl.int64)[:, None] * place_stride + along[None, :]
        if not FULL:
            on = on & (there < limit)
        total += weights[:, None] * tl.load(in_ptr + there, on, 0.0)
    return total


@triton.jit
def weighted_sum(
    in_ptr, limit, first, column, base, along, sources, gap, step_out, step_in, back, ahead, scale, columns,
    place_stride,
    WRAP: tl.constexpr, FULL: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """sum_j exp(-scale apart_ij^2) x_j over sources j with -back <= apart_ij <= ahead, where
    apart_ij = gap + step_in j - step_out i; in float64 but for what is left within a tile."""
    reached = step_out * first - gap - back
    begin = tl.floor(reached / step_in).to(tl.int32)
    end = tl.floor((reached + back + ahead + step_out * (BLOCK_I - 1)) / step_in).to(tl.int32) + 1
    if not WRAP:
        begin, end = tl.maximum(begin, 0), tl.minimum(end, sources)
    row, other = tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_J)
    ahead_of = step_in.to(tl.float32) * other.to(tl.float32)
    within = ahead_of[None, :] - (step_out.to(tl.float32) * row.to(tl.float32))[:, None]
    total = tl.zeros([BLOCK_I, BLOCK_C], tl.float32)
    for start in range(begin, end, BLOCK_J):
        apart = (gap + step_in * start - step_out * first).to(tl.float32) + within
        near = (apart >= -back.to(tl.float32)) & (apart <= ahead.to(tl.float32))
        weights = tl.where(near, tl.exp(-apart * apart * scale), 0.0)
        source = start + other
        on = (source < end)[:, None] & (column < columns)[None, :]
        if WRAP:
            source = (source + sources) % sources
        there = base + source.to(tl.int64)[:, None] * place_stride + along[None, :]
        if not FULL:
            on = on & (there < limit)
        total += tl.dot(weights, tl.load(in_ptr + there, on, 0.0), input_precision=PRECISION)
    return total


@triton.jit
def list_line(counts_ptr, chosen_ptr, ranks_ptr, line, n, after, K, FULL: tl.constexpr, BLOCK: tl.constexpr):
    """The list and the ranks of one line; the next place along it is `after` codes on."""
    place = tl.arange(0, BLOCK)
    code = (line // after * n + place) * after + line % after
    on = place < n
    if not FULL:
        on = on & (code < K)
    chosen = (tl.load(counts_ptr + code, on, 0.0) > 0).to(tl.int32)
    rank = tl.cumsum(chosen, 0) - chosen
    tl.store(ranks_ptr + line * (n + 1) + place, rank, place < n)
    tl.store(ranks_ptr + line * (n + 1) + n, tl.sum(chosen, 0))
    tl.store(chosen_ptr + line * n + rank, place, chosen > 0)


@triton.jit
def _rank(ranks_ptr, place, n, number, WRAP: tl.constexpr):
    """How many chosen codes come before a place; a ring's list goes on with itself, lap after lap, the first is -1."""
    if WRAP:
        lap = (place + n) // n - 1
        rank = lap * number + tl.load(ranks_ptr + place - lap * n)
    else:
        rank = tl.load(ranks_ptr + tl.minimum(tl.maximum(place, 0), n))
    return rank


@triton.jit
def chosen_sum(
    in_ptr, chosen_ptr, ranks_ptr, line, first, column, base, along, n, gap, step_out, back, ahead, scale, columns,
    place_stride,
    WRAP: tl.constexpr, PRECISION: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """sum_j exp(-scale apart_ij^2) x_j over the chosen places j of a line with -back <= apart_ij <= ahead, where
    apart_ij = gap + j - step_out i."""
    ranks_ptr += line * (n + 1)
    chosen_ptr += line * n
    number = tl.load(ranks_ptr + n)
    reached = step_out * first - gap - back
    begin = tl.floor(reached).to(tl.int32)
    end = tl.floor(reached + back + ahead + step_out * (BLOCK_I - 1)).to(tl.int32) + 1
    begin, end = _rank(ranks_ptr, begin, n, number, WRAP), _rank(ranks_ptr, end, n, number, WRAP)
    here = step_out * (first + tl.arange(0, BLOCK_I)) - gap
    total = tl.zeros([BLOCK_I, BLOCK_C], tl.float32)
    for start in range(begin, end, BLOCK_J):
        at = start + tl.arange(0, BLOCK_J)
        on = at < end
        lap = tl.zeros([BLOCK_J], tl.int32)
        if WRAP:
            lap = (at + number) // number - 1
        place = tl.load(chosen_ptr + at - lap * number, on, 0)
        apart = ((place + lap * n).to(tl.float64)[None, :] - here[:, None]).to(tl.float32)
        near = (apart >= -back.to(tl.float32)) & (apart <= ahead.to(tl.float32))
        weights = tl.where(near, tl.exp(-apart * apart * scale), 0.0)
        there = base + place.to(tl.int64)[:, None] * place_stride + along[None, :]
        values = tl.load(in_ptr + there, on[:, None] & (column < columns)[None, :], 0.0)
        total += tl.dot(weights, values, input_precision=PRECISION)
    return total
