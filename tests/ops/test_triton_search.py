"""The search as a kernel. Its error is judged against the plain path's own error to float64."""

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton")

from kernels import DEVICE, noise

from topovq.ops.search import METRICS, center_of, nearest
from topovq.ops.triton.replay import Work
from topovq.ops.triton.search import Fold, nearest_triton, search, shares_of, width_of
from topovq.ops.triton.tiles import Tiles

NAN, INF = float("nan"), float("inf")

# NumPy, which the interpreter computes with, warns where a kernel meets NaN or fills a tile up with zeros.
pytestmark = pytest.mark.filterwarnings(
    "ignore:invalid value encountered", "ignore:divide by zero encountered", "ignore:overflow encountered"
)


def kernel_nearest(
    x: torch.Tensor, codes: torch.Tensor, metric: str = "euclidean", precision: str = "exact"
) -> torch.Tensor:
    return nearest_triton(x.to(DEVICE), codes.to(DEVICE), metric, precision).cpu()


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
    tiles = Tiles(128, 128, 64, 4, 2)
    assert shares_of(16_384, 262_144, tiles) == 2
    assert shares_of(524_288, 262_144, tiles) == shares_of(100, 15 * 128, tiles) == 1
    assert shares_of(128, 40 * 128, tiles) == 5


@pytest.mark.parametrize("d", [5, 64, 130, 300])
def test_of_many_codes_that_are_the_same_the_lowest_wins(d):
    codes = noise(2500, d, seed=1)
    codes[140] = codes[135]  # of one tile, but kept apart while it is searched: 140 has the earlier slot
    codes[2000:2100:7] = codes[1999]  # of one tile and the next
    x = codes[[140, 2000, 2049]].to(DEVICE)
    assert nearest_triton(x, codes.to(DEVICE), "euclidean", "exact").tolist() == [135, 1999, 1999]
    assert nearest_triton(x, codes[:1].expand(2500, d).to(DEVICE), "euclidean", "exact").tolist() == [0, 0, 0]


@pytest.mark.parametrize("shares", [1, 2, 3, 18])
@pytest.mark.parametrize("d", [3, 300])
def test_shared_codes_give_what_all_together_give(monkeypatch, shares, d):
    monkeypatch.setattr("topovq.ops.triton.search.shares_of", lambda n, k, tiles: shares)
    codes, x = noise(2200, d, seed=1), noise(7, d)
    codes[2100], x[0] = codes[5], codes[5]  # a tie: the first wins, whatever share it is in
    codes[50], x[1] = codes[1900], codes[1900]
    x[2, 0], x[3, 0] = NAN, INF
    keep = torch.tensor([True] * 6 + [False])
    expected = torch.cdist(x.double(), codes.double()).argmin(1)
    valid, skipped = torch.empty(7, dtype=torch.int8, device=DEVICE), torch.zeros((), dtype=torch.int64, device=DEVICE)
    moved = x.to(DEVICE), codes.to(DEVICE)
    index = search(Work(()), *moved, "euclidean", "exact", keep.to(DEVICE), valid, skipped).cpu()
    assert index[[0, 1, 4, 5, 6]].tolist() == [5, 50, *expected[4:].tolist()]
    assert ((index >= 0) & (index < 2200)).all()
    assert valid.tolist() == [1, 1, 0, 0, 1, 1, 0]
    assert skipped.item() == 2


def test_nearest_far_from_the_origin():
    assert_as_good_as_plain(noise(40, 9) + 1e4, noise(70, 9, seed=1) + 1e4)


HALVES = torch.float16, torch.bfloat16


@pytest.mark.parametrize(
    ("k", "d", "far", "dtype"),
    [
        *((64, 16, far, torch.float32) for far in (1e3, 1e4, 1e5, 1e6, 1e7, 1e8)),
        *((64, 16, far, dtype) for far in (1e3, 1e8) for dtype in HALVES),
        (2100, 8, 1e5, torch.float32),
        (40, 300, 1e5, torch.float32),
        (40, 300, 1e5, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("shift", [0.0, 100.0])
def test_codes_far_away_from_the_others_cost_them_nothing(k, d, far, dtype, shift):
    x, codes = (noise(30, d) + shift).to(dtype), noise(k, d, seed=1) + shift
    one, eighth, most = codes.clone(), codes.clone(), codes.clone()
    one[0] = far
    eighth[::8] = -far
    most[k // 4 :] = far * noise(k - k // 4, d)
    # Beside so many there is no center, and what lies far from the origin as well keeps no more digits than there.
    for strewn in (one, eighth, most) if shift == 0 else (one, eighth):
        expected = torch.cdist(x.double(), strewn.double(), compute_mode="donot_use_mm_for_euclid_dist").argmin(1)
        assert torch.equal(kernel_nearest(x, strewn), expected)


@pytest.fixture
def folds(monkeypatch):
    """The rows of codes that searches made, newest last."""
    made = []

    def keep(*fields):
        made.append(Fold(*fields))
        return made[-1]

    monkeypatch.setattr("topovq.ops.triton.search.Fold", keep)
    monkeypatch.setattr("topovq.ops.triton.replay._known", {})
    return made


def test_where_a_score_is_one_product():
    assert [width_of(k, d, 3) for k, d in ((16_384, 8), (16_384, 9), (16_384, 20), (16_384, 32))] == [32, 32, 64, 128]
    assert [width_of(512, d, 3) for d in (1, 8, 20, 21)] == [16, 32, 64, 0]
    assert [width_of(16_384, d, 1) for d in (13, 14, 29, 32, 33)] == [16, 32, 32, 64, 0]
    assert [width_of(16_384, d, 2) for d in (8, 14, 30, 31)] == [32, 32, 64, 0]


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("precision", ["exact", "fast"])
@pytest.mark.parametrize(("k", "d"), [(70, 8), (2100, 13), (2100, 30)])
def test_rows_hold_codes_and_biases_in_halves(folds, k, d, precision, dtype):
    x, codes = noise(5, d).to(dtype), noise(k, d, seed=1) + 3
    kernel_nearest(x, codes, precision=precision)
    fold = folds[-1]
    assert fold.parts == {"fast": 1}.get(precision, 3 if dtype == torch.float32 else 2)
    assert not fold.unusual.any()
    parts = fold.rows.cpu().double()[:, : fold.parts * d].unflatten(1, (fold.parts, d))
    negative = parts[:k, 0] + (parts[:k, -1] if fold.parts > 1 else 0)
    unit = negative.abs().amax() / (codes.double() - center_of(codes).double()).abs().amax()
    assert torch.log2(unit).round().exp2() == pytest.approx(unit.item(), rel=1e-3)  # a power of two
    unit = torch.log2(unit).round().exp2()
    exactly = -(codes.double() - center_of(codes).double()) * unit
    assert (negative - exactly).abs().max() <= exactly.abs().max() * 2.0 ** (-11 if precision == "fast" else -20)
    if fold.parts == 3:
        assert torch.equal(parts[:, 0], parts[:, 1])
    biases = fold.rows.cpu().double()[:, fold.parts * d :]
    moved = codes.double() - center_of(codes).double()
    bias = moved.square().sum(1) / 2 + (moved @ center_of(codes).double() if fold.parts == 2 else 0)
    bias *= unit**2 / 4096
    assert (biases[:k, :3].sum(1) - bias).abs().max() <= 1e-6 * bias.abs().max()
    assert (biases[k:, 0] == INF).all()  # rows beyond the codes never win
    assert not biases[:, 3:].any()


@pytest.mark.parametrize("far", [1.0, 10.0, 1e3, 1e-5, INF])
def test_codes_that_no_scale_suits_are_searched_otherwise(folds, far):
    x, codes = noise(20, 8), noise(2100, 8, seed=1)
    codes -= center_of(codes)
    codes[1500] *= far
    expected = torch.cdist(x.double(), codes.double().nan_to_num(posinf=1e9, neginf=-1e9)).argmin(1)
    assert torch.equal(kernel_nearest(x, codes), expected)
    assert folds[-1].unusual.any() == (far in (1e3, 1e-5))


def test_vectors_near_the_center_and_far_away_keep_their_digits(folds):
    codes = noise(2100, 8, seed=1)
    codes -= center_of(codes)
    x = torch.cat([noise(30, 8) * scale for scale in (1e-6, 1e-3, 1.0, 1e3, 1e6)])
    assert not folds
    assert_as_good_as_plain(x, codes)
    assert not folds[-1].unusual.any()


def test_nearest_of_nothing():
    index = kernel_nearest(torch.zeros(0, 5), noise(7, 5))
    assert index.shape == (0,)
    assert index.dtype == torch.int64


@pytest.mark.parametrize(("k", "d"), [(1, 4), (30, 4), (64, 3), (100, 20), (2300, 4), (300, 600)])
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
