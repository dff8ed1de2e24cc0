"""Figures that say how well codes are used and how well the map is ordered, on plain tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from topovq.grid import Grid


def code_counts(indices: Tensor, num_codes: int) -> Tensor:
    """How often each code occurs, int64 [K]; masked tokens (-1) do not count."""
    flat = indices.reshape(-1)
    return torch.bincount(flat[flat >= 0], minlength=num_codes)


def perplexity(counts_K: Tensor) -> Tensor:
    """exp(-sum p log p): from 1 (one code) to K (all alike), float64; 1 where nothing was counted."""
    share_K = counts_K.double() / counts_K.sum().clamp(min=1)
    return torch.exp(torch.special.entr(share_K).sum())


def usage(counts_K: Tensor) -> Tensor:
    """Share of codes that occur at least once, float64."""
    return (counts_K > 0).double().mean()


def quantization_error(x_ND: Tensor, codes_KD: Tensor, rows: int = 4096) -> Tensor:
    """Mean Euclidean distance of a vector to its closest code."""
    nearest = [torch.cdist(x, codes_KD).amin(1) for x in x_ND.split(rows)]
    return torch.cat(nearest).mean()


def topographic_error(x_ND: Tensor, codes_KD: Tensor, grid: Grid, rows: int = 4096) -> Tensor:
    """Share of vectors whose two closest codes are not neighbors on the map.

    Neighbors are the places of the paper's hard neighborhood: the box around a place, the six around a hexagon.
    """
    radius = 1.0 if grid.topology == "hexagonal" else grid.ndim**0.5
    apart = []
    for x in x_ND.split(rows):
        first, second = torch.cdist(x, codes_KD).topk(2, largest=False).indices.unbind(1)
        apart.append(grid.distance(first, second) > radius + 1e-9)
    return torch.cat(apart).double().mean()
