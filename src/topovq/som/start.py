"""Where codes start: on the plane of the principal components, at samples, at random, or by k-means++.

Legend: N vectors, D features, K codes, M axes of the start.
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
from topovq.som.passes import Passes, all_rows
from topovq.som.questions import Covariance, Images
from topovq.som.tables import SparseTable

INITS = ("pca", "sample", "random", "kmeans++")
LARGEST_COVARIANCE = 256  # features up to which the covariance matrix itself is diagonalized
SUBSPACE_PASSES = 6  # over the data, where there are more features
SPREAD = math.sqrt(3)  # half the width, in standard deviations, of a uniform distribution


@dataclass
class Plane:
    """The points mean + place @ axes: mean [D], axes [M, D] orthonormal."""

    mean_D: Tensor
    axes_MD: Tensor


def principal_axes(passes: Passes, count: int) -> tuple[Plane, Tensor]:
    """(plane of the first components, standard deviation [M] along each), M = min(count, D), in float64.

    The sign of an axis makes its largest entry positive, so that the same data gives the same start.
    """
    mean_D, total = passes.mean_D, passes.moments["weight"]
    count = min(count, passes.dim)
    basis_DR: Tensor | None = None
    if passes.dim > LARGEST_COVARIANCE:
        # Subspace iteration: a few passes bring a random basis to the leading components, near enough for a start.
        generator = torch.Generator().manual_seed(0)
        width = min(passes.dim, count + 8)
        basis_DR = torch.randn(passes.dim, width, generator=generator, dtype=torch.float64).to(mean_D)
        for _ in range(SUBSPACE_PASSES):
            basis_DR = torch.linalg.qr(passes.added(Images(mean_D, basis_DR))["images"])[0]
    values, vectors = torch.linalg.eigh(passes.added(Covariance(mean_D, basis_DR))["products"] / total)
    vectors = vectors[:, -count:].flip(1)
    axes_MD = (vectors if basis_DR is None else basis_DR @ vectors).T
    largest = axes_MD.gather(1, axes_MD.abs().argmax(1, keepdim=True))
    axes_MD = axes_MD * torch.where(largest < 0, -1.0, 1.0).to(axes_MD)
    return Plane(mean_D, axes_MD), values[-count:].flip(0).clamp(min=0).sqrt()


def passes_of_start(init: Any, dim: int, standardize: bool) -> int:
    """How many passes over the data a start takes, the one for its mean included."""
    if not isinstance(init, str):
        return 1 + standardize
    return 2 + standardize + (SUBSPACE_PASSES if init == "pca" and dim > LARGEST_COVARIANCE else 0)


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


def initial_codes(init: Any, passes: Passes, places_KM: Tensor, random: np.random.RandomState) -> Tensor:
    """Codes [K, D], in the type of the data and on its device."""
    codes_KD = _initial_codes(init, passes, places_KM, random)
    return codes_KD.to(dtype=passes.dtype, device=passes.device)


def _initial_codes(init: Any, passes: Passes, places_KM: Tensor, random: np.random.RandomState) -> Tensor:
    count = len(places_KM)
    if not isinstance(init, str):
        codes_KD = torch.as_tensor(np.array(init, dtype=np.float64))
        if codes_KD.shape != (count, passes.dim) or not codes_KD.isfinite().all():
            raise ValueError(
                f"init of shape {tuple(codes_KD.shape)} must be finite numbers of shape {(count, passes.dim)}: "
                "one row for each code, one column for each feature"
            )
        return codes_KD
    if init not in INITS:
        raise ValueError(f"init={init!r} is unknown; choose one of {', '.join(map(repr, INITS))}, or give the codes")
    if init == "pca":
        plane, deviation_M = principal_axes(passes, places_KM.shape[1])
        places_KM = places_KM[:, : len(deviation_M)].to(plane.mean_D)
        return plane.mean_D + (places_KM * deviation_M) @ plane.axes_MD
    mean_D = passes.mean_D
    if init == "random":
        noise_KD = torch.from_numpy(random.standard_normal((count, passes.dim))).to(mean_D)
        return mean_D + noise_KD * passes.deviation()
    if init == "sample":
        start_KD = torch.from_numpy(passes.sample(count, random)).to(mean_D)
    else:
        start_KD = torch.from_numpy(_plus_plus(passes, count, random)).to(mean_D)
    return torch.where(start_KD.isnan(), mean_D, start_KD)


def _plus_plus(passes: Passes, count: int, random: np.random.RandomState) -> np.ndarray:
    if not passes.in_memory:
        raise ValueError(
            "init='kmeans++' looks at all samples for each code, so it takes arrays alone: use init='pca' or 'sample'"
        )
    table, weight_N = all_rows(passes), torch.cat([weight for _, weight in passes])
    chance_N = weight_N.double().cpu().numpy()
    if np.count_nonzero(chance_N) < count:
        raise ValueError(
            f"init='kmeans++' takes {count} different samples, but n_samples={np.count_nonzero(chance_N)} with a "
            "weight above 0: use fewer codes, or init='pca'"
        )
    if isinstance(table, SparseTable):
        samples = table.x_ND
    else:
        x = table.dense(slice(None))
        samples = np.where(np.isnan(x), passes.mean_D.cpu().numpy().astype(x.dtype), x)
    return table.dense(kmeans_plusplus(samples, count, sample_weight=chance_N, random_state=random)[1])
