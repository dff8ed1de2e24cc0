"""Smoothing over the map: by hand, then every method against the K x K matrix in float64, then its size."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from topovq.grid import Grid
from topovq.neighborhood import CUTOFF, Neighborhood, Schedule
from topovq.ops import smooth as module
from topovq.ops.smooth import method, shifts, smooth, smooth_reference

GRIDS = [
    Grid(1),
    Grid(7),
    Grid(7, wrap=True),
    Grid(2, wrap=True),
    Grid((1, 5)),
    Grid((4, 6)),
    Grid((2, 2), wrap=True),
    Grid((5, 2), wrap=True),
    Grid((5, 4), wrap=(False, True)),
    Grid((6, 3), wrap=(True, False)),
    Grid((3, 4, 5)),
    Grid((3, 2, 5), wrap=(True, True, False)),
    Grid((2, 2, 2), wrap=True),
    Grid((2, 3, 2, 3), wrap=(False, True, False, True)),
    Grid((1, 4), topology="hexagonal"),
    Grid((5, 4), topology="hexagonal"),
    Grid((6, 3), topology="hexagonal"),
    Grid((6, 5), topology="hexagonal", wrap=True),
    Grid((2, 1), topology="hexagonal", wrap=True),
    Grid((2, 2), topology="hexagonal", wrap=True),
    Grid((5, 4), topology="hexagonal", wrap=(False, True)),
    Grid((4, 5), topology="hexagonal", wrap=(True, False)),
    Grid((2, 2), size=3),
    Grid((5, 6), size=25),
    Grid((5, 6), size=29),
    Grid((4, 5), wrap=True, size=17),
    Grid((5, 4), topology="hexagonal", size=17),
    Grid((6, 5), topology="hexagonal", wrap=True, size=28),
]
SHAPES = [
    ("hard", {}),
    ("hard", {"radius": 2.3}),
    ("hard", {"schedule": Schedule.linear(3, 0.5, 10)}),
    ("gaussian", {}),
    ("gaussian", {"schedule": Schedule.exponential(3, 0.3, 10)}),
    ("exponential", {}),
    ("exponential", {"radius": 0.8}),
]
# Sizes above which one method gives way to the next, such that each method gets its turn on a small grid.
FORCED = {
    "box": {"MOST_SHIFTS": 10**6},
    "separable": {},
    "dense": {"MOST_SHIFTS": 0, "LONGEST_AXIS": 0},
    "fft": {"MOST_SHIFTS": 0, "LONGEST_AXIS": 0, "DENSE": 0},
}
METHODS_OF = {
    "hard": ("box", "dense", "fft"),
    "gaussian": ("separable", "dense", "fft"),
    "exponential": ("dense", "fft"),
}


def some_stats(size: int, dim: int = 3, seed: int = 0, vectors: int = 200) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums and counts of vectors that chose about half of the codes, float64."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(max(1, size // 2), (vectors,), generator=generator) * 2 % size
    x = torch.randn(vectors, dim, generator=generator, dtype=torch.float64)
    return torch.zeros(size, dim, dtype=torch.float64).index_add(0, chosen, x), chosen.bincount(minlength=size).double()


def force(monkeypatch, name: str, neighborhood: Neighborhood) -> None:
    for limit, value in FORCED[name].items():
        monkeypatch.setattr(module, limit, value)
    assert method(neighborhood) == name


# By hand

# A line of 3 with one vector of value 5 at its first place and two that add up to 8 at its last; hard at t = 10:
#     S = 5, 0, 8   c = 1, 0, 2   A = [1 .5 0; .5 1 .5; 0 .5 1]   A^T S = 5, 6.5, 8   A^T c = 1, 1.5, 2
# and as a ring, where the two are neighbors: A^T S = 5 + 4, 6.5, 2.5 + 8 and A^T c = 1 + 1, 1.5, 0.5 + 2.


@pytest.mark.parametrize("name", METHODS_OF["hard"])
@pytest.mark.parametrize(
    ("wrap", "sums", "counts"), [(False, [5, 6.5, 8], [1, 1.5, 2]), (True, [9, 6.5, 10.5], [2, 1.5, 2.5])]
)
def test_a_line_by_hand(monkeypatch, name, wrap, sums, counts):
    grid = Grid(3, wrap=wrap)
    neighborhood = Neighborhood("hard", grid)
    force(monkeypatch, name, neighborhood)
    smoothed = smooth(
        torch.tensor([[5.0], [0.0], [8.0]]), torch.tensor([1.0, 0.0, 2.0]), neighborhood, torch.tensor(10)
    )
    assert smoothed[0].flatten().tolist() == pytest.approx(sums, abs=1e-6)
    assert smoothed[1].tolist() == pytest.approx(counts, abs=1e-6)


@pytest.mark.parametrize(
    ("kind", "name", "near", "across"),
    [
        ("hard", "box", 1, 1),
        ("gaussian", "separable", 0.3678794412, 0.1353352832),  # e^-1, e^-2
        ("exponential", "dense", 0.9048374180, 0.8681234454),  # e^-0.1, e^-0.1414213562
        ("exponential", "fft", 0.9048374180, 0.8681234454),
    ],
)
def test_a_square_by_hand(monkeypatch, kind, name, near, across):
    # One vector (10, 20) at place 0 of 2 x 2.
    grid = Grid((2, 2))
    neighborhood = Neighborhood(kind, grid)
    force(monkeypatch, name, neighborhood)
    sums, counts = torch.zeros(4, 2), torch.zeros(4)
    sums[0], counts[0] = torch.tensor([10.0, 20.0]), 1
    sums, counts = smooth(sums, counts, neighborhood, torch.tensor(0))
    weights = torch.tensor([1.0, near, near, across])
    torch.testing.assert_close(counts, weights, rtol=1e-6, atol=0)
    torch.testing.assert_close(sums, weights[:, None] * torch.tensor([10.0, 20.0]), rtol=1e-6, atol=0)


# Three codes on 2 x 2 places, the last of which is empty:
#     0 1     A = [1 .5 .5; .5 1 .5; .5 .5 1] for hard at t = 10: all three touch, code 1 and 2 over the corner
#     2 -     S = 2, 4, 8   c = 1, 1, 1   A^T S = 2 + 2 + 4, 1 + 4 + 4, 1 + 2 + 8   A^T c = 2, 2, 2
@pytest.mark.parametrize("name", METHODS_OF["hard"])
def test_an_empty_place_gives_and_takes_nothing(monkeypatch, name):
    grid = Grid((2, 2), size=3)
    neighborhood = Neighborhood("hard", grid)
    force(monkeypatch, name, neighborhood)
    sums, counts = smooth(torch.tensor([[2.0], [4.0], [8.0]]), torch.ones(3), neighborhood, torch.tensor(10))
    assert sums.flatten().tolist() == pytest.approx([8, 9, 11], abs=1e-6)
    assert counts.tolist() == pytest.approx([2, 2, 2], abs=1e-6)


def test_none_changes_nothing():
    grid = Grid((3, 4))
    sums, counts = some_stats(12)
    neighborhood = Neighborhood("none", grid)
    assert method(neighborhood) == "none"
    smoothed = smooth(sums, counts, neighborhood, torch.tensor(0))
    assert torch.equal(smoothed[0], sums)
    assert torch.equal(smoothed[1], counts)


def test_steps_on_the_map():
    assert sorted(shifts(Grid(9), 2)) == [((-2,), 2), ((-1,), 1), ((1,), 1), ((2,), 2)]
    assert len(list(shifts(Grid((9, 9)), 2**0.5))) == 8
    assert len(list(shifts(Grid((9, 9), topology="hexagonal"), 1))) == 6
    # Each place of a small ring is reached once, the short way round.
    assert list(shifts(Grid(2, wrap=True), 5)) == [((1,), 1)]
    assert sorted(shifts(Grid(4, wrap=True), 5)) == [((-1,), 1), ((1,), 1), ((2,), 2)]
    assert list(shifts(Grid(1, wrap=True), 5)) == []


def test_the_method_follows_from_shapes():
    for kind, grid, name in [
        ("hard", Grid((512, 512)), "box"),
        ("hard", Grid((64, 64, 64)), "box"),
        ("hard", Grid((64, 64), topology="hexagonal"), "box"),
        ("gaussian", Grid((512, 512)), "separable"),
        ("gaussian", Grid((64, 64), topology="hexagonal"), "separable"),
        ("gaussian", Grid(262144), "fft"),
        ("exponential", Grid((16, 32)), "dense"),
        ("exponential", Grid((512, 512)), "fft"),
    ]:
        assert method(Neighborhood(kind, grid)) == name
    assert method(Neighborhood("hard", Grid((64, 64)), radius=9)) == "fft"


# The operation as PyTorch sees it


@pytest.mark.parametrize(
    "grid", [Grid(1), Grid((3, 4)), Grid((5, 6), size=25), Grid((4, 3), topology="hexagonal")], ids=str
)
@pytest.mark.parametrize(("kind", "options"), SHAPES)
def test_the_operation_is_the_function(kind, options, grid):
    neighborhood, step = Neighborhood(kind, grid, **options), torch.tensor(7)
    sums, counts = some_stats(grid.size)
    torch.library.opcheck(torch.ops.topovq.smooth.default, (sums, counts, step, *neighborhood.numbers))
    traced = torch.ops.topovq.smooth.default(sums, counts, step, *neighborhood.numbers)
    for got, expected in zip(traced, smooth(sums, counts, neighborhood, step)):
        assert torch.equal(got, expected)


# Agreement


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("name", FORCED)
def test_every_method_agrees_with_the_matrix(monkeypatch, name, grid):
    sums, counts = some_stats(grid.size)
    # The transforms leave an error of CUTOFF of the whole batch at most, the others only rounding.
    share = CUTOFF if name == "fft" else 0
    largest, total = 5.0 * counts.sum(), counts.sum()
    for kind, options in SHAPES:
        if name not in METHODS_OF[kind]:
            continue
        neighborhood = Neighborhood(kind, grid, **options)
        force(monkeypatch, name, neighborhood)
        for step in (torch.tensor(0), torch.tensor(7)):
            exact_sums, exact_counts = smooth_reference(sums, counts, neighborhood, step)
            size_sums = smooth_reference(sums.abs(), counts, neighborhood, step)[0]
            for dtype, rounding in ((torch.float64, 1e-14), (torch.float32, 4e-6)):
                got_sums, got_counts = smooth(sums.to(dtype), counts.to(dtype), neighborhood, step)
                assert got_sums.dtype == got_counts.dtype == dtype
                assert (got_counts >= 0).all()
                error = (got_sums - exact_sums).abs()
                assert (error <= rounding * size_sums + share * largest).all(), (kind, options, step, dtype)
                error = (got_counts - exact_counts).abs()
                assert (error <= rounding * exact_counts + share * total).all(), (kind, options, step, dtype)


@given(
    st.sampled_from(GRIDS), st.sampled_from(["hard", "gaussian", "exponential"]), st.floats(0.2, 9), st.integers(0, 100)
)
def test_any_radius_and_step(grid, kind, radius, step):
    sums, counts = some_stats(grid.size, seed=step)
    at = (Neighborhood(kind, grid, radius=radius), torch.tensor(step))
    for actual, exact in zip(smooth(sums, counts, *at), smooth_reference(sums, counts, *at)):
        torch.testing.assert_close(actual, exact, rtol=1e-11, atol=1e-11)


# The transform

LARGE = [
    Grid(4000),
    Grid((60, 70)),
    Grid((60, 70), wrap=True),
    Grid((61, 40), topology="hexagonal"),
    Grid((60, 41), topology="hexagonal", wrap=True),
    Grid.balanced(4201),
    Grid.balanced(4201, topology="hexagonal"),
]


@pytest.mark.parametrize("grid", LARGE, ids=str)
@pytest.mark.parametrize("step", [0, 200, 10_000])
def test_the_error_of_a_transform_is_bounded_and_no_count_is_negative(grid, step):
    # Few vectors of large values on a large map: most places receive next to nothing.
    generator = torch.Generator().manual_seed(step)
    chosen = torch.randint(grid.size, (30,), generator=generator)
    x = torch.randn(30, 2, generator=generator, dtype=torch.float64) * 1e4
    sums = torch.zeros(grid.size, 2, dtype=torch.float64).index_add(0, chosen, x)
    counts = chosen.bincount(minlength=grid.size).double()
    neighborhood = Neighborhood("exponential", grid)
    assert method(neighborhood) == "fft"
    exact_counts = torch.zeros_like(counts)
    exact_sums = torch.zeros_like(sums)
    for place, vector in zip(chosen, x):  # K x 30 weights in place of K x K
        weight = neighborhood.weight(grid.distance(place, torch.arange(grid.size)), step)
        exact_counts += weight
        exact_sums += weight[:, None] * vector
    got_sums, got_counts = smooth(sums, counts, neighborhood, torch.tensor(step))
    assert (got_counts >= 0).all()
    assert ((got_counts - exact_counts).abs() <= 1.01 * CUTOFF * 30).all()
    assert ((got_sums - exact_sums).abs() <= 1.01 * CUTOFF * 30 * x.abs().max()).all()
    # What receives less than CUTOFF of the batch receives exactly nothing: no code is moved by rounding.
    assert (got_counts[exact_counts < 0.99 * CUTOFF * 30] == 0).all()
    assert (got_sums[got_counts == 0] == 0).all()


def test_far_places_receive_exactly_nothing():
    # exp(-dist / 10) falls below 1e-10 at dist = 230.26.
    grid = Grid(4000)
    sums, counts = torch.zeros(4000, 2), torch.zeros(4000)
    sums[0], counts[0] = torch.tensor([3e5, -1e-3]), 1000
    sums, counts = smooth(sums, counts, Neighborhood("exponential", grid), torch.tensor(0))
    assert counts[0].item() == pytest.approx(1000)
    assert counts[10].item() == pytest.approx(367.8794412)
    assert counts[230] > 0
    assert (counts[231:] == 0).all()
    assert (sums[231:] == 0).all()


def test_statistics_of_nothing_stay_nothing():
    for grid in (Grid((60, 70)), Grid((5, 4)), Grid((60, 41), topology="hexagonal")):
        for kind in ("hard", "gaussian", "exponential"):
            at = (Neighborhood(kind, grid), torch.tensor(0))
            sums, counts = smooth(torch.zeros(grid.size, 2), torch.zeros(grid.size), *at)
            assert (sums == 0).all()
            assert (counts == 0).all()


# Size


def test_a_quarter_of_a_million_codes_need_no_matrix(run_with_gauge):
    # K x K would take 256 GiB in float32. One vector in the middle shows that the result is the kernel.
    run_with_gauge("""
        from topovq.grid import Grid
        from topovq.neighborhood import Neighborhood, Schedule
        from topovq.ops.smooth import method, smooth

        square, hexagons = Grid((512, 512)), Grid((512, 512), topology="hexagonal")
        cases = [
            ("hard", square, {}, "box"),
            ("hard", hexagons, {}, "box"),
            ("hard", Grid((64, 64, 64), wrap=True), {}, "box"),
            ("hard", square, {"schedule": Schedule.linear(8, 1, 100)}, "fft"),
            ("gaussian", square, {}, "separable"),
            ("gaussian", hexagons, {}, "separable"),
            ("gaussian", Grid(262144), {}, "fft"),
            ("exponential", square, {}, "fft"),
            ("exponential", hexagons, {}, "fft"),
        ]
        sums, counts = torch.zeros(262144, 4), torch.zeros(262144)
        start_gauge()
        for kind, grid, options, way in cases:
            neighborhood = Neighborhood(kind, grid, **options)
            assert method(neighborhood) == way
            middle = grid.index([n // 2 for n in grid.shape])
            sums.zero_()[middle] = 2.0
            counts.zero_()[middle] = 1.0
            new_sums, new_counts = smooth(sums, counts, neighborhood, torch.tensor(5))
            near = torch.arange(int(middle) - 3, int(middle) + 4)
            weight = neighborhood.weight(grid.distance(middle, near), 5).float()
            assert torch.allclose(new_counts[near], weight, atol=1e-6), (kind, grid)
            assert torch.allclose(new_sums[near, 1], 2 * weight, atol=1e-6), (kind, grid)
            assert growth() < 1536, f"{kind} on {grid}: {growth():.0f} MiB"
    """)
