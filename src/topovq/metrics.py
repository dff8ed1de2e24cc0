"""Figures that say how well codes are used and how well the map is ordered, on plain tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from topovq.grid import Grid
from topovq.neighborhood import Neighborhood
from topovq.ops.accumulate import accumulate
from topovq.ops.search import center_of, nearest
from topovq.ops.smooth import smooth

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
    """Share of vectors whose two closest codes are not neighbors on the map (see `not_neighbors`)."""
    if len(codes_KD) < 2:
        raise ValueError(f"{len(codes_KD)} codes have no second closest one: expected at least 2")
    center_D = center_of(codes_KD)  # cdist works with squares: their rounding grows with the distance from the origin
    apart = []
    for x in x_ND.split(max(1, BLOCK // len(codes_KD))):
        distances = torch.cdist(x - center_D, codes_KD - center_D)
        first, second = distances.topk(2, largest=False).indices.unbind(1)
        apart.append(not_neighbors(first, second, grid))
    return torch.cat(apart).double().mean()


def neighbor_radius(grid: Grid) -> float:
    """How far apart neighbors are at most: the paper's hard neighborhood, the box around a place or six hexagons."""
    return 1.0 if grid.topology == "hexagonal" else grid.ndim**0.5


def not_neighbors(i: Tensor, j: Tensor, grid: Grid) -> Tensor:
    """Whether flat indices i and j (broadcast together) are places that do not touch, bool."""
    return grid.distance(i, j) > neighbor_radius(grid) + 1e-9


def distortion(x_ND: Tensor, codes_KD: Tensor, neighborhood: Neighborhood, step: int | Tensor = 0) -> Tensor:
    """Mean over vectors of sum_k A[k*, k] |x - w_k|^2, with k* the closest code: what a batch step lowers, k* fixed.

    With Q_j the sum of |x|^2 over the members of j it is sum_k (A^T Q)_k - 2 w_k.(A^T S)_k + |w_k|^2 (A^T c)_k: the
    statistics are smoothed, and neither an N x K nor a K x K matrix is made.
    """
    index_N = nearest(x_ND, codes_KD)
    center_D = codes_KD.double().mean(0)
    x_ND, w_KD = x_ND.double() - center_D, codes_KD.double() - center_D
    sums_KC, counts_K = accumulate(torch.cat([x_ND, x_ND.square().sum(1, keepdim=True)], 1), index_N, len(codes_KD))
    sums_KC, counts_K = smooth(sums_KC, counts_K, neighborhood, torch.as_tensor(step, device=codes_KD.device))
    total = sums_KC[:, -1] - 2 * (w_KD * sums_KC[:, :-1]).sum(1) + w_KD.square().sum(1) * counts_K
    return total.sum() / len(x_ND)


def topographic_product(codes_KD: Tensor, grid: Grid) -> Tensor:
    """Bauer and Pawelzik's P: 0 where the map fits the codes, below 0 where it has too few axes, above 0 too many.

    With n_m(j) the m-th closest code to j, g_m(j) the m-th closest place, v the distance of codes and a that of places:
        P = mean over j and k < K of 1/(2k) sum_{m <= k} ln [v(j, g_m) / v(j, n_m) * a(j, g_m) / a(j, n_m)]
    Codes that are the same have no order among them: their terms are left out. Needs K x K distances.
    """
    size = len(codes_KD)
    if size < 3:
        return torch.zeros((), dtype=torch.float64)
    apart_KK = torch.cdist(codes_KD.double(), codes_KD.double(), compute_mode="donot_use_mm_for_euclid_dist")
    places_KK = grid.distance_matrix(codes_KD.device)
    itself = torch.eye(size, dtype=torch.bool, device=codes_KD.device)
    by_code = apart_KK.masked_fill(itself, -1).argsort(dim=1, stable=True)[:, 1:]
    by_place = places_KK.masked_fill(itself, -1).argsort(dim=1, stable=True)[:, 1:]
    tiny = torch.finfo(torch.float64).tiny
    at_place, at_code = apart_KK.gather(1, by_place), apart_KK.gather(1, by_code)
    ratio = at_place.clamp(min=tiny) / at_code.clamp(min=tiny)
    logs = (ratio * places_KK.gather(1, by_place) / places_KK.gather(1, by_code)).log()
    logs = logs.masked_fill((at_place == 0) | (at_code == 0), 0)
    order = torch.arange(1, size, device=codes_KD.device)
    return (logs.cumsum(1) / (2 * order)).mean()


def neighborhood_preservation(codes_KD: Tensor, grid: Grid) -> Tensor:
    """Mean share of a place's neighbors whose codes are among as many closest codes: 1 for a perfect order.

    A place has the neighbors of `not_neighbors`, so those at a border have fewer; ties of codes go to the lowest index.
    Needs K x K distances.
    """
    if len(codes_KD) < 2:
        return torch.ones((), dtype=torch.float64)
    every = torch.arange(len(codes_KD), device=codes_KD.device)
    near_KK = ~not_neighbors(every[:, None], every[None, :], grid)
    near_KK.fill_diagonal_(False)
    apart_KK = torch.cdist(codes_KD.double(), codes_KD.double(), compute_mode="donot_use_mm_for_euclid_dist")
    apart_KK.fill_diagonal_(torch.inf)
    rank_KK = apart_KK.argsort(dim=1, stable=True).argsort(dim=1)
    wanted_K1 = near_KK.sum(1, keepdim=True)
    return ((near_KK & (rank_KK < wanted_K1)).sum(1) / wanted_K1[:, 0]).double().mean()
