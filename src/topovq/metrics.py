"""Figures that say how well codes are used and how well the map is ordered, on plain tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from topovq.grid import Grid
from topovq.ops.nearest import nearest

BLOCK = 2**24  # distances held at a time: 64 MiB of float32


def code_counts(indices: Tensor, num_codes: int) -> Tensor:
    """How often each code occurs, int64 [K]; masked tokens (-1) do not count."""
    flat = indices.reshape(-1)
    counts_K = torch.bincount(flat[flat >= 0], minlength=num_codes)
    if len(counts_K) > num_codes:
        raise ValueError(f"token {len(counts_K) - 1} is out of range: expected 0 to {num_codes - 1}, or -1 for masked")
    return counts_K


def perplexity(counts_K: Tensor) -> Tensor:
    """exp(-sum p log p): from 1 (one code) to K (all alike), float64; 1 where nothing was counted."""
    counts_K = counts_K.double()
    share_K = counts_K / counts_K.sum().clamp(min=torch.finfo(torch.float64).tiny)
    return torch.exp(torch.special.entr(share_K).sum())


def usage(counts_K: Tensor) -> Tensor:
    """Share of codes that occur at least once, float64."""
    return (counts_K > 0).double().mean()


def quantization_error(x_ND: Tensor, codes_KD: Tensor) -> Tensor:
    """Mean Euclidean distance of a vector to its closest code."""
    return torch.linalg.vector_norm(x_ND - codes_KD[nearest(x_ND, codes_KD)], dim=1).mean()


def topographic_error(x_ND: Tensor, codes_KD: Tensor, grid: Grid) -> Tensor:
    """Share of vectors whose two closest codes are not neighbors on the map.

    Neighbors are the places of the paper's hard neighborhood: the box around a place, the six around a hexagon.
    """
    if len(codes_KD) < 2:
        raise ValueError(f"{len(codes_KD)} codes have no second closest one: expected at least 2")
    radius = 1.0 if grid.topology == "hexagonal" else grid.ndim**0.5
    center_D = codes_KD.mean(0)  # cdist works with squares: their rounding grows with the distance from the origin
    apart = []
    for x in x_ND.split(max(1, BLOCK // len(codes_KD))):
        distances = torch.cdist(x - center_D, codes_KD - center_D)
        first, second = distances.topk(2, largest=False).indices.unbind(1)
        apart.append(grid.distance(first, second) > radius + 1e-9)
    return torch.cat(apart).double().mean()
