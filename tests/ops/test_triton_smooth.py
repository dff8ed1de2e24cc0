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
from topovq.ops.triton.course import course_of, course_table, width_and_strength
from topovq.ops.triton.smooth import LARGE, SMALL, gaussian_triton, tile

# NumPy, which the interpreter computes with, warns where a kernel meets NaN or fills a tile up with zeros.
# Where nothing was written, a kernel may compute with what happens to be there, for nobody.
pytestmark = pytest.mark.filterwarnings(
    "ignore:invalid value encountered", "ignore:divide by zero encountered", "ignore:overflow encountered"
)


STEP = torch.tensor(2)


def gaussian(grid: Grid, width: float) -> Neighborhood:
    """One that always has this width."""
    return Neighborhood("gaussian", grid, schedule=Schedule.linear(width, width, 5))


def kernel_smooth(
    sums: torch.Tensor, counts: torch.Tensor, grid: Grid, width: float
) -> tuple[torch.Tensor, torch.Tensor]:
    sums, counts = gaussian_triton(sums.to(DEVICE), counts.to(DEVICE), gaussian(grid, width), STEP.to(DEVICE))
    return sums.cpu(), counts.cpu()


@triton.jit
def _course_kernel(step_ptr, course_ptr, out_ptr, KIND: tl.constexpr, SCHEDULE: tl.constexpr):
    width, strength = width_and_strength(step_ptr, course_ptr, KIND, SCHEDULE)
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
    for t in (0, 1, 7, 11, 12, 14_999, 10**6, 2**40):
        step = torch.tensor(t)
        out = torch.empty(2, dtype=torch.float64, device=DEVICE)
        course = course_of(neighborhood)
        table = course_table(course, out.device)
        _course_kernel[(1,)](step.to(DEVICE), table, out, KIND=course.kind, SCHEDULE=course.schedule)
        expected = [neighborhood.width(step).item(), neighborhood.strength(step).item()]
        assert out.tolist() == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("width", [0.05, 0.3, 1.0, 2.7, 100.0])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_smooth(grid, width):
    sums, counts = noise(grid.size, 33 if grid.size < 100 else 1), (torch.arange(grid.size) % 4 % 3).float()
    at = gaussian(grid, width)
    exact = smooth_reference(sums.double(), counts.double(), at, STEP)
    for got, plain, true in zip(kernel_smooth(sums, counts, grid, width), smooth(sums, counts, at, STEP), exact):
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
        at = gaussian(grid, width)
        exact = smooth_reference(sums.double(), counts.double(), at, STEP)
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


@pytest.mark.parametrize("large", [False, True], ids=["small tiles", "large tiles"])
@pytest.mark.parametrize("width", [module.WIDE, 9.3, 12.5, 40.0, 300.0])
@pytest.mark.parametrize("grid", WIDE_GRIDS, ids=str)
def test_wide_gaussians_over_points(monkeypatch, grid, width, large):
    """The way over points against the sum over places, in float64: every weight to float32."""
    monkeypatch.setattr(module, "PROGRAMS", 0 if large else 10**9)
    sums, counts = noise(grid.size, 5), noise(grid.size).abs()
    at = gaussian(grid, width)
    exact = smooth_reference(sums.double(), counts.double(), at, STEP)
    for got, true in zip(kernel_smooth(sums, counts, grid, width), exact):
        assert got.double().sub(true).abs().max() <= 1e-6 * counts.sum()
    # One code chosen: single weights, down to small ones
    counts = torch.zeros(grid.size)
    counts[grid.size // 3] = 1
    _, got = kernel_smooth(counts[:, None], counts, grid, width)
    true = smooth_reference(counts.double()[:, None], counts.double(), at, STEP)[1]
    assert ((got.double() - true).abs() / true)[true > 1e-6].max() < 5e-6
    assert (got.double() - true).abs().max() < 1e-6


@pytest.mark.parametrize(
    ("grid", "width"),
    [
        (Grid((66, 70)), module.WIDE),
        (Grid((66, 70)), 30.0),
        (Grid((79, 64), wrap=(True, False)), module.WIDE),
        (Grid((64, 78), wrap=(False, True)), 12.0),  # too wide for the ring
        (Grid((64, 2, 65)), 9.3),
        (Grid((66, 70), size=4561), 9.3),
        (Grid((64, 66), wrap=(False, True), size=4161), module.WIDE),
    ],
    ids=str,
)
def test_wide_gaussians_over_the_points_of_two_axes(monkeypatch, grid, width):
    monkeypatch.setattr(module, "PROGRAMS", 0)
    sums, counts = noise(grid.size, 1), noise(grid.size).abs()
    at = gaussian(grid, width)
    exact = smooth_reference(sums.double(), counts.double(), at, STEP)
    for got, true in zip(kernel_smooth(sums, counts, grid, width), exact):
        assert got.double().sub(true).abs().max() <= 2e-6 * true.abs().max()


@pytest.mark.parametrize(
    ("grid", "width", "share", "block"),
    [
        (Grid(130), 3.0, 0.1, 16),
        (Grid((40, 9), wrap=True), 0.7, 0.1, 16),  # few places within reach
        (Grid((40, 9), wrap=True), 0.7, 0.1, 32),  # a tile is of two lines, but for those along the last axis
        (Grid((40, 9), wrap=True), 50.0, 0.3, 16),  # on a ring each place counts once
        (Grid((3, 66, 2), wrap=(False, True, False)), 4.0, 0.3, 16),
        (Grid((66, 70)), module.WIDE, 0.02, 16),
        (Grid((70, 3)), 30.0, 1.0, 16),
        (Grid((70, 3)), 30.0, 1.0, 32),
        (Grid((79, 3), wrap=(True, False)), module.WIDE, 0.1, 16),
        (Grid((2, 78), wrap=(False, True)), 12.0, 0.1, 16),  # too wide for the ring
        (Grid((2, 65)), 9.3, 0.3, 16),
        (Grid((30, 20)), 9.3, 0.1, 16),  # wide, but no axis is long
        (Grid((30, 20)), 3.0, 0.0, 16),
        (Grid((40, 9), size=353), 0.7, 0.3, 16),
        (Grid((40, 9), wrap=True, size=353), 50.0, 1.0, 32),
        (Grid((66, 64), size=4161), 9.3, 0.02, 16),
        (Grid((40, 9), size=353), 3.0, 0.3, 16),
        (Grid((3, 70), size=171), 30.0, 1.0, 16),
    ],
    ids=str,
)
def test_sums_of_a_batch_go_through_lists_of_chosen_codes(monkeypatch, grid, width, share, block):
    monkeypatch.setattr(module, "MANY", 0)
    monkeypatch.setattr(module, "tile", lambda *shape: SMALL._replace(block_c=block))
    chosen = torch.rand(grid.size, generator=torch.Generator().manual_seed(1)) < share
    counts = chosen * 3.0
    sums = noise(grid.size, 16) * counts[:, None]
    at = gaussian(grid, width)
    got_sums, got_counts = gaussian_triton(sums.to(DEVICE), counts.to(DEVICE), at, STEP.to(DEVICE), of_a_batch=True)
    true_sums, true_counts = smooth_reference(sums.double(), counts.double(), at, STEP)
    assert got_sums.cpu().double().sub(true_sums).abs().max() <= 2e-6 * true_counts.max()
    assert got_counts.cpu().double().sub(true_counts).abs().max() <= 2e-6 * true_counts.max()


@pytest.mark.parametrize("width", [3.0, 9.0])
def test_what_no_vector_chose_is_not_read(monkeypatch, width):
    monkeypatch.setattr(module, "MANY", 0)
    grid = Grid((3, 65))
    counts = torch.zeros(grid.size)
    counts[[5, 70, 194]] = 1
    sums = torch.where(counts[:, None] > 0, 1.0, torch.nan).expand(-1, SMALL.block_c).contiguous()
    on_device = (sums.to(DEVICE), counts.to(DEVICE), gaussian(grid, width), STEP.to(DEVICE))
    smoothed, same = gaussian_triton(*on_device, of_a_batch=True)
    torch.testing.assert_close(smoothed, same[:, None].expand_as(smoothed))


@pytest.mark.parametrize(("width", "many"), [(0.7, 10**9), (3.0, 10**9), (9.0, 10**9), (3.0, 0), (9.0, 0)])
def test_what_lies_behind_the_last_code_is_not_read(monkeypatch, width, many):
    monkeypatch.setattr(module, "MANY", many)
    grid = Grid((3, 66), size=140)
    memory = torch.full((grid.places, SMALL.block_c + 1), torch.nan, device=DEVICE)
    memory[: grid.size] = 1
    sums, counts = memory[:, 1:].contiguous()[: grid.size], memory[:, 0].contiguous()[: grid.size]
    smoothed, same = gaussian_triton(sums, counts, gaussian(grid, width), STEP.to(DEVICE), of_a_batch=True)
    assert smoothed.shape == sums.shape
    assert same.isfinite().all()
    torch.testing.assert_close(smoothed, same[:, None].expand_as(smoothed))


def test_the_way_over_points_is_taken(monkeypatch):
    taken = []
    original = module._points_kernel

    class Watched:
        def __getitem__(self, programs):
            taken.append(programs)
            return original[programs]

    monkeypatch.setattr(module, "_points_kernel", Watched())
    counts = torch.ones(64 * 3)
    kernel_smooth(counts[:, None], counts, Grid((64, 3)), 9.0)
    kernel_smooth(counts[:, None], counts, Grid((3, 64)), 9.0)
    assert len(taken) == 2  # once each: along the axis that is long enough


@pytest.mark.parametrize("n", [64, 512, 4096, 2**20])
def test_points_fit_where_they_are_kept(n):
    # width / RATIO apart, over the axis and half a reach beyond each end
    reach = math.sqrt(-math.log(CUTOFF))
    for width in (module.WIDE, 1.01 * module.WIDE, 100.0):
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
