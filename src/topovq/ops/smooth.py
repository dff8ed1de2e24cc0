"""smooth: statistics of each code blended with those of its neighbors on the map, A^T S and A^T c, without A.

Legend: K codes on n_1 x ... x n_D places; S [K, D] sums, c [K] counts, stacked as C = D + 1 columns of a field
[n_1, ..., C]; A the matrix of neighborhood.py at a step. Places without a code are zeros of the field, so that
they give nothing; what they would receive is cut off.

Four ways, each for what it does best; `method` chooses from the shapes alone, never from a value on the device:
    box        shifted copies added up: `hard` with a small radius (the paper's 3 x 3 window)
    separable  one n x n matrix per axis: `gaussian`, exp(-(a^2 + b^2)) = exp(-a^2) exp(-b^2); on CUDA without the
               matrix, and without weights below CUTOFF
    dense      the K x K matrix itself, up to DENSE codes, for what is neither; on CUDA its entries exist in registers
    fft        convolution over the grid in float64, for what is neither and larger (ops/convolve.py). Its error is at
               most CUTOFF of the whole batch per code; smaller results are set to exactly 0, so that no count is
               negative and no code that received nothing is moved by rounding.
On CUDA, in float32, `separable` over a rectangular grid and `dense` are kernels (triton/smooth.py); the kernels of the
update do `box` themselves (triton/update.py).
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor

from topovq.grid import ROW_HEIGHT, Grid
from topovq.neighborhood import Neighborhood
from topovq.ops.convolve import convolve
from topovq.ops.direct import plain

DENSE = 1024  # codes up to which the matrix itself is used: 4 MiB
LONGEST_AXIS = 2048  # axes up to which a matrix per axis is used: 16 MiB
MOST_SHIFTS = 32  # shifted copies up to which adding them beats a transform


def method(neighborhood: Neighborhood) -> str:
    """Which of the four ways smooths over this neighborhood ("none" where there is nothing to do)."""
    kind, grid = neighborhood.kind, neighborhood.grid
    if kind == "none":
        return "none"
    if kind == "hard" and _few_shifts(grid, neighborhood.widest):
        return "box"
    if kind == "gaussian" and max(grid.shape) <= LONGEST_AXIS:
        return "separable"
    return "dense" if grid.size <= DENSE else "fft"


def smooth(sums_KD: Tensor, counts_K: Tensor, neighborhood: Neighborhood, step: Tensor) -> tuple[Tensor, Tensor]:
    """(A(step)^T sums, A(step)^T counts), in the type of the statistics."""
    if neighborhood.kind == "none":
        return sums_KD, counts_K
    if plain(sums_KD, counts_K):
        return _by_method(sums_KD, counts_K, neighborhood, step)
    smooth_KD, smooth_K = _smooth(sums_KD, counts_K, step, *neighborhood.numbers)
    return smooth_KD, smooth_K


def smooth_reference(
    sums_KD: Tensor, counts_K: Tensor, neighborhood: Neighborhood, step: Tensor | int
) -> tuple[Tensor, Tensor]:
    """The definition, with the K x K matrix: for tests."""
    matrix_KK = neighborhood.matrix(step).to(sums_KD.dtype)
    return matrix_KK.T @ sums_KD, matrix_KK.T @ counts_K


def _compute(
    sums_KD: Tensor,
    counts_K: Tensor,
    step: Tensor,
    shape: list[int],
    wrap: list[bool],
    topology: str,
    kind: str,
    schedule: str,
    tau: float,
    widest: float,
    end: float,
    steps: int,
) -> tuple[Tensor, Tensor]:
    neighborhood = Neighborhood.from_numbers(
        len(counts_K), shape, wrap, topology, kind, schedule, tau, widest, end, steps
    )
    sums, counts = _by_method(sums_KD, counts_K, neighborhood, step)
    # What an operation returns shares no memory with anything.
    return sums.clone(memory_format=torch.contiguous_format), counts.clone(memory_format=torch.contiguous_format)


_smooth = torch.library.custom_op("topovq::smooth", _compute, mutates_args=())


@_smooth.register_fake
def _(sums_KD: Tensor, counts_K: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return (
        torch.empty_like(sums_KD, memory_format=torch.contiguous_format),
        torch.empty_like(counts_K, memory_format=torch.contiguous_format),
    )


def _by_kernels(sums_KD: Tensor) -> bool:
    return sums_KD.is_cuda and sums_KD.dtype == torch.float32


def _by_method(sums_KD: Tensor, counts_K: Tensor, neighborhood: Neighborhood, step: Tensor) -> tuple[Tensor, Tensor]:
    grid, chosen = neighborhood.grid, method(neighborhood)
    if _by_kernels(sums_KD):
        from topovq.ops.triton.smooth import dense_triton, gaussian_triton

        if chosen == "separable" and grid.topology == "rectangular":
            return gaussian_triton(sums_KD.contiguous(), counts_K.contiguous(), neighborhood, step)
        if chosen == "dense" and grid.ndim <= 3:
            return dense_triton(sums_KD.contiguous(), counts_K.contiguous(), neighborhood, step)
    stats_KC = torch.cat([sums_KD, counts_K[:, None]], 1)
    with torch.autocast(stats_KC.device.type, enabled=False):
        if chosen == "dense":
            distance_KK = grid.distance_matrix(stats_KC.device)
            stats_KC = neighborhood.weight(distance_KK, step).to(stats_KC.dtype) @ stats_KC
        else:
            over_places = {"box": _box, "separable": _separable, "fft": convolve}[chosen]
            if grid.size < grid.places:
                stats_KC = torch.nn.functional.pad(stats_KC, (0, 0, 0, grid.places - grid.size))
            stats_KC = over_places(stats_KC, neighborhood, step)[: grid.size]
    return stats_KC[:, :-1], stats_KC[:, -1]


@lru_cache(maxsize=64)
def shifts(grid: Grid, radius: float) -> tuple[tuple[tuple[int, ...], float], ...]:
    """Every step on the map that is at most `radius` long, but the one of no length, each with its length.

    On an axis that wraps each place is reached once, the short way round. The last step of a hexagonal grid counts
    half cells: a step by an odd number of rows goes with an odd number of them.
    """
    hexagonal = grid.topology == "hexagonal"
    pitches = (ROW_HEIGHT, 0.5) if hexagonal else (1.0,) * grid.ndim
    sizes = (grid.shape[0], 2 * grid.shape[1]) if hexagonal else grid.shape
    ranges = []
    for n, wraps, pitch in zip(sizes, grid.wrap, pitches):
        far = int(radius / pitch + 1e-9)
        ranges.append(range(-min(far, (n - 1) // 2 if wraps else n - 1), min(far, n // 2 if wraps else n - 1) + 1))
    found = []
    for step in product(*ranges):
        length = math.hypot(*(s * p for s, p in zip(step, pitches)))
        if 0 < length <= radius + 1e-9 and not (hexagonal and sum(step) % 2):
            found.append((step, length))
    return tuple(found)


def _few_shifts(grid: Grid, radius: float) -> bool:
    candidates = math.prod(min(2 * n, 4 * int(radius) + 5) for n in grid.shape)
    return candidates <= 64 * MOST_SHIFTS and len(shifts(grid, radius)) <= MOST_SHIFTS


def _box(stats_KC: Tensor, neighborhood: Neighborhood, step: Tensor) -> Tensor:
    """out_k = stats_k + sum over steps of weight * stats_{k + step}."""
    grid = neighborhood.grid
    moves = shifts(grid, neighborhood.widest)
    field = stats_KC.view(*grid.shape, -1)
    out = field.clone()
    lengths = sorted({length for _, length in moves})
    if lengths:
        distance = torch.stack([torch.full_like(step, length, dtype=torch.float64) for length in lengths])
        weights = dict(zip(lengths, neighborhood.weight(distance, step).to(field.dtype)))
    add_shifted = _add_shifted_hexagonal if grid.topology == "hexagonal" else _add_shifted
    for move, length in moves:
        add_shifted(out, field, move, grid.wrap, weights[length])
    return out.view(stats_KC.shape)


@lru_cache(maxsize=64)
def step_table(grid: Grid, radius: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """(steps int32 [M, 3], lengths float64 [M]) on the device, made once: no training step copies anything to it."""
    steps = shifts(grid, radius)
    padded = [(0,) * (3 - grid.ndim) + step for step, _ in steps]
    return (
        torch.tensor(padded, dtype=torch.int32, device=device).view(-1, 3),
        torch.tensor([length for _, length in steps], dtype=torch.float64, device=device),
    )


def _add_shifted_hexagonal(
    out: Tensor, field: Tensor, step: tuple[int, ...], wrap: tuple[bool, ...], weight: Tensor
) -> None:
    """`_add_shifted` for even and odd rows apart: an odd number of half cells is another column in each."""
    rows, halves = step
    height = field.shape[0]
    for parity in (0, 1):
        columns = (halves + (rows % 2) * (2 * parity - 1)) // 2
        if wrap[0]:
            first, last, source = parity, height, field.roll(-rows, 0)[parity::2]
        else:
            first = max(0, -rows)
            first += (first + parity) % 2
            last = min(height, height - rows)
            source = field[first + rows : last + rows : 2]
        _add_shifted(out[first:last:2], source, (0, columns), wrap, weight)


def _add_shifted(out: Tensor, field: Tensor, step: tuple[int, ...], wrap: tuple[bool, ...], weight: Tensor) -> None:
    """out[k] += weight * field[k + step], with nothing coming from beyond an open border."""
    into, source = [], []
    for axis, (move, wraps) in enumerate(zip(step, wrap)):
        n = field.shape[axis]
        if wraps and move:
            field = field.roll(-move, axis)
            move = 0
        into.append(slice(max(0, -move), n - max(0, move)))
        source.append(slice(max(0, move), n - max(0, -move)))
    out[tuple(into)].addcmul_(field[tuple(source)], weight)


def _separable(stats_KC: Tensor, neighborhood: Neighborhood, step: Tensor) -> Tensor:
    """One matrix product per axis."""
    grid = neighborhood.grid
    field = stats_KC.view(*grid.shape, -1)
    if grid.topology == "hexagonal":
        return _separable_hexagonal(field, neighborhood, step).reshape(stats_KC.shape)
    for axis, n in enumerate(grid.shape):
        place = torch.arange(n, dtype=torch.float64, device=field.device)
        matrix = neighborhood.weight(_apart(place, place, n, grid.wrap[axis]), step).to(field.dtype)
        before = math.prod(grid.shape[:axis])
        field = torch.matmul(matrix, field.reshape(before, n, -1)).view(*grid.shape, -1)
    return field.reshape(stats_KC.shape)


def _separable_hexagonal(field: Tensor, neighborhood: Neighborhood, step: Tensor) -> Tensor:
    """Columns first, from each row's own places to all half cells; then rows, for the half cells each row has."""
    (rows, columns), wrap = neighborhood.grid.shape, neighborhood.grid.wrap
    half_cells = torch.arange(2 * columns, dtype=torch.float64, device=field.device) / 2
    spread = field.new_empty(rows, 2 * columns, field.shape[-1])
    for parity in (0, 1):
        apart = _apart(half_cells, half_cells[parity::2], columns, wrap[1])
        spread[parity::2] = torch.matmul(neighborhood.weight(apart, step).to(field.dtype), field[parity::2])
    heights = torch.arange(rows, dtype=torch.float64, device=field.device) * ROW_HEIGHT
    matrix = neighborhood.weight(_apart(heights, heights, rows * ROW_HEIGHT, wrap[0]), step).to(field.dtype)
    out = torch.empty_like(field)
    for parity in (0, 1):
        some = spread[:, parity::2].reshape(rows, -1)
        out[parity::2] = (matrix[parity::2] @ some).view(-1, columns, field.shape[-1])
    return out


def _apart(to: Tensor, source: Tensor, period: float, wraps: bool) -> Tensor:
    apart = (to[:, None] - source[None, :]).abs()
    return torch.minimum(apart, period - apart) if wraps else apart
