"""The classical rules against answers worked out by hand, then against scikit-learn, then their properties.

LINE: three codes 0, 2, 6 on a line; their map distances are 1, 1 and 2.
SQUARE: four codes at the corners of a 4 x 4 square, in order on a 2 x 2 map; map distances 1, and sqrt 2 across.
The neighborhood weights, at t = 0 and t = 10 with tau = 0.1, are those of test_neighborhood.py:
                     t = 0: at 1         sqrt 2        2              t = 10: at 1     sqrt 2        2
    hard             1                   1 (square)    0              0.5              0.5 (square)  0
    gaussian         0.3678794412        0.1353352832  0.0183156389   0.1353352832     0.0183156389  0.0003354626
    exponential      0.9048374180        0.8681234454  0.8187307531   0.8187307531     0.7536383164  0.6703200460
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from topovq import rules
from topovq.grid import Grid
from topovq.neighborhood import NEIGHBORHOODS, Neighborhood, Schedule


def double(values: list) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


LINE = double([[0], [2], [6]])
SQUARE = double([[0, 0], [4, 0], [0, 4], [4, 4]])


def on_line(kind: str, tau: float = 0.1) -> Neighborhood:
    return Neighborhood(kind, Grid(3), schedule=Schedule.harmonic(tau))


def on_square(kind: str) -> Neighborhood:
    return Neighborhood(kind, Grid((2, 2)))


def assert_codes(actual: torch.Tensor, expected: list) -> None:
    torch.testing.assert_close(actual, double(expected).view_as(actual), rtol=0, atol=1e-9)


# Online: w_k += beta * A[k*, k] * (x - w_k), beta = 0.5


@pytest.mark.parametrize(
    ("kind", "step", "expected"),
    [
        # x = 3 is closest to code 1. Errors x - w: 3, 1, -3; code 1 always moves by 0.5 * 1 to 2.5.
        ("none", 0, [0, 2.5, 6]),  # MacQueen: the winner alone
        ("none", 10, [0, 2.5, 6]),
        ("hard", 0, [1.5, 2.5, 4.5]),  # 0 + 0.5*3, 6 - 0.5*3
        ("hard", 10, [0.75, 2.5, 5.25]),  # half of that
        ("gaussian", 0, [0.5518191618, 2.5, 5.4481808382]),  # 1.5 * 0.3678794412
        ("gaussian", 10, [0.2030029249, 2.5, 5.7969970751]),  # 1.5 * 0.1353352832
        ("exponential", 0, [1.3572561271, 2.5, 4.6427438729]),  # 1.5 * 0.9048374180
        ("exponential", 10, [1.2280961296, 2.5, 4.7719038704]),  # 1.5 * 0.8187307531
    ],
)
def test_online_on_a_line(kind, step, expected):
    assert_codes(rules.online(LINE, double([[3]]), on_line(kind), beta=0.5, step=step), expected)


@pytest.mark.parametrize(
    ("kind", "step", "expected"),
    [
        # x = (1, 1) is closest to code 0. Errors: (1, 1), (-3, 1), (1, -3), (-3, -3).
        ("none", 0, [[0.5, 0.5], [4, 0], [0, 4], [4, 4]]),
        ("hard", 0, [[0.5, 0.5], [2.5, 0.5], [0.5, 2.5], [2.5, 2.5]]),
        ("hard", 10, [[0.5, 0.5], [3.25, 0.25], [0.25, 3.25], [3.25, 3.25]]),
        # 4 - 1.5 * 0.3678794412, 0.5 * 0.3678794412; 4 - 1.5 * 0.1353352832
        ("gaussian", 0, [[0.5, 0.5], [3.4481808382, 0.1839397206], [0.1839397206, 3.4481808382], [3.7969970751] * 2]),
        ("gaussian", 10, [[0.5, 0.5], [3.7969970751, 0.0676676416], [0.0676676416, 3.7969970751], [3.9725265417] * 2]),
        ("exponential", 0, [[0.5, 0.5], [2.6427438729, 0.452418709], [0.452418709, 2.6427438729], [2.6978148319] * 2]),
        (
            "exponential",
            10,
            [[0.5, 0.5], [2.7719038704, 0.4093653765], [0.4093653765, 2.7719038704], [2.8695425253] * 2],
        ),
    ],
)
def test_online_on_a_square(kind, step, expected):
    assert_codes(rules.online(SQUARE, double([[1, 1]]), on_square(kind), beta=0.5, step=step), expected)


def test_online_takes_vectors_in_order_and_counts_each_as_a_step():
    # MacQueen: 3 moves code 1 to 2.5; then 1 is closest to code 0 (1 against 1.5), which moves to 0.5.
    assert_codes(rules.online(LINE, double([[3], [1]]), on_line("none"), beta=0.5), [0.5, 2.5, 6])
    # hard, tau = 1: at t = 0, A = 1 around code 1: 1.5, 2.5, 4.5. Then 1 is closest to 1.5 (code 0); at t = 1, A = 1/2
    # at its neighbor, 0 beyond: 1.5 - 0.25, 2.5 + 0.25 * (1 - 2.5), 4.5.
    assert_codes(rules.online(LINE, double([[3], [1]]), on_line("hard", tau=1), beta=0.5), [1.25, 2.125, 4.5])
    # Another first vector: 0.5 moves code 0 to 0.25 and code 1 to 1.25, to which 3 is then closest. A = 1/2 at its
    # neighbors: 0.25 + 0.25 * 2.75, 1.25 + 0.5 * 1.75, 6 - 0.25 * 3.
    assert_codes(rules.online(LINE, double([[0.5], [3]]), on_line("hard", tau=1), beta=0.5), [0.9375, 2.125, 5.25])


def test_online_with_the_dot_product_lets_the_longest_code_win():
    # 3 * 6 is the largest product: code 2 moves, 6 - 0.5 * 3.
    assert_codes(rules.online(LINE, double([[3]]), on_line("none"), beta=0.5, metric="dot"), [0, 2, 4.5])


# Hebbian: y = hardmax(W x), W += (beta * A y) outer (x - W^T y), beta = 0.5


@pytest.mark.parametrize(
    ("kind", "step", "expected"),
    [
        # x = 3: the largest product is code 2's. Its error, 3 - 6 = -3, moves every code: by -1.5 * A.
        ("none", 0, [0, 2, 4.5]),
        ("hard", 0, [0, 0.5, 4.5]),
        ("hard", 10, [0, 1.25, 4.5]),
        ("gaussian", 0, [-0.0274734583, 1.4481808382, 4.5]),
        ("gaussian", 10, [-0.0005031939, 1.7969970751, 4.5]),
        ("exponential", 0, [-1.2280961296, 0.6427438729, 4.5]),
        ("exponential", 10, [-1.0054800691, 0.7719038704, 4.5]),
    ],
)
def test_hebbian_on_a_line(kind, step, expected):
    assert_codes(rules.hebbian(LINE, double([[3]]), on_line(kind), beta=0.5, step=step), expected)


@pytest.mark.parametrize(
    ("kind", "step", "side", "across"),
    [
        # x = (1, 1): products 0, 4, 4, 8. Code 3 wins with the error (-3, -3): codes 1 and 2 move by -1.5 * A(1) in
        # both dimensions, code 0 by -1.5 * A(sqrt 2), code 3 to (2.5, 2.5).
        ("none", 0, 0, 0),
        ("hard", 0, 1.5, 1.5),
        ("hard", 10, 0.75, 0.75),
        ("gaussian", 0, 0.5518191618, 0.2030029249),
        ("gaussian", 10, 0.2030029249, 0.0274734583),
        ("exponential", 0, 1.3572561271, 1.3021851681),
        ("exponential", 10, 1.2280961296, 1.1304574747),
    ],
)
def test_hebbian_on_a_square(kind, step, side, across):
    codes = rules.hebbian(SQUARE, double([[1, 1]]), on_square(kind), beta=0.5, step=step)
    assert_codes(codes, [[-across, -across], [4 - side, -side], [-side, 4 - side], [2.5, 2.5]])


def test_hebbian_counts_each_vector_as_a_step():
    # hard, tau = 1, x = 3 twice. t = 0: 0, 0.5, 4.5. t = 1: code 2 wins again, error -1.5, A = 1/2 at its neighbor:
    # 0.5 - 0.375, 4.5 - 0.75.
    assert_codes(rules.hebbian(LINE, double([[3], [3]]), on_line("hard", tau=1), beta=0.5), [0, 0.125, 3.75])


# Batch: w = (A^T S) / (A^T c)


@pytest.mark.parametrize(
    ("kind", "step", "expected"),
    [
        # -1 belongs to code 0, 1.5 and 2.5 to code 1, 8 to code 2: S = -1, 4, 8 and c = 1, 2, 1.
        ("none", 0, [-1, 2, 8]),  # Lloyd: the means
        ("hard", 0, [1, 2.75, 4]),  # 3/3, 11/4, 12/3
        ("hard", 10, [0.5, 2.5, 5]),  # (-1 + 2)/(1 + 1), (4 + 3.5)/(2 + 1), (8 + 2)/(1 + 1)
        # a = A(1), b = A(2): (-1 + 4a + 8b)/(1 + 2a + b), (4 + 7a)/(2 + 2a), (8 + 4a - b)/(1 + 2a + b)
        ("gaussian", 0, [0.3523469889, 2.4034121321, 5.3892819327]),
        ("gaussian", 10, [-0.3587513793, 2.178804383, 6.7198781711]),
        ("exponential", 0, [2.5270591921, 2.7125312188, 2.9766845667]),
        ("exponential", 10, [2.3089443061, 2.675249004, 3.2059562577]),
    ],
)
def test_batch_on_a_line(kind, step, expected):
    assert_codes(rules.batch(LINE, double([[-1], [1.5], [2.5], [8]]), on_line(kind), step=step), expected)


@pytest.mark.parametrize(
    ("kind", "step", "first", "last"),
    [
        # (0, 1) and (1, 0) belong to code 0, (5, 4) to code 3: S_0 = (1, 1), c_0 = 2, S_3 = (5, 4), c_3 = 1.
        # With b = A(sqrt 2): w_0 = ((1, 1) + b (5, 4)) / (2 + b), w_3 = ((5, 4) + b (1, 1)) / (1 + 2b);
        # codes 1 and 2 receive both alike, whatever A(1) is: (6, 5) / 3.
        ("hard", 0, [2, 5 / 3], [2, 5 / 3]),
        ("hard", 10, [1.4, 1.2], [2.75, 2.25]),
        ("gaussian", 0, [0.7852052225, 0.7218262842], [4.0414371897, 3.2544511476]),
        ("gaussian", 10, [0.5408362168, 0.531761502], [4.8409842019, 3.8763210459]),
        ("exponential", 0, [1.8620597504, 1.5593798059], [2.144588438, 1.7791243406]),
        ("exponential", 10, [1.7315969035, 1.4579087028], [2.2947760295, 1.8959369118]),
    ],
)
def test_batch_on_a_square(kind, step, first, last):
    codes = rules.batch(SQUARE, double([[0, 1], [1, 0], [5, 4]]), on_square(kind), step=step)
    assert_codes(codes, [first, [2, 5 / 3], [2, 5 / 3], last])


def test_batch_leaves_codes_that_receive_nothing():
    x = double([[0, 1], [1, 0], [5, 4]])
    assert_codes(rules.batch(SQUARE, x, on_square("none")), [[0.5, 0.5], [4, 0], [0, 4], [5, 4]])
    # hard reaches from code 0 to code 1, not to code 2.
    assert_codes(rules.batch(LINE, double([[-1]]), on_line("hard")), [-1, -1, 6])
    assert_codes(rules.batch(LINE, double([[3]])[:0], on_line("hard")), [0, 2, 6])


# scikit-learn


def test_batch_without_a_neighborhood_is_a_step_of_kmeans(lloyd_step):
    x, codes, expected = lloyd_step
    torch.testing.assert_close(rules.batch(codes, x, Neighborhood("none", Grid((3, 4)))), expected, rtol=0, atol=1e-10)


# Properties


@given(st.sampled_from(NEIGHBORHOODS), st.integers(0, 100), st.integers(0, 2**16))
def test_batch_does_not_depend_on_the_order_of_vectors(kind, step, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    codes = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    neighborhood = Neighborhood(kind, Grid((2, 3)))
    shuffled = x[torch.randperm(40, generator=generator)]
    torch.testing.assert_close(
        rules.batch(codes, x, neighborhood, step=step),
        rules.batch(codes, shuffled, neighborhood, step=step),
        rtol=1e-10,
        atol=1e-12,
    )


@given(st.sampled_from(NEIGHBORHOODS), st.floats(0, 1), st.integers(0, 2**16))
def test_online_keeps_codes_within_the_hull_of_codes_and_vectors(kind, beta, seed):
    generator = torch.Generator().manual_seed(seed)
    x, codes = torch.rand(10, 2, generator=generator), torch.rand(6, 2, generator=generator) + 1
    moved = rules.online(codes, x, Neighborhood(kind, Grid((2, 3))), beta=beta)
    assert (moved >= x.min() - 1e-6).all()
    assert (moved <= codes.max() + 1e-6).all()


@pytest.mark.parametrize("rule", ["online", "hebbian", "batch"])
def test_rules_leave_their_arguments_alone_and_keep_the_type(rule):
    options = {} if rule == "batch" else {"beta": 0.5}
    codes, x = torch.randn(6, 2), torch.randn(5, 2)
    codes_before, x_before = codes.clone(), x.clone()
    moved = getattr(rules, rule)(codes, x, Neighborhood("gaussian", Grid((2, 3))), **options)
    assert moved.dtype == torch.float32
    assert not torch.equal(moved, codes)
    assert torch.equal(codes, codes_before)
    assert torch.equal(x, x_before)


@pytest.mark.parametrize("rule", ["online", "hebbian", "batch"])
@pytest.mark.parametrize("kind", ["none", "hard"])
def test_codes_that_do_not_fit_the_grid_are_refused(rule, kind):
    options = {} if rule == "batch" else {"beta": 0.5}
    with pytest.raises(ValueError, match=r"5 codes do not fit a grid of shape \(2, 3\): expected 6"):
        getattr(rules, rule)(torch.randn(5, 2), torch.randn(7, 2), Neighborhood(kind, Grid((2, 3))), **options)
