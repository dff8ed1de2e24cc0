"""convolve: smoothing over a large grid by fast Fourier transforms, for weights that neither are few nor separate.

Legend: the field [n_1, ..., C] of a grid splits into P sublattices, on each of which A is a convolution:
P = 1 for a rectangular grid, P = 2 (even and odd rows) for a hexagonal one, where
    out_even = K_same * even + K_cross * odd,    out_odd = K_same * odd + mirrored(K_cross) * even.

Transforms run in float64: their rounding, about 1e-16 of the largest entry, is far below CUTOFF of the whole batch,
the level under which a result is set to exactly 0. So no count is negative, and a code that received nothing stays put.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from topovq.grid import ROW_HEIGHT
from topovq.neighborhood import CUTOFF, Neighborhood

# Entries transformed at a time: on a CPU few enough to stay near its cores, on a GPU few enough to need little memory.
BLOCK_ON_CPU, BLOCK_ON_GPU = 2**18, 2**21


def convolve(stats_KC: Tensor, neighborhood: Neighborhood, step: Tensor) -> Tensor:
    """A^T stats: [K, C] -> [K, C]; the last column holds the counts."""
    grid = neighborhood.grid
    shape = grid.shape
    hexagonal = grid.topology == "hexagonal"
    parities = 2 if hexagonal else 1
    pitches = [2 * ROW_HEIGHT, 1.0] if hexagonal else [1.0] * len(shape)
    field = stats_KC.view(*shape, -1)
    if shape[0] % parities:  # an odd number of rows gets an empty one more
        field = torch.cat([field, torch.zeros_like(field[:1])])
    sizes = [field.shape[0] // parities, *shape[1:]]
    # An open axis is padded by the neighborhood's reach, so that what leaves one border cannot enter at the other. On
    # the CPU asking for the width of this moment costs nothing; a GPU is not asked, and pads for the widest there is.
    on_cpu = stats_KC.device.type == "cpu"
    reach = neighborhood.reach(float(neighborhood.width(step)) if on_cpu else neighborhood.widest)
    padded = [
        n if wraps else _fast_length(n + min(n, math.ceil(reach / pitch) + 1))
        for n, wraps, pitch in zip(sizes, grid.wrap, pitches)
    ]
    same = torch.fft.rfftn(neighborhood.weight(_apart(padded, pitches, [0.0] * len(shape), stats_KC.device), step))
    cross = same
    if hexagonal:
        cross = torch.fft.rfftn(neighborhood.weight(_apart(padded, pitches, [0.5, 0.5], stats_KC.device), step))

    out = torch.empty_like(field)
    block = BLOCK_ON_CPU if on_cpu else BLOCK_ON_GPU
    channels = max(1, block // math.prod(padded))
    for first in range(0, stats_KC.shape[1], channels):
        columns = slice(first, first + channels)
        spectra = [_forward(field[p::parities, ..., columns], padded) for p in range(parities)]
        if hexagonal:
            even, odd = spectra
            spectra = [same * even + cross * odd, same * odd + cross.conj() * even]
        else:
            spectra = [same * spectra[0]]
        for p, spectrum in enumerate(spectra):
            out[p::parities, ..., columns] = _inverse(spectrum, padded, sizes).to(out.dtype)
    smoothed_KC = out[: shape[0]].reshape(stats_KC.shape)
    return torch.where(smoothed_KC[:, -1:] > CUTOFF * stats_KC[:, -1].sum(), smoothed_KC, 0)


def _apart(padded: list[int], pitches: list[float], offset: list[float], device: torch.device) -> Tensor:
    """The distance from a place to those at lattice steps (i - offset), the short way round."""
    squares = torch.zeros([1] * len(padded), dtype=torch.float64, device=device)
    for axis, (n, pitch, off) in enumerate(zip(padded, pitches, offset)):
        step = torch.arange(n, dtype=torch.float64, device=device) - off
        apart = torch.minimum(step.abs(), (step - n).abs()) * pitch
        squares = squares + apart.square().view([-1 if i == axis else 1 for i in range(len(padded))])
    return squares.sqrt()


def _forward(field: Tensor, padded: list[int]) -> Tensor:
    """[*sizes, C] -> spectrum [C, *frequencies]; an axis is padded only when it is transformed."""
    spectrum: Tensor = torch.fft.rfft(field.movedim(-1, 0).double().contiguous(), n=padded[-1], dim=-1)
    for axis in reversed(range(len(padded) - 1)):
        spectrum = torch.fft.fft(spectrum, n=padded[axis], dim=axis + 1)
    return spectrum


def _inverse(spectrum: Tensor, padded: list[int], sizes: list[int]) -> Tensor:
    """The inverse of `_forward`, cropped axis by axis."""
    for axis in range(len(padded) - 1):
        spectrum = torch.fft.ifft(spectrum, dim=axis + 1).narrow(axis + 1, 0, sizes[axis])
    field: Tensor = torch.fft.irfft(spectrum, n=padded[-1], dim=-1)
    return field[..., : sizes[-1]].movedim(0, -1)


def _fast_length(n: int) -> int:
    """The least length of at least n with no prime factor over 7."""
    while True:
        rest = n
        for factor in (2, 3, 5, 7):
            while rest % factor == 0:
                rest //= factor
        if rest == 1:
            return n
        n += 1
