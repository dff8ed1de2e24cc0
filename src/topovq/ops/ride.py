"""ride: how codes move along with their neighborhood on the map, and how dead ones come back beside busy ones.

Legend: K codes w, D dimensions; S, c the sums and counts of a batch; n running counts, m running sums; t the step
(codebook.py has the equations).
"""

from __future__ import annotations

import torch
from torch import Tensor

from topovq.grid import Grid
from topovq.neighborhood import (
    GAIN,
    LEAST_WEIGHT,
    LONGEST_WAIT,
    MOST_SPREAD,
    NEAR,
    PULL,
    PULL_SPAN,
    WAIT,
    WAIT_VECTORS,
    Neighborhood,
)
from topovq.ops.smooth import smooth
from topovq.ops.use import CHOSEN, NEVER, waited

LEAST_COUNT = 1e-20  # running count below which a code has no mean of its own


def pull_at(step: Tensor, decay: float) -> Tensor:
    """lam, the pull to the neighbors at `step`, float64, 0-dim: PULL times a code's own pull, over GAIN."""
    pull = PULL * (1 - decay) / GAIN / (1 + step.double() / PULL_SPAN).sqrt()
    return pull.clamp(max=1)


def ride(
    codes_KD: Tensor, sums_KD: Tensor, counts_K: Tensor, around: Neighborhood, step: Tensor, decay: float
) -> Tensor:
    """u [K, D], how far each code rides: GAIN times the mean, over vectors x of a batch with winners j, weighted by
    A_jk, of (x - w_j) + lam (w_j - w_k)."""
    pull = pull_at(step, decay).to(codes_KD)
    moved_KD, weight_K = smooth(residuals(codes_KD, sums_KD, counts_K, step, decay), counts_K, around, step)
    rides_K1 = (weight_K > LEAST_WEIGHT)[:, None]
    return torch.where(rides_K1, GAIN * (moved_KD / torch.where(rides_K1, weight_K[:, None], 1) - pull * codes_KD), 0)


def residuals(codes_KD: Tensor, sums_KD: Tensor, counts_K: Tensor, step: Tensor, decay: float) -> Tensor:
    """F [K, D]: each code's sum, less what it would be at the code, but for the pull's share of that."""
    return sums_KD - (1 - pull_at(step, decay).to(codes_KD)) * counts_K[:, None] * codes_KD


def revive_on_map(
    codes_KD: Tensor, sums_KD: Tensor, counts_K: Tensor, idle_K: Tensor, frozen_K: Tensor,
    batch_KD: Tensor, batch_K: Tensor, step: Tensor, grid: Grid, cosine: bool,
) -> None:  # fmt: skip
    """Put dead codes beside busy ones, in place: the last part of an update, from its sums and counts alone.

    A code that waited too long asks one place at a random distance, mostly near. If the code there was chosen in this
    batch and is busier than the mean, the two share its running count, and the dead one comes to about a vector that
    chose it. Of those that ask the same place, the last in the codebook's order is heard.
    """
    size = len(counts_K)
    vectors = batch_K.sum()
    wait = (WAIT_VECTORS * size / vectors).clamp(WAIT, LONGEST_WAIT)
    place_K = asked(grid, step, counts_K.device)
    donor_K = place_K.clamp(min=0)
    hears_K = (place_K >= 0) & (batch_K[donor_K] >= CHOSEN) & (counts_K[donor_K] > counts_K.mean())
    asks_K = (vectors > 0) & (waited(idle_K) > wait) & ~frozen_K & hears_K
    every_K = torch.arange(size, device=counts_K.device)
    heard_K = every_K.new_full((size + 1,), -1).scatter_reduce(0, torch.where(asks_K, donor_K, size), every_K, "amax")
    revived_K = asks_K & (heard_K[donor_K] == every_K)
    chosen_K1 = batch_K[donor_K].clamp(min=CHOSEN)[:, None]
    from_KD = codes_KD[donor_K]
    new_KD = from_KD + chosen_K1.clamp(1, MOST_SPREAD).sqrt() * (batch_KD[donor_K] / chosen_K1 - from_KD)
    new_KD = torch.nn.functional.normalize(new_KD, dim=1) if cosine else new_KD
    share_K = torch.where((heard_K[:size] >= 0) & ~frozen_K, 0.5, 1.0).to(counts_K.dtype)
    counts = torch.where(revived_K, 0.5 * counts_K[donor_K], share_K * counts_K)
    revived_K1 = revived_K[:, None]
    sums_KD.copy_(torch.where(revived_K1, new_KD * counts[:, None], share_K[:, None] * sums_KD))
    codes_KD.copy_(torch.where(revived_K1, new_KD, codes_KD))
    counts_K.copy_(counts)
    idle_K.copy_(torch.where(revived_K, NEVER, idle_K))


def asked(grid: Grid, step: Tensor, device: torch.device) -> Tensor:
    """The place that each code would ask at `step`, int64 [K]; -1 where there is none.

    Its distance is NEAR / u, its direction any.
    """
    every_K = torch.arange(grid.size, device=device)
    directions = [
        torch.zeros(grid.size, device=device) if n == 1 else 2 * uniform(every_K, step, 1 + axis) - 1
        for axis, n in enumerate(grid.shape)
    ]
    length_K = sum(direction.square() for direction in directions).sqrt()  # type: ignore[union-attr]
    far_K = NEAR / uniform(every_K, step, 0) / length_K.clamp(min=1e-12)
    return grid.at(grid.positions(every_K) + torch.stack([far_K * direction for direction in directions], -1))


def uniform(every_K: Tensor, step: Tensor | int, draw: int) -> Tensor:
    """Numbers between 0 and 1, float32 [K], that follow from the code, the step and the number of the draw alone.

    So all ranks have the same ones.
    """
    seed = _mixed(torch.as_tensor(step, device=every_K.device) * 8 + draw)
    return ((_mixed(every_K ^ seed) >> 8).float() + 0.5) * 2.0**-24


def _mixed(bits: Tensor) -> Tensor:
    """A hash of 32 bits, held in int64."""
    low = 0xFFFFFFFF
    bits = bits & low
    bits = ((bits ^ (bits >> 16)) * 0x7FEB352D) & low
    bits = ((bits ^ (bits >> 15)) * 0x846CA68B) & low
    return bits ^ (bits >> 16)
