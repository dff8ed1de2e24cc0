"""The operation as PyTorch sees it: its schema says what it changes, and it can be traced."""

import pytest
import torch

from topovq.grid import Grid
from topovq.neighborhood import NEIGHBORHOODS, Neighborhood, Schedule
from topovq.ops.starts import lay_map
from topovq.ops.update import Batch, Rule, State, update
from topovq.ops.use import NEVER

RULE = Rule(decay=0.75, eps=1e-5, update_empty=False, carried=True, cosine=False)


def some_state(dtype: torch.dtype = torch.float32) -> tuple[State, Batch]:
    """12 codes, and a batch that chose two thirds of them."""
    codes = torch.randn(12, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    counts = torch.arange(12, dtype=dtype) % 3
    frozen = torch.zeros(12, dtype=torch.bool)
    counted = [torch.ones(12, dtype=dtype), torch.zeros(12, dtype=dtype), torch.arange(12, dtype=torch.int32)]
    state = State(codes, codes.clone(), *counted, torch.tensor(5), torch.tensor(2), frozen)
    return state, Batch(codes.flip(0) * counts[:, None], counts, torch.tensor(3))


@pytest.mark.parametrize("grid", [Grid((3, 4)), Grid((3, 5), size=12)], ids=str)
@pytest.mark.parametrize("kind", NEIGHBORHOODS)
def test_the_operation_keeps_to_its_schema_and_is_the_function(kind, grid):
    neighborhood = Neighborhood(kind, grid)
    (state, batch), (expected, _) = some_state(), some_state()
    numbers = (*neighborhood.numbers, *RULE)
    torch.library.opcheck(torch.ops.topovq.update.default, (*state, *batch, *numbers))
    torch.ops.topovq.update.default(*state, *batch, *numbers)
    update(expected, batch, neighborhood, RULE)
    assert not torch.equal(state.codes_KD, some_state()[0].codes_KD)
    assert all(torch.equal(a, b) for a, b in zip(state, expected))


def test_the_weights_are_those_of_the_step():
    # At step 5 of 10 the width is 4 * (1/4)^(1/2) = 2; a step later the codes learn with another one.
    neighborhood = Neighborhood("gaussian", Grid((3, 4)), schedule=Schedule.exponential(4, 1, 10))
    state, batch = some_state(torch.float64)
    weights = torch.exp(-((neighborhood.grid.distance_matrix() / 2) ** 2))
    sums = 0.75 * state.sums_KD + 0.25 * weights @ batch.sums_KD
    expected = sums / (0.75 * state.counts_K + 0.25 * weights @ batch.counts_K)[:, None]
    update(state, batch, neighborhood, RULE)
    torch.testing.assert_close(state.codes_KD, expected)
    assert state.step.item() == 6
    assert state.skipped.item() == 2 + 3
    assert state.idle_K.tolist() == [k + 1 if k % 3 == 0 else 0 for k in range(12)]  # every third code was not chosen


def test_rarely_chosen_codes_are_pulled_to_the_origin():
    """To c / (c + 0.001) of their mean, where the other codes make up nearly all of the counts."""
    c, size = 0.001, 64
    counts = torch.full((size,), 100.0, dtype=torch.float64)
    counts[0] = c
    codes = torch.ones(size, 1, dtype=torch.float64)
    counted = [torch.ones(size, dtype=torch.float64), torch.zeros(size), torch.zeros(size, dtype=torch.int32)]
    state = State(
        codes, codes.clone(), *counted, *torch.zeros(2, dtype=torch.int64), torch.zeros(size, dtype=torch.bool)
    )
    rule = Rule(decay=0.99, eps=1e-5, update_empty=True, carried=True, cosine=False)
    for _ in range(3000):
        update(state, Batch(counts[:, None].clone(), counts, torch.tensor(0)), Neighborhood("none", Grid(size)), rule)
    assert codes[0].item() == pytest.approx(c / (c + 0.001), rel=1e-3)
    assert codes[1].item() == pytest.approx(1, rel=1e-3)


@pytest.mark.parametrize("revive", [True, False])
def test_the_operation_that_rides_keeps_to_its_schema_and_is_the_function(revive):
    neighborhood = Neighborhood("none", Grid((3, 4)))
    rule = RULE._replace(ride=True, revive=revive)
    (state, batch), (expected, _) = some_state(), some_state()
    for made in (state, expected):
        made.idle_K.fill_(NEVER + 10**6)
    torch.library.opcheck(torch.ops.topovq.update.default, (*state, *batch, *neighborhood.numbers, *rule))
    for _ in range(9):  # a dead code asks one place at a time
        torch.ops.topovq.update.default(*state, *batch, *neighborhood.numbers, *rule)
        update(expected, batch, neighborhood, rule)
    assert all(torch.equal(a, b) for a, b in zip(state, expected))
    assert ((state.idle_K >= NEVER) & (state.idle_K < NEVER + 10)).any() == revive


def test_the_operation_that_lays_a_map_is_the_function():
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    given = (x, torch.ones(50, dtype=torch.bool), [3, 5], [False, True], "rectangular", 14, "euclidean", "exact", True)
    torch.library.opcheck(torch.ops.topovq.lay_map.default, given)
    expected = lay_map(*given[:2], Grid((3, 5), wrap=(False, True), size=14), *given[-3:])
    assert all(torch.equal(a, b) for a, b in zip(torch.ops.topovq.lay_map.default(*given), expected))
