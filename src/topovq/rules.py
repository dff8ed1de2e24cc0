"""Kohonen's learning rules in their classical forms, on plain tensors.

Legend: N vectors x, K codes w [K, D], A = the neighborhood matrix at step t, beta the learning rate.
    online   k* = argmin d(x, w_k);  w_k += beta * A[k*, k] * (x - w_k)          A = I: MacQueen's K-means
    hebbian  y = hardmax(W x);  W += (beta * A y) outer (x - W^T y)              A = I: winner-take-all Hebbian learning
    batch    S_j, c_j over all vectors;  w = (A^T S) / (A^T c)                   A = I: one step of Lloyd's K-means
The mini-batch rule with running averages, of which EMA-VQ is the case A = I, is the `Codebook` (codebook.py).
Each returns new codes and leaves its arguments alone; vectors with NaN or infinity are passed over.
"""

from __future__ import annotations

import torch
from torch import Tensor

from topovq.neighborhood import Neighborhood
from topovq.ops.accumulate import accumulate
from topovq.ops.search import nearest
from topovq.ops.smooth import smooth


def online(
    codes_KD: Tensor,
    x_ND: Tensor,
    neighborhood: Neighborhood,
    *,
    beta: float,
    step: int = 0,
    metric: str = "euclidean",
) -> Tensor:
    """One update per vector, in order; the vector at place i is update number step + i."""
    _check_size(codes_KD, neighborhood)
    codes_KD = codes_KD.clone()
    for t, x_D in enumerate(_finite(x_ND), start=step):
        winner = nearest(x_D[None], codes_KD, metric)
        weight_K = _row(neighborhood, winner, t, codes_KD)
        codes_KD += beta * weight_K[:, None] * (x_D - codes_KD)
    return codes_KD


def hebbian(codes_KD: Tensor, x_ND: Tensor, neighborhood: Neighborhood, *, beta: float, step: int = 0) -> Tensor:
    """The matrix form, with the dot product's winner: every code moves by the winner's own error."""
    _check_size(codes_KD, neighborhood)
    codes_KD = codes_KD.clone()
    for t, x_D in enumerate(_finite(x_ND), start=step):
        winner = nearest(x_D[None], codes_KD, "dot")
        weight_K = _row(neighborhood, winner, t, codes_KD)
        codes_KD += torch.outer(beta * weight_K, x_D - codes_KD[winner[0]])
    return codes_KD


def batch(
    codes_KD: Tensor, x_ND: Tensor, neighborhood: Neighborhood, *, step: int = 0, metric: str = "euclidean"
) -> Tensor:
    """One update from all vectors; a code that receives no weight stays where it is."""
    _check_size(codes_KD, neighborhood)
    x_ND = _finite(x_ND)
    index_N = nearest(x_ND, codes_KD, metric)
    sums_KD, counts_K = accumulate(x_ND, index_N, len(codes_KD))
    sums_KD, counts_K = smooth(sums_KD, counts_K, neighborhood, torch.tensor(step, device=codes_KD.device))
    reached_K1 = (counts_K > 0)[:, None]
    return torch.where(reached_K1, sums_KD / counts_K.where(counts_K > 0, 1)[:, None], codes_KD)


def _check_size(codes_KD: Tensor, neighborhood: Neighborhood) -> None:
    grid = neighborhood.grid
    if len(codes_KD) != grid.size:
        raise ValueError(f"{len(codes_KD)} codes do not fit a grid of shape {grid.shape}: expected {grid.size}")


def _finite(x_ND: Tensor) -> Tensor:
    return x_ND[x_ND.isfinite().all(1)]


def _row(neighborhood: Neighborhood, winner: Tensor, step: int, like: Tensor) -> Tensor:
    """Row A[k*, :] of the neighborhood matrix, [K]."""
    every = torch.arange(neighborhood.grid.size, device=like.device)
    return neighborhood.weight(neighborhood.grid.distance(winner, every), step).to(like)
