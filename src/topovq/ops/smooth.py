"""smooth: statistics of each code blended with those of its neighbors on the map, A^T S and A^T c, without A.

Legend: K codes on n_1 x ... x n_D places; S [K, D] sums, c [K] counts, stacked as C = D + 1 columns of a field
[n_1, ..., C]; A_jk = strength * kernel(dist / width), A_kk = 1. Places without a code are zeros of the field, so that
they give nothing; what they would receive is cut off.

Four ways, each for what it does best; `method` chooses from the shapes alone, never from a value on the device:
    box        shifted copies added up: `hard` with a small radius (the paper's 3 x 3 window)
    separable  one n x n matrix per axis: `gaussian`, exp(-(a^2 + b^2)) = exp(-a^2) exp(-b^2); on CUDA without the
               matrix, and without weights below CUTOFF (triton/smooth.py)
    dense      the K x K matrix itself, up to DENSE codes, for what is neither
    fft        convolution over the grid in float64, for what is neither and larger (ops/convolve.py). Its error is at
               most CUTOFF of the whole batch per code; smaller results are set to exactly 0, so that no count is
               negative and no code that received nothing is moved by rounding.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor

from topovq.grid import ROW_HEIGHT, Grid
from topovq.ops.convolve import convolve
from topovq.ops.direct import plain
from topovq.ops.kernel import Course, Kernel

DENSE = 1024  # codes up to which the matrix itself is used: 4 MiB
LONGEST_AXIS = 2048  # axes up to which a matrix per axis is used: 16 MiB
MOST_SHIFTS = 32  # shifted copies up to which adding them beats a transform


def method(grid: Grid, kernel: Kernel | Course) -> str:
    """Which of the four ways smooths this kernel over this grid ("none" where there is nothing to do)."""
    if kernel.kind == "none":
        return "none"
    if kernel.kind == "hard" and _few_shifts(grid, kernel.widest):
        return "box"
    if kernel.kind == "gaussian" and max(grid.shape) <= LONGEST_AXIS:
        return "separable"
    return "dense" if grid.size <= DENSE else "fft"


def smooth(sums_KD: Tensor, counts_K: Tensor, grid: Grid, kernel: Kernel) -> tuple[Tensor, Tensor]:
    """(A^T sums, A^T counts), in the type of the statistics."""
    if kernel.kind == "none":
        return sums_KD, counts_K
    on_cuda = sums_KD.is_cuda and sums_KD.dtype == counts_K.dtype == torch.float32
    if on_cuda and grid.topology == "rectangular" and method(grid, kernel) == "separable":
        gaussian = _compute_gaussian if plain(sums_KD, counts_K) else _smooth_gaussian
        return gaussian(sums_KD, counts_K, list(grid.shape), list(grid.wrap), kernel.width)
    operation = _compute if plain(sums_KD, counts_K) else _smooth
    stats_KC = operation(
        torch.cat([sums_KD, counts_K[:, None]], 1),
        list(grid.shape), list(grid.wrap), grid.topology, kernel.kind, kernel.width, kernel.strength, kernel.widest,
    )  # fmt: skip
    return stats_KC[:, :-1], stats_KC[:, -1]


def _compute(
    stats_KC: Tensor,
    shape: list[int],
    wrap: list[bool],
    topology: str,
    kind: str,
    width: Tensor,
    strength: Tensor,
    widest: float,
) -> Tensor:
    grid = Grid(tuple(shape), topology=topology, wrap=tuple(wrap), size=len(stats_KC))
    kernel = Kernel(kind, width, strength, widest)
    chosen = method(grid, kernel)
    with torch.autocast(stats_KC.device.type, enabled=False):
        if chosen == "dense":
            return kernel.weight(grid.distance_matrix(stats_KC.device)).to(stats_KC.dtype) @ stats_KC
        if grid.size == grid.places:
            return _over_places(stats_KC, grid, kernel, chosen)
        padded = torch.nn.functional.pad(stats_KC, (0, 0, 0, grid.places - grid.size))
        return _over_places(padded, grid.full, kernel, chosen)[: grid.size]


def _over_places(stats_KC: Tensor, grid: Grid, kernel: Kernel, chosen: str) -> Tensor:
    """A^T stats over a grid with a code at every place."""
    if chosen == "fft":
        return convolve(stats_KC, grid, kernel)
    if chosen == "box":
        return _box(stats_KC, grid, kernel)
    field = stats_KC.view(*grid.shape, -1)
    separable = _separable_hexagonal if grid.topology == "hexagonal" else _separable
    return separable(field, grid, kernel).reshape(stats_KC.shape)


_smooth = torch.library.custom_op("topovq::smooth", _compute, mutates_args=())


@_smooth.register_fake
def _(stats_KC: Tensor, *_: object) -> Tensor:
    return torch.empty_like(stats_KC)


def _compute_gaussian(
    sums_KD: Tensor, counts_K: Tensor, shape: list[int], wrap: list[bool], width: Tensor
) -> tuple[Tensor, Tensor]:
    from topovq.ops.triton.smooth import smooth_triton

    if counts_K.numel() == 1:
        return sums_KD.clone(), counts_K.clone()
    grid = Grid(tuple(shape), wrap=tuple(wrap), size=len(counts_K))
    return smooth_triton(sums_KD.contiguous(), counts_K.contiguous(), grid, None, width)


_smooth_gaussian = torch.library.custom_op("topovq::smooth_gaussian", _compute_gaussian, mutates_args=())


@_smooth_gaussian.register_fake
def _(sums_KD: Tensor, counts_K: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return (
        torch.empty_like(sums_KD, memory_format=torch.contiguous_format),
        torch.empty_like(counts_K, memory_format=torch.contiguous_format),
    )


def smooth_reference(sums_KD: Tensor, counts_K: Tensor, grid: Grid, kernel: Kernel) -> tuple[Tensor, Tensor]:
    """The definition, with the K x K matrix: for tests."""
    matrix_KK = kernel.weight(grid.distance_matrix()).to(sums_KD.dtype)
    return matrix_KK.T @ sums_KD, matrix_KK.T @ counts_K


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


def _box(stats_KC: Tensor, grid: Grid, kernel: Kernel) -> Tensor:
    """out_k = stats_k + sum over steps of weight * stats_{k + step}."""
    steps = shifts(grid, kernel.widest)
    if not steps:
        return stats_KC.clone()
    field = stats_KC.view(*grid.shape, -1)
    weights = {length: kernel.weight(torch.full_like(kernel.width, length)).to(field.dtype) for _, length in steps}
    out = field.clone()
    for step, length in steps:
        if grid.topology == "hexagonal":
            _add_shifted_hexagonal(out, field, step, grid.wrap, weights[length])
        else:
            _add_shifted(out, field, step, grid.wrap, weights[length])
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


def _separable(field: Tensor, grid: Grid, kernel: Kernel) -> Tensor:
    """One matrix product per axis."""
    for axis, n in enumerate(grid.shape):
        place = torch.arange(n, dtype=torch.float64, device=field.device)
        matrix = _axis_weights(place, place, n, grid.wrap[axis], kernel).to(field.dtype)
        before = math.prod(grid.shape[:axis])
        field = torch.matmul(matrix, field.reshape(before, n, -1)).view(*grid.shape, -1)
    return field


def _separable_hexagonal(field: Tensor, grid: Grid, kernel: Kernel) -> Tensor:
    """Columns first, from each row's own places to all half cells; then rows, for the half cells each row has."""
    rows, columns = grid.shape
    half_cells = torch.arange(2 * columns, dtype=torch.float64, device=field.device) / 2
    spread = field.new_empty(rows, 2 * columns, field.shape[-1])
    for parity in (0, 1):
        matrix = _axis_weights(half_cells, half_cells[parity::2], columns, grid.wrap[1], kernel).to(field.dtype)
        spread[parity::2] = torch.matmul(matrix, field[parity::2])
    heights = torch.arange(rows, dtype=torch.float64, device=field.device) * ROW_HEIGHT
    matrix = _axis_weights(heights, heights, rows * ROW_HEIGHT, grid.wrap[0], kernel).to(field.dtype)
    out = torch.empty_like(field)
    for parity in (0, 1):
        some = spread[:, parity::2].reshape(rows, -1)
        out[parity::2] = (matrix[parity::2] @ some).view(-1, columns, field.shape[-1])
    return out


def _axis_weights(to: Tensor, source: Tensor, period: float, wraps: bool, kernel: Kernel) -> Tensor:
    apart = (to[:, None] - source[None, :]).abs()
    return kernel.weight(torch.minimum(apart, period - apart) if wraps else apart)
