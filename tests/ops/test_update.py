"""The operation as PyTorch sees it: its schema says what it changes, and it can be traced."""

import pytest
import torch

from topovq.grid import Grid
from topovq.neighborhood import NEIGHBORHOODS, Neighborhood, Schedule
from topovq.ops.update import update

RULE = {"decay": 0.75, "eps": 1e-5, "update_empty": False, "carried": True, "cosine": False}


def state(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """codes, sums, counts, hits, idle, step, frozen, and a batch's sums and counts, of 12 codes."""
    codes = torch.randn(12, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    counts = torch.arange(12, dtype=dtype) % 3
    frozen = torch.zeros(12, dtype=torch.bool)
    counted = [torch.ones(12, dtype=dtype), torch.zeros(12, dtype=dtype), torch.arange(12, dtype=torch.int32)]
    book = [codes, codes.clone(), *counted, torch.tensor(5), frozen]
    return [*book, codes.flip(0) * counts[:, None], counts]


@pytest.mark.parametrize("kind", NEIGHBORHOODS)
def test_the_operation_keeps_to_its_schema(kind):
    course = Neighborhood(kind, Grid((3, 4))).course
    numbers = (course.kind, course.schedule, course.tau, course.start, course.end, course.steps)
    arguments = (*state(), [3, 4], [False, False], "rectangular", *numbers, *RULE.values())
    torch.library.opcheck(torch.ops.topovq.update.default, arguments)


@pytest.mark.parametrize("kind", NEIGHBORHOODS)
def test_the_operation_knows_a_last_row_that_is_partly_empty(kind):
    grid = Grid((3, 5), size=12)
    course = Neighborhood(kind, grid).course
    numbers = (course.kind, course.schedule, course.tau, course.start, course.end, course.steps)
    arguments = (*state(), [3, 5], [False, False], "rectangular", *numbers, *RULE.values())
    torch.library.opcheck(torch.ops.topovq.update.default, arguments)
    moved, expected = state(), state()
    torch.ops.topovq.update.default(*moved, *arguments[len(moved) :])
    update(*expected, grid, course, **RULE)
    assert all(torch.equal(a, b) for a, b in zip(moved, expected))


def test_the_weights_are_those_of_the_step():
    # At step 5 of 10 the width is 4 * (1/4)^(1/2) = 2; a step later the codes learn with another one.
    neighborhood = Neighborhood("gaussian", Grid((3, 4)), schedule=Schedule.exponential(4, 1, 10))
    distance = neighborhood.grid.distance_matrix()
    codes, sums, counts, hits, idle, step, frozen, batch_sums, batch_counts = state(torch.float64)
    weights = torch.exp(-((distance / 2) ** 2))
    expected = (0.75 * sums + 0.25 * weights @ batch_sums) / (0.75 * counts + 0.25 * weights @ batch_counts)[:, None]
    update(
        codes, sums, counts, hits, idle, step, frozen, batch_sums, batch_counts,
        neighborhood.grid, neighborhood.course, **RULE,
    )  # fmt: skip
    torch.testing.assert_close(codes, expected)
    assert step.item() == 6
    assert idle.tolist() == [k + 1 if k % 3 == 0 else 0 for k in range(12)]  # every third code was not chosen


def test_rarely_chosen_codes_are_pulled_to_the_origin() -> None:
    """To c / (c + 0.001) of their mean, where the other codes make up nearly all of the counts."""
    c, size = 0.001, 64
    batch_counts = torch.full((size,), 100.0, dtype=torch.float64)
    batch_counts[0] = c
    codes = torch.ones(size, 1, dtype=torch.float64)
    book = [codes, codes.clone(), torch.ones(size, dtype=torch.float64), torch.zeros(size)]
    book += [torch.zeros(size, dtype=torch.int32), torch.tensor(0)]
    book += [torch.zeros(size, dtype=torch.bool), batch_counts[:, None] * 1.0, batch_counts]
    course = Neighborhood("none", Grid(size)).course
    for _ in range(3000):
        update(*book, Grid(size), course, decay=0.99, eps=1e-5, update_empty=True, carried=True, cosine=False)
    assert codes[0].item() == pytest.approx(c / (c + 0.001), rel=1e-3)
    assert codes[1].item() == pytest.approx(1, rel=1e-3)
