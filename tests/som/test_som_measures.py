"""Measures of maps: by hand, and against their definitions."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_iris

from topovq import metrics, rules
from topovq.grid import Grid
from topovq.neighborhood import Neighborhood, Schedule
from topovq.ops.search import nearest
from topovq.som import SelfOrganizingMap


def test_distortion_by_hand():
    # Codes 0 and 4 side by side, hard neighborhood of strength 1: both squares count.
    x, codes = torch.tensor([[1.0], [3.0]]), torch.tensor([[0.0], [4.0]])
    near = Neighborhood("hard", Grid(2), schedule=Schedule.linear(1.0, 1.0, 1))
    assert metrics.distortion(x, codes, near).item() == pytest.approx((1 + 9 + 9 + 1) / 2)
    assert metrics.distortion(x, codes, Neighborhood("none", Grid(2))).item() == pytest.approx(1)


@pytest.mark.parametrize("grid", [Grid((4, 5)), Grid((4, 5), topology="hexagonal"), Grid((4, 5), wrap=True)])
def test_distortion_is_its_definition(grid):
    x, codes = torch.randn(200, 3) + 100, torch.randn(20, 3) + 100
    neighborhood = Neighborhood("gaussian", grid, schedule=Schedule.linear(1.5, 1.0, 10))
    square = (x.double()[:, None] - codes.double()).square().sum(2)
    expected = (neighborhood.matrix(3)[square.argmin(1)] * square).sum(1).mean()
    assert metrics.distortion(x, codes, neighborhood, 3).item() == pytest.approx(expected.item(), rel=1e-5)


def test_the_batch_rule_lowers_distortion():
    x, grid = torch.from_numpy(load_iris().data), Grid((4, 4))
    neighborhood = Neighborhood("gaussian", grid, schedule=Schedule.linear(2.0, 2.0, 1))
    codes = torch.from_numpy(SelfOrganizingMap((4, 4), max_iter=1, radius=4).fit(x.numpy()).codes_)
    index = nearest(x, codes)
    moved = rules.batch(codes, x, neighborhood)

    def distortion_of_winners(codes):
        return (neighborhood.matrix(0)[index] * (x[:, None] - codes).square().sum(2)).sum(1).mean().item()

    assert distortion_of_winners(codes) == pytest.approx(metrics.distortion(x, codes, neighborhood).item())
    assert distortion_of_winners(moved) < distortion_of_winners(codes)


def test_topographic_product():
    # A line of codes on a line of places, and a square lattice on a square map: orders agree, the product is 0.
    assert metrics.topographic_product(torch.arange(6.0)[:, None], Grid(6)).item() == pytest.approx(0, abs=1e-12)
    grid = Grid((5, 5))
    assert metrics.topographic_product(grid.positions(), grid).item() == pytest.approx(0, abs=1e-12)
    assert metrics.topographic_product(7 * grid.positions() + 3, grid).item() == pytest.approx(0, abs=1e-12)
    # Bauer and Pawelzik: a line folded into a plane is below 0, for it has too few axes.
    snake = torch.tensor([[r, c if r % 2 == 0 else 4 - c] for r in range(5) for c in range(5)], dtype=torch.float64)
    assert metrics.topographic_product(snake, Grid(25)).item() < -0.02
    # Three codes 0, 1, 3 on a line of places, by the definition with all its factors:
    codes, places = [0.0, 1.0, 3.0], [0, 1, 2]
    total = 0.0
    for j in range(3):
        others = [k for k in range(3) if k != j]
        by_code = sorted(others, key=lambda k: abs(codes[k] - codes[j]))
        by_place = sorted(others, key=lambda k: abs(places[k] - places[j]))
        product = 1.0
        for k in (1, 2):
            n, g = by_code[k - 1], by_place[k - 1]
            product *= abs(codes[g] - codes[j]) / abs(codes[n] - codes[j])
            product *= abs(places[g] - places[j]) / abs(places[n] - places[j])
            total += np.log(product) / (2 * k)
    value = metrics.topographic_product(torch.tensor(codes)[:, None], Grid(3)).item()
    assert value == pytest.approx(total / 6, abs=1e-12)
    assert metrics.topographic_product(torch.zeros(4, 2), Grid((2, 2))).item() == pytest.approx(0)  # nothing to order


def test_neighborhood_preservation():
    grid = Grid((6, 6))
    assert metrics.neighborhood_preservation(grid.positions(), grid).item() == 1
    hexagons = Grid((4, 4), topology="hexagonal")
    assert metrics.neighborhood_preservation(hexagons.positions(), hexagons).item() == 1
    # Codes 0, 2, 1 on a line of places: place 0 has the neighbor 1 (code 2), but code 1 is closer: 0 of 1;
    # place 1 has both: 1; place 2 has the neighbor 1 (code 2), as far as code 0: the lowest index, place 0, wins: 0.
    value = metrics.neighborhood_preservation(torch.tensor([[0.0], [2.0], [1.0]]), Grid(3)).item()
    assert value == pytest.approx(1 / 3)
    shuffled = grid.positions()[torch.randperm(36, generator=torch.Generator().manual_seed(0))]
    assert metrics.neighborhood_preservation(shuffled, grid).item() < 0.4


def test_measures_of_a_fitted_map():
    x = load_iris().data
    for options in ({}, {"topology": "hexagonal"}, {"metric": "cosine"}):
        som = SelfOrganizingMap((4, 5), **options).fit(x)
        measures = som.measures(x)
        assert measures["quantization_error"] == pytest.approx(som.quantization_error_)
        assert measures["topographic_error"] == pytest.approx(som.topographic_error_)
        assert measures["neighborhood_preservation"] > 0.5
        assert abs(measures["topographic_product"]) < 0.2
        missing = x.copy()
        missing[3, 1] = np.nan
        assert som.measures(missing)["distortion"] == pytest.approx(measures["distortion"], rel=0.05)
    plain = SelfOrganizingMap((4, 5)).fit(x)
    width = Schedule.linear(2**0.5, 2**0.5, 1)  # sigma 1, its last radius
    expected = metrics.distortion(
        torch.from_numpy(x), torch.from_numpy(plain.codes_), Neighborhood("gaussian", plain.grid_, schedule=width)
    )
    assert plain.measures(x)["distortion"] == pytest.approx(expected.item(), rel=1e-9)
    repeated = np.repeat(x, [2] * 50 + [1] * 100, axis=0)
    assert plain.measures(x, sample_weight=[2] * 50 + [1] * 100) == pytest.approx(plain.measures(repeated))
