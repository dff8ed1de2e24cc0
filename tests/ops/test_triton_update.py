"""The update as kernels: smoothing and the mini-batch rule in one pass."""

from math import nan

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton")

from kernels import DEVICE, GRIDS, noise

from topovq.grid import Grid
from topovq.neighborhood import Neighborhood, Schedule
from topovq.ops.smooth import method, smooth_reference
from topovq.ops.triton import update as triton_update
from topovq.ops.triton.smooth import dense_triton
from topovq.ops.triton.update import update_triton
from topovq.ops.update import Batch, Rule, State, update

# NumPy, which the interpreter computes with, warns where a kernel meets NaN or fills a tile up with zeros.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:divide by zero encountered")


def kernel_update(state: State, batch: Batch, neighborhood: Neighborhood, rule: Rule) -> None:
    """Change the state by the kernels, wherever it lies."""
    moved = State(*(part.to(DEVICE) for part in state))
    update_triton(moved, Batch(*(part.to(DEVICE) for part in batch)), neighborhood, rule)
    for part, new in zip(state, moved):
        part.copy_(new)


RULE = Rule(decay=0.75, eps=1e-5, update_empty=True, carried=True, cosine=False)


def some_state(size: int, d: int, dtype: torch.dtype = torch.float32) -> tuple[State, Batch]:
    """A codebook, and a batch that chose half of its codes."""
    codes, sums, batch_sums = (noise(size, d, seed=seed).to(dtype) for seed in range(3))
    counts, hits = noise(size, seed=3).abs().to(dtype) + 0.1, noise(size, seed=4).abs().to(dtype)
    batch_counts = (torch.arange(size) % 4 % 3).to(dtype)
    idle, frozen = torch.arange(size, dtype=torch.int32), torch.arange(size) % 5 == 4
    state = State(codes, sums, counts, hits, idle, torch.tensor(7), torch.tensor(2), frozen)
    return state, Batch(batch_sums * batch_counts[:, None], batch_counts, torch.tensor(3))


def assert_update_as_good_as_plain(neighborhood: Neighborhood, d: int = 4, **changes: float | bool) -> None:
    rule = RULE._replace(**changes)
    size = neighborhood.grid.size
    kernel, plain, exact = some_state(size, d), some_state(size, d), some_state(size, d, torch.float64)
    kernel_update(*kernel, neighborhood, rule)
    update(*plain, neighborhood, rule)
    update(*exact, neighborhood, rule)
    for name, got, near, truth in zip(State._fields, kernel[0], plain[0], exact[0]):
        assert got.dtype == near.dtype
        error, plain_error = ((each.double() - truth.double()).abs().amax() for each in (got, near))
        assert error <= 2 * plain_error + 1e-6 * truth.double().abs().amax(), name


@pytest.mark.parametrize(
    "grid",
    [
        Grid(1),
        Grid(5),
        Grid(2, wrap=True),
        Grid(40, wrap=True),
        Grid((4, 9)),
        Grid((2, 5), wrap=True),
        Grid((5, 4), wrap=(False, True)),
        Grid((3, 4, 5)),
        Grid((3, 2, 4), wrap=(True, True, False)),
        Grid((5, 4), topology="hexagonal"),
        Grid((6, 5), topology="hexagonal", wrap=True),
        Grid((2, 2), topology="hexagonal", wrap=True),
        Grid((5, 4), topology="hexagonal", wrap=(False, True)),
        Grid((33, 32)),  # more codes than one program counts
        Grid((2, 2), size=3),
        Grid((5, 6), size=25),
        Grid((5, 6), wrap=True, size=28),
        Grid((5, 4), topology="hexagonal", size=17),
        Grid((6, 5), topology="hexagonal", wrap=True, size=27),
        Grid((33, 32), size=1033),
    ],
    ids=str,
)
def test_update_with_a_window(grid):
    neighborhood = Neighborhood("hard", grid)
    assert method(neighborhood) == "box"
    assert_update_as_good_as_plain(neighborhood)
    assert_update_as_good_as_plain(Neighborhood("hard", grid, schedule=Schedule.linear(2.3, 1, 10)))


def test_update_with_the_largest_window():
    """Over 26 neighbors warps drift apart: where one read what another had written, it showed here first."""
    grid = Grid((5, 6, 7), wrap=(True, False, True))
    assert_update_as_good_as_plain(Neighborhood("hard", grid), d=24)


@pytest.mark.parametrize(
    "schedule", [Schedule.harmonic(0.1), Schedule.linear(3, 0.2, 10), Schedule.exponential(9, 0.3, 8)], ids=str
)
@pytest.mark.parametrize(
    "grid",
    [Grid(1), Grid(19), Grid((7, 18), wrap=(True, False)), Grid((3, 4, 5)), Grid((7, 18), size=113)],
    ids=str,
)
def test_update_with_a_gaussian(grid, schedule):
    for update_empty in (True, False):
        neighborhood = Neighborhood("gaussian", grid, schedule=schedule)
        assert_update_as_good_as_plain(neighborhood, update_empty=update_empty)


@pytest.mark.parametrize("width", [0.41, 0.3, 0.1])
@pytest.mark.parametrize("grid", [grid for grid in GRIDS if grid.size > 1], ids=str)
def test_a_narrow_gaussian_is_a_window(grid, width, monkeypatch):
    """What was smoothed before is not looked at: here it is NaN."""
    neighborhood = Neighborhood("gaussian", grid, schedule=Schedule.exponential(3, width, 7))
    monkeypatch.setattr(triton_update, "gaussian_triton", lambda sums, counts, *_, **how: (sums * nan, counts * nan))
    for cosine in (False, True):
        assert_update_as_good_as_plain(neighborhood, cosine=cosine)


@pytest.mark.parametrize("kind", ["none", "gaussian", "exponential"])
def test_update_with_statistics_that_are_smoothed_before(kind):
    grid = Grid((4, 9))
    for update_empty in (True, False):  # without a neighborhood half of the codes receive nothing
        assert_update_as_good_as_plain(Neighborhood(kind, grid), update_empty=update_empty)


@pytest.mark.parametrize("kind", ["hard", "gaussian", "exponential"])
@pytest.mark.parametrize(
    "grid",
    [
        *GRIDS,
        Grid((5, 7), topology="hexagonal"),
        Grid((6, 4), topology="hexagonal", wrap=True),
        Grid((6, 7), topology="hexagonal", size=37),
    ],
    ids=str,
)
def test_any_neighborhood_over_a_small_grid(grid, kind):
    sums, counts = noise(grid.size, 33 if grid.size < 100 else 1), (torch.arange(grid.size) % 4 % 3).float()
    moments = [(Schedule.harmonic(0.1), 30), (Schedule.harmonic(0.1), 0), (Schedule.linear(3.5, 0.2, 10), 4)]
    for schedule, t in moments if grid.size < 100 else moments[:1]:
        neighborhood = Neighborhood(kind, grid, schedule=schedule)
        step = torch.tensor(t)
        exact = smooth_reference(sums.double(), counts.double(), neighborhood, step)
        moved = [part.to(DEVICE) for part in (sums, counts)]
        for got, true in zip(dense_triton(*moved, neighborhood, step.to(DEVICE)), exact):
            assert got.dtype == torch.float32
            assert got.cpu().double().sub(true).abs().max() <= 1e-6 * true.abs().max() + 1e-6


@pytest.mark.parametrize("d", [1, 3, 64, 100])
@pytest.mark.parametrize("update_empty", [True, False])
@pytest.mark.parametrize("carried", [True, False])
@pytest.mark.parametrize("cosine", [True, False])
def test_update_in_every_form_of_the_rule(d, update_empty, carried, cosine):
    grid = Grid((3, 5))
    how = {"update_empty": update_empty, "carried": carried, "cosine": cosine}
    assert_update_as_good_as_plain(Neighborhood("hard", grid), d, **how)


def test_update_by_hand():
    # Codes 0, 2, 6 on a line, hard at t = 10, decay = 0.75, no smoothing of counts: test_codebook_rule.py works it out.
    codes, counts, hits, step = torch.tensor([[0.0], [2.0], [6.0]]), torch.ones(3), torch.zeros(3), torch.tensor(10)
    idle = torch.full((3,), 5, dtype=torch.int32)
    skipped = torch.zeros((), dtype=torch.int64)
    state = State(codes, codes.clone(), counts, hits, idle, step, skipped, torch.zeros(3, dtype=torch.bool))
    batch = Batch(torch.tensor([[-1.0], [4.0], [8.0]]), torch.tensor([1.0, 2.0, 1.0]), torch.tensor(5))
    kernel_update(state, batch, Neighborhood("hard", Grid(3)), RULE._replace(update_empty=False))
    torch.testing.assert_close(codes, torch.tensor([[0.2], [2.25], [5.6]]))
    assert counts.tolist() == [1.25, 1.5, 1.25]
    assert hits.tolist() == [0.25, 0.5, 0.25]
    assert idle.tolist() == [0, 0, 0]
    assert (step.item(), skipped.item()) == (11, 5)


def test_the_updates_since_a_code_was_chosen_are_counted():
    # Soft choices give every code a little; half a vector makes a code a chosen one.
    state, batch = some_state(4, 2)
    state.idle_K.copy_(torch.tensor([3, 3, 3, 2**30]))
    batch.counts_K.copy_(torch.tensor([0.0, 0.4, 0.5, 0.0]))
    kernel_update(state, batch, Neighborhood("hard", Grid(4)), RULE)
    assert state.idle_K.tolist() == [4, 4, 0, 2**30 + 1]
    assert state.idle_K.dtype == torch.int32


def test_update_from_nothing_changes_nothing():
    state, batch = some_state(15, 4)
    before, _ = some_state(15, 4)
    for tensor in batch:
        tensor.zero_()
    kernel_update(state, batch, Neighborhood("hard", Grid((3, 5))), RULE)
    for got, was in zip(state, before):
        assert torch.equal(got, was)


def test_the_share_of_a_batch_is_rounded_once():
    # 1 - 0.99 in float32 is 9.5e-7 too small; codes that start without a count would be that much too large. The
    # interpreter computes scalars in float64: there this shows only that the share is the right one.
    state, batch = some_state(6, 4)
    for part in (state.sums_KD, state.counts_K, state.hits_K):
        part.zero_()
    kernel_update(state, batch, Neighborhood("none", Grid(6)), RULE._replace(decay=0.99))
    free_K = ~state.frozen_K
    torch.testing.assert_close(state.sums_KD[free_K], 0.01 * batch.sums_KD[free_K], rtol=2e-7, atol=0)
    torch.testing.assert_close(state.hits_K, 0.01 * batch.counts_K, rtol=2e-7, atol=0)
