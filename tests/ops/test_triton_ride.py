"""The rule that rides as kernels: what the plain operations give, on every grid."""

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton")

from kernels import DEVICE, GRIDS, noise

from topovq.grid import Grid
from topovq.neighborhood import TRIES, Neighborhood
from topovq.ops import ride as rides
from topovq.ops.triton.ride import ride_triton
from topovq.ops.update import Batch, Rule, State, update
from topovq.ops.use import NEVER

# NumPy, which the interpreter computes with, warns where a kernel fills a tile up with zeros.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:divide by zero encountered")

RULE = Rule(decay=0.9, eps=1e-5, update_empty=True, carried=True, cosine=False, ride=True, revive=True)
HEXAGONS = [
    Grid((5, 7), topology="hexagonal"),
    Grid((6, 4), topology="hexagonal", wrap=True),
    Grid((6, 7), topology="hexagonal", size=37),
]


def some_state(size: int, d: int, step: int, dtype: torch.dtype = torch.float32) -> tuple[State, Batch]:
    """A codebook, half of whose codes a batch chose; most of the others have waited for long."""
    codes, batch_sums = (noise(size, d, seed=seed).to(dtype) for seed in range(2))
    counts, hits = noise(size, seed=3).abs().to(dtype) + 0.1, noise(size, seed=4).abs().to(dtype)
    batch_counts = (torch.arange(size) % 4 % 3).to(dtype)
    idle = torch.where(torch.arange(size) % 7 < 5, 10**6, NEVER + 3).int()
    numbers = torch.tensor(step), torch.tensor(2)
    state = State(codes, codes * counts[:, None], counts, hits, idle, *numbers, torch.arange(size) % 5 == 4)
    return state, Batch(batch_sums * batch_counts[:, None], batch_counts, torch.tensor(3))


def assert_as_good_as_plain(grid: Grid, d: int = 4, step: int = 7, **changes: float | bool) -> int:
    """How many codes came back."""
    rule, neighborhood = RULE._replace(**changes), Neighborhood("none", grid)
    (got, batch), plain = some_state(grid.size, d, step), some_state(grid.size, d, step)
    exact = some_state(grid.size, d, step, torch.float64)
    moved = State(*(part.to(DEVICE) for part in got))
    ride_triton(moved, Batch(*(part.to(DEVICE) for part in batch)), grid, rule)
    update(*plain, neighborhood, rule)
    update(*exact, neighborhood, rule)
    assert torch.equal(moved.idle_K.cpu(), exact[0].idle_K)
    for name, here, near, truth in zip(State._fields, moved, plain[0], exact[0]):
        assert here.dtype == near.dtype
        error, plain_error = ((each.cpu().double() - truth.double()).abs().amax() for each in (here, near))
        assert error <= 2 * plain_error + 2e-6 * truth.double().abs().amax(), name
    return int((exact[0].idle_K == NEVER).sum())


@pytest.mark.parametrize("grid", [*GRIDS, *HEXAGONS, Grid((33, 32), size=1033)], ids=str)
def test_ride_on_every_grid(grid):
    assert assert_as_good_as_plain(grid, d=2) > 0 or grid.size < 37


@pytest.mark.parametrize("d", [1, 64, 100])
@pytest.mark.parametrize("update_empty", [True, False])
@pytest.mark.parametrize("cosine", [True, False])
def test_ride_in_every_form(d, update_empty, cosine):
    for revive in (True, False):
        how = {"update_empty": update_empty, "cosine": cosine, "revive": revive}
        assert (assert_as_good_as_plain(Grid((5, 6)), d, **how) > 0) == revive


def test_the_strongest_pull_is_one():
    assert_as_good_as_plain(Grid((3, 5)), step=0, decay=0.0)


@pytest.mark.parametrize("grid", [Grid(40), Grid((7, 9), wrap=True), Grid((3, 4, 5)), *HEXAGONS], ids=str)
def test_codes_ask_the_same_places(grid):
    """Over many steps: all other codes are busy, so that each place asked shows."""
    k = torch.arange(grid.size)
    for step in (0, 1, 12_345, 2**31):
        state, _ = some_state(grid.size, 2, step)
        state.counts_K.copy_((k % 2).float())  # those of even number are busy, and those of odd number ask
        state.counts_K.copy_(1 - state.counts_K + 1e-3)
        state.idle_K.fill_(10**6)
        state.frozen_K.zero_()
        batch = Batch(noise(grid.size, 2), (k % 2 == 0).float(), torch.tensor(0))
        moved = State(*(part.to(DEVICE) for part in state))
        ride_triton(moved, Batch(*(part.to(DEVICE) for part in batch)), grid, RULE)
        tries = [rides.asked(grid, torch.tensor(step), attempt, torch.device("cpu")) for attempt in range(TRIES)]
        heard = torch.full((grid.size,), -1)
        for code in k[k % 2 == 1].tolist():
            first = next((place[code] for place in tries if place[code] >= 0 and place[code] % 2 == 0), None)
            if first is not None:
                heard[first] = code
        assert (moved.idle_K.cpu() == NEVER).nonzero()[:, 0].tolist() == sorted(heard[heard >= 0].tolist())


def test_ride_from_nothing_changes_nothing():
    state, batch = some_state(15, 4, 7)
    before, _ = some_state(15, 4, 7)
    for tensor in batch:
        tensor.zero_()
    moved = State(*(part.to(DEVICE) for part in state))
    ride_triton(moved, Batch(*(part.to(DEVICE) for part in batch)), Grid((3, 5)), RULE)
    for got, was in zip(moved, before):
        assert torch.equal(got.cpu(), was)


def test_a_code_that_no_vector_chose_has_sums_that_are_not_read():
    state, batch = some_state(40, 4, 7)
    batch.sums_KD[batch.counts_K == 0] = torch.nan
    lost = torch.arange(40) == 8  # a code that is not finite, which no vector chose
    state.codes_KD[lost], state.sums_KD[lost], state.frozen_K[lost] = torch.inf, torch.inf, True
    moved = State(*(part.to(DEVICE) for part in state))
    ride_triton(moved, Batch(*(part.to(DEVICE) for part in batch)), Grid((5, 8)), RULE)
    assert torch.equal(moved.codes_KD.isfinite().all(1).cpu(), ~lost)
    assert torch.equal(moved.sums_KD.isfinite().all(1).cpu(), ~lost)
