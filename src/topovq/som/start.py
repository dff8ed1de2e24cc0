"""Where codes start: on the plane of the principal components, at samples, at random, or by k-means++.

Legend: N vectors, D features, K codes, M axes of the start, weight_N the samples' weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.cluster import kmeans_plusplus
from torch import Tensor

from topovq.grid import Grid
from topovq.som.tables import SparseTable, Table

INITS = ("pca", "sample", "random", "kmeans++")
LARGEST_COVARIANCE = 256  # features up to which the covariance matrix itself is diagonalized
SPREAD = math.sqrt(3)  # half the width, in standard deviations, of a uniform distribution


@dataclass
class Plane:
    """The points mean + place @ axes: mean [D], axes [M, D] orthonormal."""

    mean_D: Tensor
    axes_MD: Tensor


def principal_axes(table: Table, weight_N: Tensor, count: int) -> tuple[Plane, Tensor]:
    """(plane of the first components, standard deviation [M] along each), M = min(count, D).

    The sign of an axis makes its largest entry positive, so that the same data gives the same start.
    """
    mean_D = table.mean(weight_N)
    total = weight_N.sum()
    count = min(count, table.dim)
    basis_DR: Tensor | None = None
    if table.dim > LARGEST_COVARIANCE:
        # Subspace iteration: a few passes bring a random basis to the leading components, near enough for a start.
        generator = torch.Generator().manual_seed(0)
        width = min(table.dim, count + 8)
        basis_DR = torch.randn(table.dim, width, generator=generator, dtype=torch.float64).to(weight_N)
        for _ in range(6):
            product_DR = torch.zeros_like(basis_DR)
            for rows, x in table.centered_blocks(mean_D):
                product_DR += x.T @ (weight_N[rows, None] * (x @ basis_DR))
            basis_DR = torch.linalg.qr(product_DR)[0]
    size = table.dim if basis_DR is None else basis_DR.shape[1]
    covariance = torch.zeros(size, size, dtype=torch.float64, device=table.device)
    for rows, x in table.centered_blocks(mean_D):
        x = x if basis_DR is None else x @ basis_DR
        covariance += (x.T @ (x * weight_N[rows, None])) / total
    values, vectors = torch.linalg.eigh(covariance)
    vectors = vectors[:, -count:].flip(1).to(weight_N)
    axes_MD = (vectors if basis_DR is None else basis_DR @ vectors).T
    largest = axes_MD.gather(1, axes_MD.abs().argmax(1, keepdim=True))
    axes_MD = axes_MD * torch.where(largest < 0, -1.0, 1.0).to(axes_MD)
    return Plane(mean_D, axes_MD), values[-count:].flip(0).clamp(min=0).sqrt().to(weight_N)


def map_places(grid: Grid) -> Tensor:
    """Where the places of a map lie on the axes of the start, [K, M], in standard deviations.

    An open axis takes one component, from end to end; one that wraps takes two and goes round in them.
    """
    columns = []
    for along, n, period in zip(grid.positions().T, grid.shape, grid.periods):
        if math.isfinite(period):
            angle = 2 * math.pi * along / period
            columns += [math.sqrt(2) * angle.cos(), math.sqrt(2) * angle.sin()]
        else:
            columns.append(SPREAD * (2 * along / along.amax() - 1) if n > 1 else torch.zeros_like(along))
    return torch.stack(columns, 1)


def even_places(count: int, ndim: int) -> Tensor:
    """`count` points spread evenly over a cube, [K, M], in standard deviations: for codes that have no map.

    Point k is frac(k * g), with g the powers of the generalized golden ratio: phi^(ndim + 1) = phi + 1.
    """
    phi = 2.0
    for _ in range(64):
        phi = (1 + phi) ** (1 / (ndim + 1))
    step_M = phi ** -torch.arange(1, ndim + 1, dtype=torch.float64)
    return SPREAD * (2 * ((torch.arange(1, count + 1)[:, None] * step_M) % 1) - 1)


def initial_codes(
    init: Any, table: Table, weight_N: Tensor, places_KM: Tensor, random: np.random.RandomState
) -> Tensor:
    """Codes [K, D]."""
    count = len(places_KM)
    if not isinstance(init, str):
        codes_KD = torch.as_tensor(np.array(init, dtype=np.float64)).to(weight_N)
        if codes_KD.shape != (count, table.dim) or not codes_KD.isfinite().all():
            raise ValueError(
                f"init of shape {tuple(codes_KD.shape)} must be finite numbers of shape {(count, table.dim)}: "
                "one row for each code, one column for each feature"
            )
        return codes_KD
    if init not in INITS:
        raise ValueError(f"init={init!r} is unknown; choose one of {', '.join(map(repr, INITS))}, or give the codes")
    if init == "pca":
        plane, deviation_M = principal_axes(table, weight_N, places_KM.shape[1])
        places_KM = places_KM[:, : len(deviation_M)].to(weight_N)
        return plane.mean_D + (places_KM * deviation_M) @ plane.axes_MD
    if init == "random":
        mean_D = table.mean(weight_N)
        variance_D = torch.zeros_like(mean_D)
        for rows, x in table.centered_blocks(mean_D):
            variance_D += weight_N[rows] @ x.square() / weight_N.sum()
        noise_KD = torch.from_numpy(random.standard_normal((count, table.dim))).to(weight_N)
        return mean_D + noise_KD * variance_D.sqrt()
    chance_N = weight_N.double().cpu().numpy()
    if np.count_nonzero(chance_N) < count:
        raise ValueError(
            f"init={init!r} takes {count} different samples, but n_samples={np.count_nonzero(chance_N)} with a weight "
            "above 0: use fewer codes, or init='pca'"
        )
    if init == "sample":
        x_KD = table.dense(random.choice(table.n, count, replace=False, p=chance_N / chance_N.sum()))
    else:
        samples = table.x_ND if isinstance(table, SparseTable) else _filled(table, weight_N)
        _, chosen_K = kmeans_plusplus(samples, count, sample_weight=chance_N, random_state=random)
        x_KD = table.dense(chosen_K)
    start_KD = torch.from_numpy(x_KD).to(weight_N)
    return torch.where(start_KD.isnan(), table.mean(weight_N), start_KD)


def _filled(table: Table, weight_N: Tensor) -> np.ndarray:
    """The data as a NumPy array, with the mean of the feature where a value is missing."""
    x = table.dense(slice(None))
    return np.where(np.isnan(x), table.mean(weight_N).cpu().numpy(), x)
