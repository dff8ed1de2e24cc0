"""The start of the recommended rule: a map laid over the first batch."""

from math import nan

import pytest
import torch

from topovq import KohonenVQ, ResidualVQ
from topovq.grid import Grid
from topovq.metrics import topographic_error
from topovq.ops.starts import _directions, lay_map


def some(n: int, d: int = 4) -> torch.Tensor:
    """Vectors that differ most along their first dimensions."""
    return torch.randn(n, d, generator=torch.Generator().manual_seed(0)) * torch.tensor([3.0, 2.0, 1.0, 0.5])[:d]


def laid(x: torch.Tensor, grid: Grid, metric: str = "euclidean") -> torch.Tensor:
    codes, vectors = lay_map(x, x.isfinite().all(1), grid, metric, "exact", False)
    assert vectors.item() == x.isfinite().all(1).sum()
    return codes


GRIDS = [
    Grid(64),
    Grid(64, wrap=True),
    Grid((8, 8)),
    Grid((7, 10), size=64),
    Grid((8, 8), wrap=True),
    Grid((4, 16), wrap=(True, False)),
    Grid((8, 8), topology="hexagonal"),
    Grid((8, 8), topology="hexagonal", wrap=True),
    Grid((4, 4, 4)),
    Grid((2, 2, 4, 4)),
    Grid((1, 64)),
]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_all_codes_are_used_and_neighbors_are_alike(grid):
    x = some(2000)
    codes = laid(x, grid)
    closest = torch.cdist(x, codes)
    used = torch.bincount(closest.argmin(1), minlength=64) > 0
    assert used.double().mean() > 0.98
    assert topographic_error(x, codes, grid) < (
        0.3 if grid.ndim == 2 and min(grid.shape) > 1 and not all(grid.wrap) else 0.75
    )
    near, far = (grid.distance_matrix() < 1.2), (grid.distance_matrix() > 3)
    apart = torch.cdist(codes, codes)
    assert apart[near].mean() < 0.5 * apart[far].mean()
    # As good as K-means with one code in four left out.
    assert closest.amin(1).square().mean() < 0.4 * x.square().sum(1).mean()


def test_the_longest_axis_goes_along_the_first_direction():
    codes = laid(some(2000), Grid((4, 16)))
    along = codes.view(4, 16, 4)
    assert abs(torch.corrcoef(torch.stack([along[:, :, 0].flatten(), torch.arange(16.0).repeat(4)]))[0, 1]) > 0.9


def test_directions_are_those_of_an_eigenvalue_solver():
    covariance = some(500).double().T.cov()
    values, vectors = torch.linalg.eigh(covariance)
    for number, (direction, spread) in enumerate(_directions(covariance, 3), 1):
        assert abs(direction @ vectors[:, -number]) == pytest.approx(1, abs=1e-6)
        assert spread == pytest.approx(values[-number].sqrt().item(), rel=1e-6)
    for direction, spread in _directions(torch.zeros(3, 3, dtype=torch.float64), 3):
        assert direction.norm() == pytest.approx(1)
        assert spread < 1e-12


def test_far_from_the_origin_it_is_the_same():
    x = (some(2000) * 64).round() / 64  # so that nothing is rounded there
    here, there = laid(x, Grid((8, 8))), laid(x + 8192, Grid((8, 8))) - 8192
    error = [torch.cdist(x, codes).amin(1).square().mean() for codes in (here, there)]
    assert error[1] == pytest.approx(error[0].item(), rel=0.02)
    assert topographic_error(x, there, Grid((8, 8))) < 0.25


def test_vectors_with_nan_are_left_out():
    x = some(200)
    dirty = torch.cat([x, torch.full((3, 4), nan)])[torch.randperm(203, generator=torch.Generator().manual_seed(1))]
    torch.testing.assert_close(laid(dirty[dirty.isfinite().all(1)], Grid((4, 4))), laid(dirty, Grid((4, 4))))


@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_few_vectors_will_do(n, metric):
    x = some(n)
    codes = laid(x, Grid((8, 8)), metric)
    assert codes.isfinite().all()
    assert len(codes.unique(dim=0)) == 64
    low, high = x.amin(0), x.amax(0)
    assert ((codes > low - 0.1) & (codes < high + 0.1)).all()


@pytest.mark.parametrize("value", [0.0, 1.0, -1e4])
def test_vectors_that_are_all_alike_give_codes_that_are_not(value):
    codes = laid(torch.full((100, 4), value), Grid((8, 8)))
    assert len(codes.unique(dim=0)) == 64
    assert (codes - value).abs().max() <= 0.1 * abs(value) + 1e-3


def test_vectors_along_a_line_use_more_than_a_row_of_the_map():
    x = torch.linspace(-1, 1, 500)[:, None] * torch.tensor([[1.0, 2.0, 0.5, 1.0]])
    for vectors in (x, x[:, :1]):
        assert torch.cdist(vectors, laid(vectors, Grid((8, 8)))).argmin(1).unique().numel() > 30


# In a quantizer


def test_frozen_codes_stay_and_counts_are_what_a_batch_brings():
    vq = KohonenVQ(4, 64)
    vq.freeze([3, 5])
    before = vq.codebook.clone()
    book = vq.codebook_of(0)
    book.initialize(some(160), torch.ones(160, dtype=torch.bool))
    moved = (vq.codebook != before).any(1)
    assert moved.sum() == 62
    assert not moved[[3, 5]].any()
    assert book.counts[~book.frozen].unique().tolist() == [2.5]
    torch.testing.assert_close(book.sums, book.codes * book.counts[:, None])
    assert book.is_initialized


def test_a_first_batch_without_a_vector_waits_for_the_next():
    for options in ({}, {"kmeans_init": True}):
        vq = KohonenVQ(4, 64, **options)
        before = {name: value.clone() for name, value in vq.state_dict().items()}
        vq(torch.randn(0, 4))
        vq(torch.randn(50, 4), mask=torch.zeros(50, dtype=torch.bool))
        assert all(torch.equal(value, before[name]) for name, value in vq.state_dict().items())
        vq(some(100) + 50)
        assert vq.codebook.mean() > 40


def test_codes_that_were_set_stay():
    vq = KohonenVQ(4, 64)
    vq.codebook = torch.full((64, 4), 7.0)
    vq(torch.full((1, 4), 7.1))
    assert (vq.codebook - 7).abs().max() < 0.1


def test_who_does_not_start_from_the_data():
    for options in (
        {"neighborhood": "none"},
        {"neighborhood": "narrowing"},
        {"ema_update": False},
        {"decay": 1.0},
        {"freeze_codebook": True},
    ):
        vq = KohonenVQ(4, 64, **options)
        vq.load_state_dict(KohonenVQ(4, 64).state_dict())  # of one that would
        before = vq.codebook.clone()
        vq(torch.full((1, 4), 50.0))
        assert (vq.codebook - before).abs().max() < 1, options


def test_each_quantizer_of_a_row_starts_from_what_the_ones_before_left_over():
    vq = ResidualVQ(4, 64, num_quantizers=3)
    vq(some(500))
    spread = [book.codes.std().item() for book in vq.maps]
    assert spread[0] > 2 * spread[1] > 2 * spread[2]


def test_every_head_has_a_start_of_its_own():
    vq = KohonenVQ(8, 64, heads=2, codebook_dim=4, separate_codebook_per_head=True)
    vq(torch.randn(300, 8))
    first, second = vq.codebook
    assert not torch.equal(first, second)
    assert all(book.is_initialized for book in vq.books())


def test_a_half_precision_model_starts_too():
    vq = KohonenVQ(4, 64).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        vq(some(500).bfloat16())
    assert vq.codebook.dtype == torch.float32
    assert torch.bincount(vq.codebook_of(0).search(some(500)), minlength=64).gt(0).double().mean() > 0.9
