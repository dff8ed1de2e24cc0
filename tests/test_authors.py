"""The layer beside the Kohonen-VAE authors' own, written out as their equations: one-hots, a K x K matrix, float32."""

from itertools import product

import pytest
import torch
from torch import Tensor

from topovq import KohonenVQ

SIZE, DIM, TAU, DECAY, EPS = 64, 16, 0.1, 0.99, 1e-5


class Dense:
    """w, m and N of their layer, and its step."""

    def __init__(self, codes: Tensor, near: Tensor, count_init: float, update_empty: bool) -> None:
        self.w, self.m = codes.clone(), codes.clone()
        self.n = torch.full((SIZE,), count_init)
        self.near, self.update_empty, self.t = near, update_empty, 0

    def __call__(self, x: Tensor) -> Tensor:
        index = (x.square().sum(1, keepdim=True) + self.w.square().sum(1) - 2 * x @ self.w.T).argmin(1)
        blur = self.near / (1 + self.t * TAU)
        chosen = torch.eye(SIZE)[index] @ blur.fill_diagonal_(1.0)
        count, total = chosen.sum(0), chosen.T @ x
        n, m = self.n * DECAY + (1 - DECAY) * count, self.m * DECAY + (1 - DECAY) * total
        if self.update_empty:
            n = (n + EPS) / (n.sum() + SIZE * EPS) * n.sum()
            self.n, self.m, self.w = n, m, m / n[:, None]
        else:
            moved = count > 0
            self.n, self.m = torch.where(moved, n, self.n), torch.where(moved[:, None], m, self.m)
            self.w = torch.where(moved[:, None], self.m / self.n[:, None], self.w)
        self.t += 1
        return index


@pytest.mark.parametrize("neighborhood", ["hard", "none"])
@pytest.mark.parametrize(("count_init", "update_empty", "grid"), list(product([0.0, 1.0], [True, False], [64, (8, 8)])))
def test_no_index_differs_over_200_drifting_steps(neighborhood, count_init, update_empty, grid):
    torch.manual_seed(0)
    vq = KohonenVQ(
        DIM, SIZE, grid=grid, neighborhood=neighborhood, tau=TAU, count_init=count_init, update_empty=update_empty
    )
    near = (vq.grid.distance_matrix() < 1.5).float() if neighborhood == "hard" else torch.zeros(SIZE, SIZE)
    theirs = Dense(vq.codebook, near, count_init, update_empty)
    # With no count at the start, codes that are not chosen lie 1e5 and more away in the first steps.
    farthest = 0.0
    for t in range(200):
        x = torch.randn(256, DIM) * (1 + t / 100) + t / 50
        expected, codes = theirs(x), vq.codebook.double()
        index = vq(x).indices
        farthest = max(farthest, float(vq.codebook.abs().max()))
        other = index != expected
        if other.any():  # as far away, to within rounding
            apart = torch.cdist(x[other].double(), codes, compute_mode="donot_use_mm_for_euclid_dist")
            mine, others = (apart.gather(1, i[other][:, None]) for i in (index, expected))
            assert torch.allclose(mine, others, rtol=1e-6)
    assert torch.allclose(vq.codebook, theirs.w, rtol=1e-3, atol=1e-4)
    if count_init == 0 and update_empty and neighborhood == "none":
        assert farthest > 1e4
