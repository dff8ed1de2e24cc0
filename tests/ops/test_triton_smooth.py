"""Width and strength at a step, and the Gaussian over a grid, one axis at a time, as kernels."""

import math

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton")

import triton
import triton.language as tl
from kernels import DEVICE, GRIDS, noise

from topovq.grid import Grid
from topovq.neighborhood import CUTOFF, Neighborhood, Schedule
from topovq.ops.smooth import smooth, smooth_reference
from topovq.ops.triton import smooth as module
from topovq.ops.triton.smooth import LARGE, SMALL, gaussian_triton, schedule_table, tile, width_and_strength

# NumPy, which the interpreter computes with, warns where a kernel meets NaN or fills a tile up with zeros.
# Where nothing was written, a kernel may compute with what happens to be there, for nobody.
pytestmark = pytest.mark.filterwarnings(
    "ignore:invalid value encountered", "ignore:divide by zero encountered", "ignore:overflow encountered"
)


STEP = torch.tensor(2)
WIDE = module.WIDE.value


def gaussian(grid: Grid, width: float) -> Neighborhood:
    """One that always has this width."""
    return Neighborhood("gaussian", grid, schedule=Schedule.linear(width, width, 5))


def kernel_smooth(
    sums: torch.Tensor, counts: torch.Tensor, grid: Grid, width: float
) -> tuple[torch.Tensor, torch.Tensor]:
    sums, counts = gaussian_triton(sums.to(DEVICE), counts.to(DEVICE), gaussian(grid, width), STEP.to(DEVICE))
    return sums.cpu(), counts.cpu()


@triton.jit
def _schedule_kernel(step_ptr, schedule_ptr, out_ptr, KIND: tl.constexpr, SCHEDULE: tl.constexpr):
    width, strength = width_and_strength(step_ptr, schedule_ptr, KIND, SCHEDULE)
    tl.store(out_ptr, width)
    tl.store(out_ptr + 1, strength)


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule.harmonic(0.1),
        Schedule.harmonic(0),
        Schedule.linear(3.7, 0, 11),
        Schedule.exponential(32, 0.3, 15_000),
        Schedule.exponential(2, 2, 5),
    ],
    ids=lambda schedule: f"{schedule.kind}-{schedule.tau}-{schedule.start}",
)
@pytest.mark.parametrize("kind", ["hard", "gaussian", "exponential"])
def test_width_and_strength_are_those_of_the_schedule_in_float64(kind, schedule):
    neighborhood = Neighborhood(kind, Grid((4, 5)), schedule=schedule)
    for t in (0, 1, 7, 0.25, 11, 12, 14_999, 10**6, 2**40):  # estimators count in fractions of a pass
        step = torch.tensor(t, dtype=torch.float64 if isinstance(t, float) else torch.int64)
        out = torch.empty(2, dtype=torch.float64, device=DEVICE)
        table = schedule_table(schedule, neighborhood.widest, out.device)
        _schedule_kernel[(1,)](step.to(DEVICE), table, out, KIND=kind, SCHEDULE=schedule.kind)
        expected = [neighborhood.width(step).item(), neighborhood.strength(step).item()]
        assert out.tolist() == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("width", [0.05, 0.3, 1.0, 2.7, 100.0])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_smooth(grid, width):
    sums, counts = noise(grid.size, 33 if grid.size < 100 else 1), (torch.arange(grid.size) % 4 % 3).float()
    at = (gaussian(grid, width), STEP)
    exact = smooth_reference(sums.double(), counts.double(), *at)
    for got, plain, true in zip(kernel_smooth(sums, counts, grid, width), smooth(sums, counts, *at), exact):
        assert got.dtype == torch.float32
        error, plain_error = (each.double().sub(true).abs().max() for each in (got, plain))
        assert error <= 2 * plain_error + 5e-7 * true.abs().max()


@pytest.mark.parametrize("grid", [Grid((130, 3), wrap=True), Grid((2, 70))], ids=str)
def test_smooth_with_large_tiles(monkeypatch, grid):
    # Full tiles of 64 places and one that is not.
    monkeypatch.setattr("topovq.ops.triton.smooth.PROGRAMS", 0)
    assert tile(max(grid.shape), 3, 2) == LARGE
    sums, counts = noise(grid.size, 5), noise(grid.size).abs()
    for width in (0.3, 4.0, 200.0):
        exact = smooth_reference(sums.double(), counts.double(), gaussian(grid, width), STEP)
        for got, true in zip(kernel_smooth(sums, counts, grid, width), exact):
            assert got.double().sub(true).abs().max() <= 1e-6 * true.abs().max()


WIDE_GRIDS = [
    Grid(130),
    Grid(129, wrap=True),
    Grid(64),
    Grid((70, 3), wrap=True),
    Grid((2, 65)),
    Grid((200, 2)),
    Grid((70, 3), size=208),
    Grid((3, 70), size=171),
]


@pytest.mark.parametrize(
    ("width", "large"),
    [(WIDE, False), (WIDE, True), (9.3, False), (12.5, True), (40.0, False), (300.0, False), (300.0, True)],
    ids=lambda value: {False: "small tiles", True: "large tiles"}.get(value, str(value)),
)
@pytest.mark.parametrize("grid", WIDE_GRIDS, ids=str)
def test_wide_gaussians_over_points(monkeypatch, grid, width, large):
    """The way over points against the sum over places, in float64: every weight to float32."""
    monkeypatch.setattr(module, "PROGRAMS", 0 if large else 10**9)
    sums, counts = noise(grid.size, 5), noise(grid.size).abs()
    exact = smooth_reference(sums.double(), counts.double(), gaussian(grid, width), STEP)
    for got, true in zip(kernel_smooth(sums, counts, grid, width), exact):
        assert got.double().sub(true).abs().max() <= 1e-6 * counts.sum()
    # One code chosen: single weights, down to small ones
    counts = torch.zeros(grid.size)
    counts[grid.size // 3] = 1
    _, got = kernel_smooth(counts[:, None], counts, grid, width)
    true = smooth_reference(counts.double()[:, None], counts.double(), gaussian(grid, width), STEP)[1]
    assert ((got.double() - true).abs() / true)[true > 1e-6].max() < 5e-6
    assert (got.double() - true).abs().max() < 1e-6


@pytest.mark.parametrize(
    ("grid", "width"),
    [
        (Grid((66, 70)), WIDE),
        (Grid((66, 70)), 30.0),
        (Grid((79, 64), wrap=(True, False)), WIDE),
        (Grid((64, 78), wrap=(False, True)), 12.0),  # too wide for the ring
        (Grid((64, 2, 65)), 9.3),
        (Grid((3, 66, 2), wrap=(False, True, False)), WIDE),
        (Grid((30, 20)), 9.3),  # wide, but no axis is long
        (Grid((66, 70), size=4561), 9.3),
        (Grid((64, 66), wrap=(False, True), size=4161), WIDE),
    ],
    ids=str,
)
def test_wide_gaussians_over_the_points_of_two_axes(monkeypatch, grid, width):
    monkeypatch.setattr(module, "PROGRAMS", 0)
    sums, counts = noise(grid.size, 1), noise(grid.size).abs()
    exact = smooth_reference(sums.double(), counts.double(), gaussian(grid, width), STEP)
    for got, true in zip(kernel_smooth(sums, counts, grid, width), exact):
        assert got.double().sub(true).abs().max() <= 2e-6 * true.abs().max()


@pytest.mark.parametrize("width", [0.7, 3.0, 9.0])
def test_what_lies_behind_the_last_code_is_not_read(width):
    grid = Grid((3, 66), size=140)
    memory = torch.full((grid.places, SMALL.block_c + 1), torch.nan)
    memory[: grid.size] = 1
    sums, counts = memory[:, 1:].contiguous()[: grid.size], memory[:, 0].contiguous()[: grid.size]
    smoothed, same = kernel_smooth(sums, counts, grid, width)
    assert smoothed.shape == sums.shape
    assert same.isfinite().all()
    torch.testing.assert_close(smoothed, same[:, None].expand_as(smoothed))


def test_what_is_narrow_is_left_to_the_window(monkeypatch):
    """With `but_narrow` nothing is written where only the next places are within reach, which is up to 0.417."""
    grid, ones = Grid((3, 5)), torch.ones(15, 1, device=DEVICE)
    monkeypatch.setattr(module.Work, "empty", lambda work, *shape, **how: torch.full(shape, torch.nan, **how))
    for width, written in ((0.41, False), (0.42, True)):
        at = gaussian(grid, width)
        smoothed, _ = gaussian_triton(ones, ones[:, 0].contiguous(), at, STEP.to(DEVICE), but_narrow=True)
        assert smoothed.isfinite().all() == written
        smoothed, _ = gaussian_triton(ones, ones[:, 0].contiguous(), at, STEP.to(DEVICE))
        assert smoothed.isfinite().all()


def test_the_way_over_points_is_taken(monkeypatch):
    taken = []
    original = module._axis_kernel

    class Watched:
        arg_names = original.arg_names

        def __getitem__(self, programs):
            def launch(*arguments, **how):
                taken.append(how["TO_POINTS"])
                original[programs](*arguments, **how)

            return launch

    monkeypatch.setattr(module, "_axis_kernel", Watched())
    counts = torch.ones(64 * 3)
    kernel_smooth(counts[:, None], counts, Grid((64, 3)), 9.0)
    kernel_smooth(counts[:, None], counts, Grid((3, 64)), 9.0)
    assert taken == 2 * [True, False, False]  # once each: along the axis that is long enough


@pytest.mark.parametrize("n", [64, 512, 4096, 2**20])
def test_points_fit_where_they_are_kept(n):
    # width / RATIO apart, over the axis and half a reach beyond each end
    reach = math.sqrt(-math.log(CUTOFF))
    for width in (WIDE, 1.01 * WIDE, 100.0):
        assert (n - 1 + reach * width) / (width / 2.75) + 1 <= module.most_points(n) <= n


def test_tiles_fill_a_device():
    # 512 codes of 64 dimensions: 64 programs along each axis; 262,144: large tiles.
    assert tile(16, 32 * 64, 1) == tile(32, 64, 16) == SMALL
    assert tile(512, 512 * 64, 1) == tile(512, 64, 512) == LARGE
    assert tile(8, 2**20, 1) == SMALL  # a tile of 64 places would be empty but for 8


def test_smooth_cuts_off_where_weights_are_none():
    # Width 2: exp(-r^2 / 4) is 1.6e-9 at a distance of 9 and 1.4e-11 at 10.
    counts = torch.zeros(40)
    counts[20] = 1
    sums, smoothed = kernel_smooth(counts[:, None], counts, Grid(40), 2.0)
    expected = torch.exp(-((torch.arange(40.0) - 20) ** 2) / 4)
    assert smoothed[11].item() == pytest.approx(math.exp(-81 / 4), rel=1e-5)
    assert math.exp(-100 / 4) < CUTOFF < math.exp(-81 / 4)
    assert smoothed[10].item() == smoothed[30].item() == 0
    torch.testing.assert_close(smoothed[11:30], expected[11:30], rtol=1e-5, atol=0)
    assert torch.equal(sums[:, 0], smoothed)
