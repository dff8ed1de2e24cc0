import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from topovq.grid import Grid
from topovq.neighborhood import (
    END_WIDTH,
    LEAST_START,
    NEIGHBORHOODS,
    OPEN_MOST,
    OPEN_SHARE,
    OPEN_TAU,
    SPAN,
    START_SHARE,
    Neighborhood,
    Schedule,
    narrowing,
    recommended_decay,
)


def at(schedule: Schedule, step: int) -> float:
    return schedule(torch.tensor(step)).item()


def close(actual: torch.Tensor, expected: list) -> bool:
    return torch.allclose(actual, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=0)


# The paper's formulas, on a line of 3 (distances 0, 1, 2) and a 2 x 2 grid (0, 1, sqrt 2), at t = 0 and, with
# tau = 0.1, at t = 10, where 1 + t*tau = 2 and s(t) = 1/2:
#     hard         s(t) within 1 (line) or sqrt 2 (square), 0 beyond
#     gaussian     exp(-dist^2 * (1 + t*tau)):  e^-1 = 0.367879441171, e^-2 = 0.135335283237, e^-4 = 0.018315638889,
#                                               e^-8 = 0.000335462628
#     exponential  exp(-dist * (1 + t*tau) / 10):  e^-0.1 = 0.904837418036, e^-0.2 = 0.818730753078,
#                  e^-0.4 = 0.670320046036, e^-0.141421356 = 0.868123445395, e^-0.282842712 = 0.753638316444


@pytest.mark.parametrize(
    ("kind", "step", "one", "two"),
    [
        ("none", 0, 0, 0),
        ("none", 10, 0, 0),
        ("hard", 0, 1, 0),
        ("hard", 10, 0.5, 0),
        ("gaussian", 0, 0.36787944117144233, 0.018315638888734179),
        ("gaussian", 10, 0.13533528323661270, 0.00033546262790251185),
        ("exponential", 0, 0.90483741803595957, 0.81873075307798186),
        ("exponential", 10, 0.81873075307798186, 0.67032004603563930),
    ],
)
def test_matrix_on_a_line_of_three(kind, step, one, two):
    matrix = Neighborhood(kind, Grid(3)).matrix(step)
    assert matrix.dtype == torch.float64
    assert close(matrix, [[1, one, two], [one, 1, one], [two, one, 1]])


@pytest.mark.parametrize(
    ("kind", "step", "side", "diagonal"),
    [
        ("none", 0, 0, 0),
        ("hard", 0, 1, 1),
        ("hard", 10, 0.5, 0.5),
        ("gaussian", 0, 0.36787944117144233, 0.13533528323661270),
        ("gaussian", 10, 0.13533528323661270, 0.018315638888734179),
        ("exponential", 0, 0.90483741803595957, 0.8681234453945849),
        ("exponential", 10, 0.81873075307798186, 0.7536383164437648),
    ],
)
def test_matrix_on_a_square(kind, step, side, diagonal):
    assert close(
        Neighborhood(kind, Grid((2, 2))).matrix(step),
        [
            [1, side, side, diagonal],
            [side, 1, diagonal, side],
            [side, diagonal, 1, side],
            [diagonal, side, side, 1],
        ],
    )


def test_a_ring_reaches_round():
    # On a ring of 4 the first and the last are neighbors, the opposite one is 2 away.
    assert Neighborhood("hard", Grid(4, wrap=True)).matrix(0)[0].tolist() == [1, 1, 0, 1]
    assert Neighborhood("hard", Grid(4, wrap=True)).matrix(30)[0].tolist() == [1, 0.25, 0, 0.25]


def test_hard_reaches_places_less_than_1_5_apart_and_the_six_around_a_hexagon():
    for grid, neighbors in [
        (Grid(5), 2),
        (Grid((5, 5)), 8),
        (Grid((5, 5, 5)), 18),  # not the 8 corners of the cube
        (Grid((5, 5, 5, 5)), 32),
        (Grid((5, 5), topology="hexagonal"), 6),
    ]:
        middle = grid.index([2] * grid.ndim)
        assert Neighborhood("hard", grid).matrix(0)[middle].sum().item() == 1 + neighbors


def test_radius_scales_the_reach():
    distance = torch.tensor([0.0, 1.0, 2.0, 3.0])
    assert Neighborhood("hard", Grid(4), radius=2).weight(distance, 10).tolist() == [1, 0.5, 0.5, 0]
    # gaussian: exp(-dist^2 / (R^2 s)) with R = 2, s = 1/2: exp(-dist^2 / 2)
    assert close(
        Neighborhood("gaussian", Grid(4), radius=2).weight(distance, 10),
        [1, 0.60653065971263342, 0.13533528323661270, 0.011108996538242306],
    )
    # exponential: exp(-dist / (R s)) with R = 2, s = 1/2: exp(-dist)
    assert close(
        Neighborhood("exponential", Grid(4), radius=2).weight(distance, 10),
        [1, 0.36787944117144233, 0.13533528323661270, 0.049787068367863944],
    )


def test_the_papers_tau_is_the_default():
    assert Neighborhood("hard", Grid(3)).schedule == Schedule.harmonic(0.1)
    assert Neighborhood("hard", Grid(3), schedule=Schedule.harmonic(0)).matrix(10**6)[0].tolist() == [1, 1, 0]


# Schedules


def test_harmonic():
    schedule = Schedule.harmonic(0.5)
    assert [at(schedule, t) for t in (0, 2, 6, 18)] == [1, 0.5, 0.25, 0.1]
    assert at(Schedule.harmonic(), 90) == pytest.approx(0.1, rel=1e-15)


def test_linear_falls_to_its_end_and_stays_there():
    schedule = Schedule.linear(8, 2, steps=4)
    assert [at(schedule, t) for t in range(7)] == [8, 6.5, 5, 3.5, 2, 2, 2]
    assert at(schedule, 10**12) == 2


def test_exponential_falls_to_its_end_and_stays_there():
    schedule = Schedule.exponential(8, 0.5, steps=4)  # halves every step
    assert [at(schedule, t) for t in range(7)] == pytest.approx([8, 4, 2, 1, 0.5, 0.5, 0.5], rel=1e-14)
    assert at(schedule, 10**12) == pytest.approx(0.5, rel=1e-14)


def test_a_schedule_over_known_steps_gives_the_width_itself():
    # Width 2 at t = 0, 1 at t = 1, end 0 at t = 2: the identity, without a division by 0.
    schedule = Schedule.linear(2, 0, steps=2)
    distance = torch.tensor([0.0, 1.0, 2.0])
    hard = Neighborhood("hard", Grid(3), schedule=schedule)
    assert [hard.weight(distance, t).tolist() for t in (0, 1, 2, 3)] == [[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 0, 0]]
    gaussian = Neighborhood("gaussian", Grid(3), schedule=schedule)
    assert close(gaussian.weight(distance, 0), [1, 0.77880078307140488, 0.36787944117144233])  # e^-1/4, e^-1
    assert close(gaussian.weight(distance, 1), [1, 0.36787944117144233, 0.018315638888734179])  # e^-1, e^-4
    assert gaussian.weight(distance, 2).tolist() == [1, 0, 0]
    exponential = Neighborhood("exponential", Grid(3), schedule=schedule)
    assert close(exponential.weight(distance, 0), [1, 0.60653065971263342, 0.36787944117144233])  # e^-1/2, e^-1
    assert exponential.weight(distance, 2).tolist() == [1, 0, 0]
    for kind in NEIGHBORHOODS:
        assert Neighborhood(kind, Grid(3), schedule=schedule).widest == 2


def test_a_schedule_survives_its_description():
    for schedule in (Schedule.harmonic(0.3), Schedule.linear(4, 1, 10), Schedule.exponential(4, 1, 10)):
        assert Schedule.from_dict(schedule.to_dict()) == schedule
    assert Schedule.harmonic(0.3).to_dict() == {"kind": "harmonic", "tau": 0.3}


# Properties

grids = st.one_of(
    st.builds(
        lambda axes: Grid([n for n, _ in axes], wrap=[w for _, w in axes]),
        st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=1, max_size=3),
    ),
    st.builds(
        lambda rows, columns, wrap: Grid((2 * rows, columns), topology="hexagonal", wrap=wrap),
        st.integers(1, 3),
        st.integers(1, 5),
        st.booleans(),
    ),
)
schedules = st.one_of(
    st.builds(Schedule.harmonic, st.floats(0, 10)),
    st.builds(lambda end, more, steps: Schedule.linear(end + more, end, steps),
              st.floats(0, 3), st.floats(0, 5), st.integers(1, 1000)),
    st.builds(lambda end, more, steps: Schedule.exponential(end + more, end, steps),
              st.floats(0.01, 3), st.floats(0, 5), st.integers(1, 1000)),
)  # fmt: skip


@given(st.sampled_from(NEIGHBORHOODS), grids, schedules, st.integers(0, 2000))
def test_weights_are_symmetric_between_0_and_1_and_fall_with_distance(kind, grid, schedule, step):
    neighborhood = Neighborhood(kind, grid, schedule=schedule)
    matrix = neighborhood.matrix(step)
    assert torch.equal(matrix, matrix.T)
    assert (matrix.diagonal() == 1).all()
    assert ((matrix >= 0) & (matrix <= 1)).all()
    distance, order = grid.distance_matrix().flatten().sort()
    weights = matrix.flatten()[order]
    rises = (distance.diff() > 1e-9) & (weights.diff() > 0)
    assert not rises.any()


@given(st.sampled_from(NEIGHBORHOODS), grids, st.floats(0.01, 10), st.integers(0, 1000))
def test_the_neighborhood_only_shrinks_and_tends_to_the_identity(kind, grid, tau, step):
    neighborhood = Neighborhood(kind, grid, schedule=Schedule.harmonic(tau))
    assert (neighborhood.matrix(step + 1) <= neighborhood.matrix(step)).all()
    assert torch.allclose(neighborhood.matrix(10**10), torch.eye(grid.size, dtype=torch.float64), atol=1e-7)


@pytest.mark.parametrize("kind", NEIGHBORHOODS)
@pytest.mark.parametrize(
    "schedule", [Schedule.harmonic(0.3), Schedule.linear(4, 0, 10), Schedule.exponential(4, 1, 10)]
)
def test_a_neighborhood_survives_its_numbers(kind, schedule):
    for grid in (Grid((3, 4), wrap=(True, False)), Grid((3, 4), size=11), Grid((4, 3), topology="hexagonal")):
        neighborhood = Neighborhood(kind, grid, schedule=schedule)
        again = Neighborhood.from_numbers(grid.size, *neighborhood.numbers)
        assert again.grid == grid
        assert again.numbers == neighborhood.numbers
        for step in (0, 7, 100):
            assert torch.equal(again.matrix(step), neighborhood.matrix(step))


# "narrowing"


@pytest.mark.parametrize(
    ("grid", "side"),
    [
        (Grid(100_000), 100_000),
        (Grid((16, 32)), 22.627416997969522),
        (Grid((512, 512)), 512),
        (Grid((27, 64, 125)), 60),
    ],
)
def test_the_first_width_is_a_share_of_the_side(grid, side):
    kind, schedule, radius = narrowing(grid, 1000)
    assert (kind, radius) == ("gaussian", None)
    first = max(LEAST_START, START_SHARE * side)
    width = Neighborhood(kind, grid, schedule=schedule, radius=radius).width
    assert width(torch.tensor(0)).item() == pytest.approx(first, rel=1e-12)
    for share in (0.25, 0.5, 1, 1.5):  # of the steps in which it falls
        expected = first * (END_WIDTH / first) ** min(share, 1)
        assert width(torch.tensor(round(share * SPAN * 1000))).item() == pytest.approx(expected, rel=1e-12)
    kind, schedule, radius = narrowing(grid, None)
    width = Neighborhood(kind, grid, schedule=schedule, radius=radius).width
    first = max(LEAST_START, min(OPEN_MOST, OPEN_SHARE * side))
    for t in (0, 1, 10_000):
        expected = first / math.sqrt(1 + t * OPEN_TAU * first)
        assert width(torch.tensor(t)).item() == pytest.approx(expected, rel=1e-12)


def test_the_smallest_map_and_the_shortest_training_have_a_schedule_too():
    for grid in (Grid(1), Grid((2, 2))):
        for steps in (1, 2, None):
            kind, schedule, radius = narrowing(grid, steps)
            assert Neighborhood(kind, grid, schedule=schedule, radius=radius).widest >= LEAST_START
    for steps in (0, -1, 2.5, True):
        with pytest.raises(ValueError, match=rf"steps={steps} must be an int of at least 1"):
            recommended_decay(steps)


# Refusals


def test_bad_neighborhoods_are_refused():
    with pytest.raises(ValueError, match="neighborhood='round' is unknown; choose one of 'none', 'hard', 'gaussian"):
        Neighborhood("round", Grid(3))
    for radius in (0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match=f"radius={radius!r} must be a finite number above 0"):
            Neighborhood("hard", Grid(3), radius=radius)
    with pytest.raises(ValueError, match=r"radius=2 has no meaning with a linear schedule.*its start is 4"):
        Neighborhood("hard", Grid(3), schedule=Schedule.linear(4, 1, 10), radius=2)


def test_bad_schedules_are_refused():
    with pytest.raises(ValueError, match="kind='cosine' is unknown; choose one of 'harmonic', 'linear', 'exponential'"):
        Schedule("cosine")
    for tau in (-0.1, math.nan, math.inf, None, "fast"):
        with pytest.raises(ValueError, match=f"tau={tau!r} must be a finite number of at least 0"):
            Schedule.harmonic(tau)
    with pytest.raises(ValueError, match="a linear schedule needs start, end and steps"):
        Schedule("linear", start=4.0)
    with pytest.raises(ValueError, match="steps=0 must be an int of at least 1"):
        Schedule.linear(4, 1, 0)
    with pytest.raises(ValueError, match=r"steps=2.5 must be an int of at least 1"):
        Schedule.linear(4, 1, 2.5)
    with pytest.raises(ValueError, match=r"start=1 and end=4 must fall"):
        Schedule.linear(1, 4, 10)
    with pytest.raises(ValueError, match=r"end=-1 must fall from start to end, with end at least 0"):
        Schedule.linear(1, -1, 10)
    with pytest.raises(ValueError, match=r"end=0 must fall from start to end, with end above 0"):
        Schedule.exponential(1, 0, 10)
    with pytest.raises(ValueError, match=r"start=inf"):
        Schedule.exponential(math.inf, 1, 10)
