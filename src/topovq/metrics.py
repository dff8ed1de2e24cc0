"""Every measure, on plain tensors: the use of codes, the health of a codebook, the order of a map, images.

Legend: N vectors x, K codes w, D dimensions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from topovq.grid import Grid, check_range
from topovq.neighborhood import Neighborhood
from topovq.ops.accumulate import accumulate
from topovq.ops.search import center_of, nearest
from topovq.ops.smooth import smooth
from topovq.panel import panel

BLOCK = 2**24  # distances held at a time: 64 MiB of float32
STRAY = 10.0  # times as far out as the codes in use: a dead code beyond is far outside the data
SSIM_SIDE, SSIM_WIDTH = 11, 1.5  # pixels of the window, and of its Gaussian


# Use of the codes


def code_counts(indices: Tensor, num_codes: int) -> Tensor:
    """How often each code occurs, int64 [K]; masked tokens (-1) do not count. Does not wait for the device."""
    check_range("token", indices, num_codes, masked=True)
    flat_N = indices.reshape(-1)
    place_N = torch.where(flat_N < 0, num_codes, flat_N)
    counts = torch.zeros(num_codes + 1, dtype=torch.int64, device=indices.device)
    return counts.index_add_(0, place_N, torch.ones_like(place_N))[:num_codes]


def perplexity(counts_K: Tensor) -> Tensor:
    """exp(-sum p log p): from 1 (one code) to K (all alike); 1 where nothing was counted.

    Counts give float64, running means of counts their own type.
    """
    counts_K = counts_K if counts_K.is_floating_point() else counts_K.double()
    share_K = counts_K / counts_K.sum().clamp(min=torch.finfo(counts_K.dtype).tiny)
    return torch.exp(torch.special.entr(share_K).sum())


def usage(counts_K: Tensor) -> Tensor:
    """Share of codes that occur at least once: float64 of counts, float32 of a bool for each code."""
    return (counts_K > 0).to(torch.float32 if counts_K.dtype == torch.bool else torch.float64).mean()


# Health of a codebook: `hits` is the running mean of how often each code is chosen per batch, `decay` its decay, `idle`
# the number of updates since each code was last chosen. Nothing here waits for the device.


class Health(NamedTuple):
    """What `vq.health()` returns; over several codebooks `dead_codes` and `stray_codes` are sums, the others means."""

    usage: float
    """Share of the codes chosen in the last 1 / (1 - decay) updates, whatever was before."""
    perplexity: float
    """exp(entropy) of the running use of the codes: from 1 (one code) to K (all alike)."""
    dead_codes: int
    """Codes that were not chosen lately."""
    drift: float
    """How far the codes moved since health was last asked: their RMS distance to where they were, over their RMS
    distance to their mean. 0.01 is a codebook that hardly moves. nan the first time, and where all codes are alike."""
    tokens: int
    """Tokens that usage, perplexity and dead codes rest on: those of the last 1 / (1 - decay) updates."""
    stray_codes: int = 0
    """Codes that are not finite, or dead and far outside the data (`stray`)."""
    advice: str = ""
    """Which codes are stray, and what to do; empty where none is."""

    def _repr_html_(self) -> str:
        """What a notebook shows: the same figures, named, with units, and the advice where there is any."""
        forms = {"usage": ".1%", "perplexity": ",.1f", "drift": ".2%", "advice": ""}
        told = {name: format(value, forms.get(name, ",")) for name, value in self._asdict().items() if value != ""}
        if math.isnan(self.drift):
            told["drift"] = "not known yet: it is the way since health was last asked"
        return panel("Health", {name.replace("_", " "): figure for name, figure in told.items()})


FIGURES = 6  # the fields above that are numbers: what `health_figures` gives


def used_lately(idle_K: Tensor, decay: float) -> Tensor:
    """Which codes were chosen in the last 1 / (1 - decay) updates, bool [K]."""
    return (idle_K >= 0) & (idle_K < round(1 / (1 - decay)))  # below 0: what a loader that knew no `idle` left there


def chosen_by_hits(hits_K: Tensor, decay: float) -> Tensor:
    """Which codes were chosen lately, as well as `hits` alone can tell, bool [K]: for states without `idle`."""
    once = (1 - decay) * decay ** (1 / (1 - decay))
    return hits_K > once * (1 - 1e-3) if decay else hits_K > 0


def stray(codes_KD: Tensor, used_K: Tensor) -> Tensor:
    """Which codes are not finite, or not used and far outside the data, bool [K].

    The data is where the used codes are: far outside is STRAY times as far from their mean as they are themselves (root
    mean square; where only one is used, as it is from the origin).
    """
    finite_K = codes_KD.isfinite().all(1)
    codes_KD = torch.where(finite_K[:, None], codes_KD, 0).double()  # whose squares do not overflow
    used_K1 = (used_K & finite_K)[:, None]
    number = used_K1.sum()
    mean_D = (codes_KD * used_K1).sum(0) / number.clamp(min=1)
    square_K = (codes_KD - mean_D).square().sum(1)
    spread = torch.where(number > 1, (square_K * used_K1[:, 0]).sum() / number.clamp(min=1), mean_D.square().sum())
    far_K = ~used_K & (square_K > STRAY**2 * spread) & (spread > 0)
    return ~finite_K | far_K


def drift(codes_KD: Tensor, before_KD: Tensor | None) -> Tensor:
    """`Health.drift` of codes that were `before_KD`; nan where that is not known."""
    codes_KD = codes_KD.float()
    if before_KD is None:
        return codes_KD.new_full((), math.nan)
    moved = (codes_KD - before_KD.to(codes_KD)).square().sum(1).mean().sqrt()
    spread = (codes_KD - codes_KD.mean(0)).square().sum(1).mean().sqrt()
    return torch.where(spread > 0, moved / spread, math.nan)


@torch.no_grad()
def health_figures(hits_K: Tensor, idle_K: Tensor, decay: float, codes_KD: Tensor, before_KD: Tensor | None) -> Tensor:
    """The figures of one codebook, float32 [FIGURES] on its device, in the order of `Health`."""
    used_K = used_lately(idle_K, decay)
    return torch.stack(
        [
            usage(used_K),
            perplexity(hits_K).float(),
            (~used_K).sum().float(),
            drift(codes_KD, before_KD),
            hits_K.sum().float() / (1 - decay),
            stray(codes_KD, used_K).sum().float(),
        ]
    )


def health_of_all(several: Sequence[Tensor]) -> Tensor:
    """The figures of several codebooks as those of one, float32 [FIGURES]."""
    stacked_BF = torch.stack(list(several))
    means_F, sums_F = stacked_BF.mean(0), stacked_BF.sum(0)
    return torch.cat([means_F[:2], sums_F[2:3], means_F[3:5], sums_F[5:]])


def as_health(values: Sequence[float]) -> Health:
    """Figures that have arrived on the host."""
    share, perplexed, dead, moved, tokens, strays = values
    return Health(share, perplexed, round(dead), moved, round(tokens), round(strays))


# Order of the map


def quantization_error(x_ND: Tensor, codes_KD: Tensor) -> Tensor:
    """Mean Euclidean distance of a vector to its closest code."""
    apart_N: Tensor = torch.linalg.vector_norm(x_ND - codes_KD[nearest(x_ND, codes_KD)], dim=1)
    return apart_N.mean()


def topographic_error(x_ND: Tensor, codes_KD: Tensor, grid: Grid) -> Tensor:
    """Share of vectors whose two closest codes are not neighbors on the map (see `not_neighbors`)."""
    if len(codes_KD) < 2:
        raise ValueError(f"{len(codes_KD)} codes have no second closest one: expected at least 2")
    center_D = center_of(codes_KD)  # cdist works with squares: their rounding grows with the distance from the origin
    apart = []
    for x in torch.split(x_ND, max(1, BLOCK // len(codes_KD))):
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


def neighbors(grid: Grid) -> Tensor:
    """int64 [K, n]: the places next to each place (one unit away), -1 where there is none."""
    every = torch.arange(grid.size)
    found = []
    for offset in itertools.product((-1, 0, 1), repeat=grid.ndim):
        # On an axis of two places both ways lead to the same one.
        if not any(offset) or any((n == 1 and o) or (n == 2 and o < 0) for n, o in zip(grid.shape, offset)):
            continue
        there = grid.full.shift(every, offset, wrap=True)
        near = (grid.full.distance(every, there) < 1 + 1e-9) & (there != every) & (there < grid.size)
        found.append(torch.where(near, there, -1))
    return torch.stack(found, 1) if found else torch.full((grid.size, 1), -1)


def neighbor_distances(codes_KD: Tensor, grid: Grid) -> Tensor:
    """The U-matrix, float32 [K]: mean Euclidean distance of a code to the codes next to it; 0 for a lone one."""
    near_Kn, codes_KD = neighbors(grid), codes_KD.float().cpu()
    total_K, number_K = torch.zeros(grid.size), torch.zeros(grid.size)
    for near_K in near_Kn.unbind(1):
        there = near_K >= 0
        apart_K = torch.linalg.vector_norm(codes_KD - codes_KD[near_K.clamp(min=0)], dim=1)
        total_K += torch.where(there, apart_K, 0.0)
        number_K += there
    return total_K / number_K.clamp(min=1)


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


# Images


def to_psnr(squared_error: float) -> float:
    """Mean squared error of pixels (0 to 255) -> peak signal-to-noise ratio in dB; infinity where there is none."""
    return 10 * math.log10(255**2 / squared_error) if squared_error else math.inf


def psnr(ours: Tensor, theirs: Tensor) -> float:
    """Peak signal-to-noise ratio of two uint8 images in dB."""
    return to_psnr(float((ours.double() - theirs.double()).square().mean()))


def ssim(ours: Tensor, theirs: Tensor) -> Tensor:
    """Structural similarity of images [B, C, H, W] with pixels 0 to 255, [B] (Wang et al. 2004).

    Means, variances and covariance are under an 11 x 11 Gaussian of width 1.5, of smaller images under as many pixels
    as they have; the borders are left out.
    """
    if ours.shape != theirs.shape or ours.ndim != 4:
        raise ValueError(f"images of shapes {tuple(ours.shape)} and {tuple(theirs.shape)} must be alike, [B, C, H, W]")
    side = min(SSIM_SIDE, *((length - 1) // 2 * 2 + 1 for length in ours.shape[2:]))
    x, y = ours.double(), theirs.double()  # differences of squares; and float32 convolutions may round to 10 bits
    offset = torch.arange(side, device=x.device, dtype=x.dtype) - side // 2
    weight = torch.exp(-offset.square() / (2 * SSIM_WIDTH**2))
    weight = (weight / weight.sum()).expand(x.shape[1], 1, 1, -1)

    def mean(z: Tensor) -> Tensor:
        z = torch.nn.functional.conv2d(z, weight, groups=x.shape[1])
        return torch.nn.functional.conv2d(z, weight.mT, groups=x.shape[1])

    mean_x, mean_y = mean(x), mean(y)
    var_x, var_y = mean(x * x) - mean_x**2, mean(y * y) - mean_y**2
    covariance = mean(x * y) - mean_x * mean_y
    near, far = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    similar = (2 * mean_x * mean_y + near) * (2 * covariance + far)
    similar = similar / ((mean_x**2 + mean_y**2 + near) * (var_x + var_y + far))
    return similar.mean((1, 2, 3))
