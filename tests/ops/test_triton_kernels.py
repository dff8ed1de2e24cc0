"""The Triton kernels: what they promise, not how they are launched. Without a GPU they run in Triton's interpreter.

A kernel's error is judged against the plain path's own error to float64.
"""

import math

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton")

import triton
import triton.language as tl

from topovq.grid import Grid
from topovq.neighborhood import Neighborhood, Schedule
from topovq.ops import quantize as module
from topovq.ops.accumulate import accumulate, accumulate_reference
from topovq.ops.kernel import CUTOFF, Course, Kernel
from topovq.ops.nearest import METRICS, nearest
from topovq.ops.quantize import Choice, quantize
from topovq.ops.smooth import method, smooth, smooth_reference
from topovq.ops.triton_course import course_table, width_and_strength
from topovq.ops.triton_dense import dense_triton
from topovq.ops.triton_quantize import backward_triton, quantize_triton
from topovq.ops.triton_search import nearest_triton, shares_of
from topovq.ops.triton_smooth import LARGE, SMALL, smooth_triton, tile
from topovq.ops.triton_stats import accumulate_triton
from topovq.ops.triton_update import update_triton
from topovq.ops.update import update

# NumPy, which the interpreter computes with, warns where a kernel meets NaN or fills a tile up with zeros.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:divide by zero encountered")

NAN, INF = float("nan"), float("inf")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# The kernels, called as the operations call them on CUDA


def kernel_nearest(
    x: torch.Tensor, codes: torch.Tensor, metric: str = "euclidean", precision: str = "exact"
) -> torch.Tensor:
    return nearest_triton(x.to(DEVICE), codes.to(DEVICE), metric, precision).cpu()


def kernel_accumulate(
    x: torch.Tensor, index: torch.Tensor, num_codes: int, deterministic: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    sums, counts = accumulate_triton(x.to(DEVICE), index.to(DEVICE), num_codes, deterministic)
    return sums.cpu(), counts.cpu()


def kernel_quantize(
    x: torch.Tensor, codes: torch.Tensor, keep: torch.Tensor | None = None, metric: str = "euclidean"
) -> Choice:
    keep = keep if keep is None else keep.to(DEVICE)
    return Choice(
        *(part.cpu() for part in quantize_triton(x.to(DEVICE), codes.to(DEVICE), keep, metric, "exact", True)[:6])
    )


def kernel_backward(*arguments: torch.Tensor | None) -> torch.Tensor:
    return backward_triton(*(argument if argument is None else argument.to(DEVICE) for argument in arguments)).cpu()


def kernel_smooth(
    sums: torch.Tensor, counts: torch.Tensor, grid: Grid, width: float
) -> tuple[torch.Tensor, torch.Tensor]:
    at = torch.tensor(width, dtype=torch.float64, device=DEVICE)
    sums, counts = smooth_triton(sums.to(DEVICE), counts.to(DEVICE), grid, None, at)
    return sums.cpu(), counts.cpu()


def kernel_update(state: list[torch.Tensor], grid: Grid, course: Course, **rule: float | bool) -> None:
    """Change (codes, sums, counts, hits, step, frozen) by the sums and counts of a batch that follow them."""
    moved = [part.to(DEVICE) for part in state]
    update_triton(*moved, grid, course, **rule)
    for part, new in zip(state[:6], moved):
        part.copy_(new)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


# nearest


def excess(index: torch.Tensor, x: torch.Tensor, codes: torch.Tensor, metric: str) -> torch.Tensor:
    """How much worse than the closest each chosen code is, in float64 and relative to the spread of scores."""
    assert index.dtype == torch.int64
    assert index.shape == x.shape[:1]
    assert ((index >= 0) & (index < len(codes))).all()
    x, codes = x.double(), codes.double()
    if metric == "euclidean":
        score = torch.cdist(x, codes, compute_mode="donot_use_mm_for_euclid_dist").square()
    else:
        score = -(x @ (torch.nn.functional.normalize(codes, dim=1) if metric == "cosine" else codes).T)
    best, worst = score.aminmax(dim=1)
    return (score.gather(1, index[:, None])[:, 0] - best) / (worst - best).clamp(min=1e-30)


def assert_as_good_as_plain(x: torch.Tensor, codes: torch.Tensor, metric: str = "euclidean") -> None:
    plain = excess(nearest(x, codes, metric), x, codes, metric)
    kernel = excess(kernel_nearest(x, codes, metric), x, codes, metric)
    assert kernel.max() <= 2 * plain.max() + 1e-6


@pytest.mark.parametrize(
    ("n", "k", "d"), [(1, 1, 1), (1, 70, 3), (70, 1, 3), (63, 65, 17), (64, 64, 64), (130, 129, 5), (3, 200, 130)]
)
def test_nearest_on_sizes_beside_the_tiles(n, k, d):
    assert_as_good_as_plain(noise(n, d), noise(k, d, seed=1))


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_nearest_at_every_scale_and_metric(metric, scale):
    assert_as_good_as_plain(noise(40, 9) * scale, noise(70, 9, seed=1) * scale, metric)


@pytest.mark.parametrize(("k", "d"), [(2, 3), (70, 9), (2100, 4), (70, 300)])
def test_the_second_closest(k, d):
    x, codes = noise(70, d).to(DEVICE), noise(k, d, seed=1).to(DEVICE)
    first = nearest_triton(x, codes, "euclidean", "exact")
    second = nearest_triton(x, codes, "euclidean", "exact", other_than_N=first)
    expected = torch.cdist(x.double(), codes.double()).topk(2, largest=False).indices
    assert torch.equal(torch.stack([first, second], 1), expected)


def test_of_codes_that_are_the_same_the_second_closest_is_the_next():
    codes = noise(3, 4)[[0, 1, 1, 2]].to(DEVICE)
    first = nearest_triton(codes[1:2], codes, "euclidean", "exact")
    second = nearest_triton(codes[1:2], codes, "euclidean", "exact", other_than_N=first)
    assert [int(first), int(second)] == [1, 2]


def test_codes_are_shared_where_vectors_are_few():
    assert shares_of(programs=128, tiles=2048) == 2  # 16,384 vectors, 262,144 codes
    assert shares_of(programs=4096, tiles=2048) == shares_of(programs=1, tiles=15) == 1
    assert shares_of(programs=1, tiles=40) == 5


@pytest.mark.parametrize("shares", [1, 2, 3, 18])
@pytest.mark.parametrize("d", [3, 300])
def test_shared_codes_give_what_all_together_give(monkeypatch, shares, d):
    monkeypatch.setattr("topovq.ops.triton_search.shares_of", lambda programs, tiles: shares)
    codes, x = noise(2200, d, seed=1), noise(7, d)
    codes[2100], x[0] = codes[5], codes[5]  # a tie: the first wins, whatever share it is in
    codes[50], x[1] = codes[1900], codes[1900]
    x[2, 0], x[3, 0] = NAN, INF
    keep = torch.tensor([True] * 6 + [False])
    expected = torch.cdist(x.double(), codes.double()).argmin(1)
    valid, skipped = torch.empty(7, dtype=torch.int8, device=DEVICE), torch.zeros((), dtype=torch.int64, device=DEVICE)
    moved = x.to(DEVICE), codes.to(DEVICE)
    index = nearest_triton(*moved, "euclidean", "exact", keep.to(DEVICE), valid, skipped).cpu()
    assert index[[0, 1, 4, 5, 6]].tolist() == [5, 50, *expected[4:].tolist()]
    assert ((index >= 0) & (index < 2200)).all()
    assert valid.tolist() == [1, 1, 0, 0, 1, 1, 0]
    assert skipped.item() == 2


def test_nearest_far_from_the_origin():
    assert_as_good_as_plain(noise(40, 9) + 1e4, noise(70, 9, seed=1) + 1e4)


def test_nearest_of_nothing():
    index = kernel_nearest(torch.zeros(0, 5), noise(7, 5))
    assert index.shape == (0,)
    assert index.dtype == torch.int64


@pytest.mark.parametrize(("k", "d"), [(1, 4), (30, 4), (64, 3), (100, 20)])
def test_nearest_takes_the_first_of_codes_that_are_the_same(k, d):
    # Copies in the same tile and in other tiles.
    x, codes = noise(50, d), noise(k, d, seed=1)
    index = kernel_nearest(x, codes.repeat(3, 1))
    assert (index < k).all()
    assert torch.equal(index, nearest(x, codes))


@pytest.mark.parametrize("metric", METRICS)
def test_nearest_gives_odd_vectors_a_valid_index_and_disturbs_no_other(metric):
    x, codes = noise(12, 3), noise(70, 3, seed=1)
    expected = kernel_nearest(x, codes, metric)
    x[1] = NAN
    x[3, 0] = NAN
    x[5] = INF
    x[7, 2] = -INF
    x[9] = torch.tensor([INF, -INF, NAN])
    index = kernel_nearest(x, codes, metric)
    assert ((index >= 0) & (index < 70)).all()
    assert torch.equal(index[::2], expected[::2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("scale", "offset"), [(1.0, 0.0), (1.0, 300.0), (1e-4, 0.0), (1e4, 0.0)])
@pytest.mark.parametrize("d", [9, 300])
def test_nearest_takes_half_precision(dtype, scale, offset, d):
    """Its products are other ones, and as exact."""
    x, codes = (noise(40, d) * scale + offset).to(dtype), noise(70, d, seed=1) * scale + offset
    expected = torch.cdist(x.double(), codes.double()).argmin(1)
    assert torch.equal(kernel_nearest(x, codes), expected)
    x, codes = x - offset, codes - offset
    for metric in METRICS[1:]:
        assert torch.equal(kernel_nearest(x, codes, metric), kernel_nearest(x.float(), codes, metric))


def test_nearest_takes_any_layout():
    x, codes = noise(40, 9), noise(70, 9, seed=1)
    expected = kernel_nearest(x, codes)
    for vectors in (x.T.contiguous().T, x.repeat_interleave(2, 0)[::2], torch.stack([x, x], 2)[..., 0]):
        assert torch.equal(kernel_nearest(vectors, codes), expected)
    assert torch.equal(kernel_nearest(x, codes.T.contiguous().T), expected)


@pytest.mark.parametrize("metric", METRICS)
def test_a_fast_search_is_right_to_eleven_bits(metric):
    x, codes = noise(100, 20), noise(130, 20, seed=1)
    index = kernel_nearest(x, codes, metric, "fast")
    assert excess(index, x, codes, metric).max() < 2**-8
    assert (index == nearest(x, codes, metric)).float().mean() > 0.95


# accumulate


def assert_sums_as_good_as_plain(x: torch.Tensor, index: torch.Tensor, k: int) -> None:
    exact_sums, exact_counts = accumulate_reference(x.double(), index, k)
    sums, counts = kernel_accumulate(x, index, k)
    plain, _ = accumulate(x, index, k)
    assert sums.shape == exact_sums.shape
    assert sums.dtype == counts.dtype == torch.float32
    kernel_error, plain_error = (sums - exact_sums).abs().amax(), (plain - exact_sums).abs().amax()
    assert kernel_error <= 2 * plain_error + 1e-7 * exact_sums.abs().amax()
    assert torch.equal(counts.double(), exact_counts)


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize(("n", "k", "d"), [(1, 1, 1), (1, 9, 3), (63, 5, 17), (64, 64, 64), (200, 3, 70), (130, 1, 2)])
def test_accumulate(n, k, d, scale):
    index = torch.randint(-1, k, (n,), generator=torch.Generator().manual_seed(n))
    assert_sums_as_good_as_plain(noise(n, d) * scale, index, k)


def test_accumulate_nothing():
    for x, index in (
        (torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64)),
        (torch.ones(70, 3), torch.full((70,), -1)),
    ):
        sums, counts = kernel_accumulate(x, index, 4)
        assert torch.equal(sums, torch.zeros(4, 3))
        assert torch.equal(counts, torch.zeros(4))


def test_accumulate_leaves_out_whatever_has_no_index():
    x, index = noise(70, 5), torch.arange(70) % 6
    x[::7], index[::7] = NAN, -1
    x[3::7], index[3::7] = INF, -1
    sums, counts = kernel_accumulate(x, index, 6)
    kept = index >= 0
    expected_sums, expected_counts = accumulate(x[kept], index[kept], 6)
    torch.testing.assert_close(sums, expected_sums)
    assert torch.equal(counts, expected_counts)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_accumulate_adds_half_precision_up_in_float32(dtype):
    # 600 ones: in bfloat16 the sum would stop at 256.
    sums, counts = kernel_accumulate(torch.ones(600, 2, dtype=dtype), torch.zeros(600, dtype=torch.int64), 1)
    assert sums.tolist() == [[600, 600]]
    assert counts.tolist() == [600]


def test_accumulate_in_fixed_point():
    x, index = noise(200, 70) * 1e4, torch.arange(200) % 5 - 1
    x[0] = NAN  # left out
    for deterministic in (True, False):
        sums, counts = kernel_accumulate(x, index, 4, deterministic)
        exact_sums, exact_counts = accumulate_reference(x.double(), index, 4)
        assert sums.dtype == torch.float32
        torch.testing.assert_close(sums.double(), exact_sums, rtol=1e-6, atol=1e-1)
        assert torch.equal(counts.double(), exact_counts)
    # Only the order of tiles may change from run to run: integers add up to the same.
    shuffled = torch.cat([torch.arange(64, 128), torch.arange(64), torch.arange(128, 200)])
    again, _ = kernel_accumulate(x[shuffled], index[shuffled], 4, True)
    assert torch.equal(again, kernel_accumulate(x, index, 4, True)[0])


def test_accumulate_takes_any_layout():
    x, index = noise(70, 6), torch.arange(70) % 5 - 1
    expected_sums, expected_counts = kernel_accumulate(x, index, 4)
    for vectors in (x.T.contiguous().T, x.repeat_interleave(2, 0)[::2], torch.stack([x, x], 2)[..., 0]):
        for indices in (index, index.repeat_interleave(2)[::2]):
            sums, counts = kernel_accumulate(vectors, indices, 4)
            torch.testing.assert_close(sums, expected_sums)
            assert torch.equal(counts, expected_counts)


# quantize: search, gather, error and statistics in one pass


def odd_batch(n: int, d: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Vectors, some of them with NaN or infinity, and which of them to keep."""
    x = noise(n, d)
    x[3::11, 0] = NAN
    x[5::13] = INF
    return x, torch.arange(n) % 4 != 2


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(("n", "k", "d"), [(1, 1, 1), (70, 9, 3), (130, 140, 20)])
@pytest.mark.parametrize("masked", [False, True])
def test_quantize(metric, n, k, d, masked):
    x, keep = odd_batch(n, d)
    codes = noise(k, d, seed=1)
    if metric == "cosine":
        x, codes = torch.nn.functional.normalize(x, dim=1), torch.nn.functional.normalize(codes, dim=1)
    keep = keep if masked else None
    got, plain = kernel_quantize(x, codes, keep, metric), quantize(x, codes, keep, metric, stats=True)
    finite = x.isfinite().all(1)
    valid = finite if keep is None else finite & keep
    assert torch.equal(got.index_N[finite], plain.index_N[finite])
    assert ((got.index_N >= 0) & (got.index_N < k)).all()
    assert torch.equal(got.q_ND, codes[got.index_N])
    assert got.skipped.item() == (~finite).sum().item()
    # In float64, by definition.
    x, codes, index = x[valid].double(), codes.double(), got.index_N[valid]
    error = (x - codes[index]).square().mean() if valid.any() else torch.zeros(())
    assert got.error.item() == pytest.approx(error.item(), rel=1e-5)
    sums, counts = accumulate_reference(x, index, k)
    torch.testing.assert_close(got.sums_KD.double(), sums, rtol=1e-5, atol=1e-5)
    assert torch.equal(got.counts_K.double(), counts)


def test_quantize_nothing():
    got = kernel_quantize(torch.zeros(0, 3), noise(5, 3))
    assert got.q_ND.shape == (0, 3)
    assert got.index_N.shape == (0,)
    assert got.error.item() == 0
    assert torch.equal(got.sums_KD, torch.zeros(5, 3))
    assert torch.equal(got.counts_K, torch.zeros(5))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_quantize_keeps_the_type_of_vectors_and_statistics_in_float32(dtype):
    x, codes = noise(70, 5).to(dtype), noise(9, 5, seed=1)
    got, wide = kernel_quantize(x, codes), kernel_quantize(x.float(), codes)
    assert got.q_ND.dtype == dtype
    torch.testing.assert_close(got.q_ND.float(), wide.q_ND, rtol=2**-7, atol=0)  # the interpreter rounds down
    for name in ("error", "index_N", "sums_KD", "counts_K"):
        assert torch.equal(getattr(got, name), getattr(wide, name)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_quantize(dtype):
    # grad_q + 2 * grad_error * weight * (x - q); a vector of weight 0 passes grad_q on, whatever it holds.
    x, grad, q = (noise(70, 5, seed=seed).to(dtype) for seed in range(3))
    valid = torch.arange(70) % 3 != 0
    x[::6] = NAN
    # Codes that 16 bits hold: the interpreter rounds down.
    book = noise(9, 5, seed=3).to(dtype).float()
    for rows, row_of in ((q, None), (book, torch.arange(70, dtype=torch.int16) % 9)):
        chosen = rows if row_of is None else rows[row_of.long()].to(dtype)
        got = kernel_backward(grad.T.contiguous().T, torch.tensor(1.5), x, rows, row_of, valid, torch.tensor(0.2))
        assert got.dtype == dtype
        expected = torch.where(valid[:, None], 2 * 1.5 * 0.2 * (x.double() - chosen.double()), 0) + grad.double()
        torch.testing.assert_close(got.double(), expected, rtol=2**-7 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)


@pytest.mark.parametrize("codes", [9, module.FEW + 1])
def test_the_gradient_is_of_the_codes_that_were_chosen(codes, monkeypatch):
    """Not of what an update has made of them since, whether they were copied or q is read."""
    monkeypatch.setattr(module, "_on_device", lambda x, codes: True)
    x, book = noise(70, 5).to(DEVICE).requires_grad_(), noise(codes, 5, seed=1).to(DEVICE)
    choice = quantize(x, book, stats=True)
    gap = x.detach() - book[choice.index_N]
    book.zero_()
    choice.index_N.fill_(-1)  # the caller's, to do with it what they want
    (choice.q_ND.sum() + choice.error).backward()
    torch.testing.assert_close(x.grad, 1 + 2 * gap / gap.numel())


# course and smooth: width and strength at a step, and the Gaussian over a grid, one axis at a time


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
        course = neighborhood.course
        table = course_table(course, out.device)
        _course_kernel[(1,)](step.to(DEVICE), table, out, KIND=course.kind, SCHEDULE=course.schedule)
        expected = [neighborhood.width(step).item(), neighborhood.strength(step).item()]
        assert out.tolist() == pytest.approx(expected, rel=1e-14)


SMOOTHED = [
    Grid(1),
    Grid(2),
    Grid(2, wrap=True),
    Grid(3, wrap=True),
    Grid(37),
    Grid(70, wrap=True),
    Grid((1, 5)),
    Grid((5, 1)),
    Grid((9, 20)),
    Grid((16, 32)),
    Grid((17, 33), wrap=True),
    Grid((5, 4), wrap=(False, True)),
    Grid((6, 3), wrap=(True, False)),
    Grid((3, 4, 5)),
    Grid((3, 17, 4), wrap=(True, False, True)),
]


@pytest.mark.parametrize("width", [0.05, 0.3, 1.0, 2.7, 100.0])
@pytest.mark.parametrize("grid", SMOOTHED, ids=str)
def test_smooth(grid, width):
    sums, counts = noise(grid.size, 33 if grid.size < 100 else 1), (torch.arange(grid.size) % 4 % 3).float()
    at = Kernel("gaussian", *torch.tensor([width, 1.0], dtype=torch.float64), widest=width)
    exact = smooth_reference(sums.double(), counts.double(), grid, at)
    for got, plain, true in zip(kernel_smooth(sums, counts, grid, width), smooth(sums, counts, grid, at), exact):
        assert got.dtype == torch.float32
        error, plain_error = (each.double().sub(true).abs().max() for each in (got, plain))
        assert error <= 2 * plain_error + 5e-7 * true.abs().max()


@pytest.mark.parametrize("grid", [Grid((130, 3), wrap=True), Grid((2, 70))], ids=str)
def test_smooth_with_large_tiles(monkeypatch, grid):
    # Full tiles of 64 places and one that is not.
    monkeypatch.setattr("topovq.ops.triton_smooth.PROGRAMS", 0)
    assert tile(max(grid.shape), 3, 2) == LARGE
    sums, counts = noise(grid.size, 5), noise(grid.size).abs()
    for width in (0.3, 4.0, 200.0):
        at = Kernel("gaussian", *torch.tensor([width, 1.0], dtype=torch.float64), widest=width)
        exact = smooth_reference(sums.double(), counts.double(), grid, at)
        for got, true in zip(kernel_smooth(sums, counts, grid, width), exact):
            assert got.double().sub(true).abs().max() <= 1e-6 * true.abs().max()


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


# update: smoothing and the mini-batch rule in one pass

RULE = {"decay": 0.75, "eps": 1e-5, "update_empty": True, "carried": True, "cosine": False}


def book_state(size: int, d: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """codes, sums, counts, hits, step, frozen, and the sums and counts of a batch that chose half of the codes."""
    codes, sums, batch_sums = (noise(size, d, seed=seed).to(dtype) for seed in range(3))
    counts, hits = noise(size, seed=3).abs().to(dtype) + 0.1, noise(size, seed=4).abs().to(dtype)
    batch_counts = (torch.arange(size) % 4 % 3).to(dtype)
    batch_sums = batch_sums * batch_counts[:, None]
    return [codes, sums, counts, hits, torch.tensor(7), torch.arange(size) % 5 == 4, batch_sums, batch_counts]


def assert_update_as_good_as_plain(grid: Grid, course: Course, d: int = 4, **changes: float | bool) -> None:
    rule = {**RULE, **changes}
    kernel_state, plain, exact = (
        book_state(grid.size, d),
        book_state(grid.size, d),
        book_state(grid.size, d, torch.float64),
    )
    kernel_update(kernel_state, grid, course, **rule)
    update(*plain, grid, course, **rule)
    update(*exact, grid, course, **rule)
    for name, got, near, truth in zip(
        ("codes", "sums", "counts", "hits", "step", "frozen"), kernel_state, plain, exact
    ):
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
    ],
    ids=str,
)
def test_update_with_a_window(grid):
    course = Neighborhood("hard", grid).course
    assert method(grid, course) == "box"
    assert_update_as_good_as_plain(grid, course)
    assert_update_as_good_as_plain(grid, Neighborhood("hard", grid, schedule=Schedule.linear(2.3, 1, 10)).course)


@pytest.mark.parametrize(
    "schedule", [Schedule.harmonic(0.1), Schedule.linear(3, 0.2, 10), Schedule.exponential(9, 0.3, 8)], ids=str
)
@pytest.mark.parametrize("grid", [Grid(1), Grid(19), Grid((7, 18), wrap=(True, False)), Grid((3, 4, 5))], ids=str)
def test_update_with_a_gaussian(grid, schedule):
    for update_empty in (True, False):
        course = Neighborhood("gaussian", grid, schedule=schedule).course
        assert_update_as_good_as_plain(grid, course, update_empty=update_empty)


@pytest.mark.parametrize("kind", ["none", "gaussian", "exponential"])
def test_update_with_statistics_that_are_smoothed_before(kind):
    grid = Grid((4, 9))
    for update_empty in (True, False):  # without a neighborhood half of the codes receive nothing
        assert_update_as_good_as_plain(grid, Neighborhood(kind, grid).course, update_empty=update_empty)


@pytest.mark.parametrize("kind", ["hard", "gaussian", "exponential"])
@pytest.mark.parametrize(
    "grid",
    [*SMOOTHED, Grid((5, 7), topology="hexagonal"), Grid((6, 4), topology="hexagonal", wrap=True)],
    ids=str,
)
def test_any_neighborhood_over_a_small_grid(grid, kind):
    sums, counts = noise(grid.size, 33 if grid.size < 100 else 1), (torch.arange(grid.size) % 4 % 3).float()
    for schedule, t in ((Schedule.harmonic(0.1), 0), (Schedule.harmonic(0.1), 30), (Schedule.linear(3.5, 0.2, 10), 4)):
        course = Neighborhood(kind, grid, schedule=schedule).course
        step = torch.tensor(t)
        exact = smooth_reference(sums.double(), counts.double(), grid, course.at(step))
        moved = [part.to(DEVICE) for part in (sums, counts)]
        for got, true in zip(dense_triton(*moved, grid, course, step.to(DEVICE)), exact):
            assert got.dtype == torch.float32
            assert got.cpu().double().sub(true).abs().max() <= 1e-6 * true.abs().max() + 1e-6


@pytest.mark.parametrize("d", [1, 3, 64, 100])
@pytest.mark.parametrize("update_empty", [True, False])
@pytest.mark.parametrize("carried", [True, False])
@pytest.mark.parametrize("cosine", [True, False])
def test_update_in_every_form_of_the_rule(d, update_empty, carried, cosine):
    grid = Grid((3, 5))
    course = Neighborhood("hard", grid).course
    assert_update_as_good_as_plain(grid, course, d, update_empty=update_empty, carried=carried, cosine=cosine)


def test_update_by_hand():
    # Codes 0, 2, 6 on a line, hard at t = 10, decay = 0.75, no smoothing of counts: test_codebook.py works it out.
    codes, counts, hits, step = torch.tensor([[0.0], [2.0], [6.0]]), torch.ones(3), torch.zeros(3), torch.tensor(10)
    book = [codes, codes.clone(), counts, hits, step, torch.zeros(3, dtype=torch.bool)]
    batch = [torch.tensor([[-1.0], [4.0], [8.0]]), torch.tensor([1.0, 2.0, 1.0])]
    course = Neighborhood("hard", Grid(3)).course
    kernel_update(book + batch, Grid(3), course, **{**RULE, "update_empty": False})
    torch.testing.assert_close(codes, torch.tensor([[0.2], [2.25], [5.6]]))
    assert counts.tolist() == [1.25, 1.5, 1.25]
    assert hits.tolist() == [0.25, 0.5, 0.25]
    assert step.item() == 11


def test_update_from_nothing_changes_nothing():
    grid = Grid((3, 5))
    state, before = book_state(15, 4), book_state(15, 4)
    for tensor in state[6:]:
        tensor.zero_()
    kernel_update(state, grid, Neighborhood("hard", grid).course, **RULE)
    for got, was in zip(state[:6], before):
        assert torch.equal(got, was)
