import math

import pytest
import torch

from topovq import metrics
from topovq.grid import Grid


def test_code_counts_leave_masked_tokens_out():
    counts = metrics.code_counts(torch.tensor([[0, 2, -1], [2, 2, -1]]), 4)
    assert counts.tolist() == [1, 0, 3, 0]
    assert counts.dtype == torch.int64
    assert metrics.code_counts(torch.tensor([], dtype=torch.int64), 2).tolist() == [0, 0]


def test_a_token_beyond_the_codebook_is_refused():
    with pytest.raises(ValueError, match="token 7 is out of range: expected 0 to 3"):
        metrics.code_counts(torch.tensor([0, 7]), 4)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([5, 0, 0], 1),
        ([2, 2, 2, 2], 4),
        # p = 1/4, 1/4, 1/2: entropy = 1/2 ln 4 + 1/2 ln 2 = 1.5 ln 2, so 2^1.5
        ([1, 1, 2], 2.8284271247461903),
        ([1, 3], 1.7547653506033293),  # 4 / 27^(1/4)
        ([0, 0], 1),
        ([0.001, 0.001], 2),  # running means are shares as well
    ],
)
def test_perplexity(counts, expected):
    perplexity = metrics.perplexity(torch.tensor(counts))
    assert perplexity.dtype == (torch.float64 if isinstance(counts[0], int) else torch.float32)
    assert perplexity.item() == pytest.approx(expected, rel=1e-12 if isinstance(counts[0], int) else 1e-6)


def test_usage():
    assert metrics.usage(torch.tensor([3, 0, 1, 0])).item() == 0.5
    assert metrics.usage(torch.tensor([0, 0])).item() == 0


# Codes 0, 2, 6 on a line.
CODES = torch.tensor([[0.0], [2.0], [6.0]])


def test_quantization_error():
    # Distances to the closest code: 1, 0, 1, 3 (9 to 6).
    x = torch.tensor([[-1.0], [2.0], [5.0], [9.0]])
    assert metrics.quantization_error(x, CODES).item() == 1.25
    # In two dimensions: (3, 4) is 5 from the origin.
    assert metrics.quantization_error(torch.tensor([[3.0, 4.0]]), torch.zeros(1, 2)).item() == 5


def test_topographic_error():
    # On a line every pair of closest codes here is a pair of neighbors.
    x = torch.tensor([[-1.0], [0.5], [3.9], [5.0]])
    assert metrics.topographic_error(x, CODES, Grid(3)).item() == 0
    # Swap codes 1 and 2 on the map, 0, 6, 2: for -1 and 0.5 the closest two are then 0 and 2, two places apart.
    assert metrics.topographic_error(x, CODES[[0, 2, 1]], Grid(3)).item() == 0.5
    # On a ring of 3 all are neighbors.
    assert metrics.topographic_error(x, CODES[[0, 2, 1]], Grid(3, wrap=True)).item() == 0


def test_diagonal_places_are_neighbors_on_a_square_but_not_between_hexagons():
    # The two closest codes to the vector lie at places (0, 0) and (1, 1).
    codes = torch.tensor([[0.0], [5.0], [9.0], [1.0]])
    x = torch.tensor([[0.4]])
    assert metrics.topographic_error(x, codes, Grid((2, 2))).item() == 0
    # Of a hexagon grid (1, 1) lies at (0.866, 1.5): sqrt(3) away from (0, 0).
    assert metrics.topographic_error(x, codes, Grid((2, 2), topology="hexagonal")).item() == 1


def test_errors_are_right_far_from_the_origin():
    # Squares of float32 numbers around 1e4 are off by several units: distances from them would be noise.
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 3, generator=generator) + 1e4
    codes = torch.randn(49, 3, generator=generator) + 1e4
    apart = torch.cdist(x.double(), codes.double())
    assert metrics.quantization_error(x, codes).item() == pytest.approx(apart.amin(1).mean().item(), rel=1e-6)
    grid = Grid((7, 7))
    first, second = apart.topk(2, largest=False).indices.unbind(1)
    expected = (grid.distance(first, second) > math.sqrt(2) + 1e-9).double().mean().item()
    assert metrics.topographic_error(x, codes, grid).item() == expected


def test_many_vectors_are_taken_in_blocks(monkeypatch):
    x, codes = torch.randn(50, 2), torch.randn(12, 2)
    whole = metrics.topographic_error(x, codes, Grid((3, 4)))
    monkeypatch.setattr(metrics, "BLOCK", 100)  # 8 vectors at a time
    assert torch.equal(metrics.topographic_error(x, codes, Grid((3, 4))), whole)


def test_one_code_has_no_topographic_error():
    with pytest.raises(ValueError, match="1 codes have no second closest one: expected at least 2"):
        metrics.topographic_error(torch.randn(3, 2), torch.randn(1, 2), Grid(1))


def test_psnr_by_hand():
    black = torch.zeros(3, 2, 2, dtype=torch.uint8)
    assert metrics.psnr(black, torch.full_like(black, 255)) == 0
    # One gray level off in every pixel: 20 log10(255).
    assert metrics.psnr(black + 1, black) == pytest.approx(48.1308036)
    assert metrics.psnr(black, black) == math.inf
    assert metrics.to_psnr(255**2 / 100) == pytest.approx(20)


def test_ssim_is_that_of_scikit_image():
    from skimage.metrics import structural_similarity

    torch.manual_seed(0)
    x = torch.randint(0, 256, (3, 3, 17, 20), dtype=torch.uint8)
    noise = 30 * torch.randn(x.shape)
    y = (x + noise * torch.tensor([0.1, 1.0, 3.0]).view(3, 1, 1, 1)).clamp(0, 255).to(torch.uint8)
    like_the_paper = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False, "data_range": 255}
    theirs = [structural_similarity(a.numpy(), b.numpy(), channel_axis=0, **like_the_paper) for a, b in zip(x, y)]
    torch.testing.assert_close(metrics.ssim(x, y), torch.tensor(theirs), atol=1e-10, rtol=0)
    torch.testing.assert_close(metrics.ssim(x, x), torch.ones(3, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"\(3, 3, 17, 20\) and \(1, 3, 17, 20\) must be alike"):
        metrics.ssim(x, y[:1])
