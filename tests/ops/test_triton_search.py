"""The search as a kernel. Its error is judged against the plain path's own error to float64."""

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton")

from kernels import DEVICE, noise

from topovq.ops.search import METRICS, center_of, nearest
from topovq.ops.triton.replay import Work
from topovq.ops.triton.search import Fold, nearest_triton, proof_pays, proves, search, shares_of, width_of
from topovq.ops.triton.tiles import Tiles
from topovq.som.tables import DenseTable

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


# Exact by a proof (triton/which.py)


def test_a_proof_is_sought_where_it_pays():
    assert proves(65_536, 65_536, 64)
    assert proves(131_072, 8_192, 256)
    assert proves(262_144, 1_024, 128)
    assert not proves(32_768, 16_384, 16)  # three products cost little more than one there
    assert not proves(524_288, 512, 64)
    assert not proves(4_096, 8_192, 64)


@pytest.fixture
def proven(monkeypatch):
    """Shapes of any size are searched by half numbers, with a proof."""
    monkeypatch.setattr("topovq.ops.triton.search.proves", lambda n, k, padded: k > 2048 or padded > 64)
    monkeypatch.setattr("topovq.ops.triton.replay._known", {})


def listed(x, codes, metric="euclidean"):
    """(indices, how many vectors had no proof)."""
    work = Work(())
    index = search(work, x.to(DEVICE), codes.to(DEVICE), metric, "exact")
    (number,) = (each for each in work.made if each.dtype == torch.int32 and each.shape == (1,))
    return index.cpu(), number.item()


def closest(x, codes, metric="euclidean"):
    x, codes = x.double(), codes.double()
    if metric == "cosine":
        return (x @ torch.nn.functional.normalize(codes, dim=1).T).argmax(1)
    return torch.cdist(x, codes, compute_mode="donot_use_mm_for_euclid_dist").argmin(1)


@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
@pytest.mark.parametrize(("k", "d"), [(2100, 5), (2100, 40), (300, 100), (300, 200), (300, 300)])
def test_most_vectors_have_a_proof_and_all_are_right(proven, metric, k, d):
    x, codes = noise(200, d), noise(k, d, seed=1)
    index, number = listed(x, codes, metric)
    assert torch.equal(index, closest(x, codes, metric))
    assert number <= 20


def test_without_a_proof_vectors_are_searched_again(proven):
    # Each code has another beside it that half numbers cannot tell from it.
    codes = noise(2200, 24, seed=1)
    codes[1100:] = codes[:1100] + 1e-4 * noise(1100, 24, seed=2)
    x = torch.cat([noise(60, 24), codes[7:40] + 1e-2 * noise(33, 24)])
    index, number = listed(x, codes)
    distance = torch.cdist(x.double(), codes.double(), compute_mode="donot_use_mm_for_euclid_dist")
    chosen = distance.gather(1, index[:, None])[:, 0]
    assert (chosen.square() - distance.min(1).values.square() <= 1e-5).all()
    assert number > 80


@pytest.mark.parametrize("spread", [1e-1, 1e-4])
def test_codes_that_lie_together_have_proofs_for_vectors_elsewhere(proven, spread):
    """As where a wide neighborhood has drawn a map together."""
    x, codes = noise(200, 24), noise(2200, 24, seed=1) * spread + 1
    index, number = listed(x, codes)
    assert torch.equal(index, closest(x, codes))
    assert number < 20


@pytest.mark.parametrize("far", [1e3, 1e5, 1e8, 1e18])
def test_a_proof_holds_with_codes_far_away(proven, far):
    x, codes = noise(150, 16), noise(2100, 16, seed=1)
    codes[::50] *= far
    x[3] *= min(far, 1e5)  # beyond, float64 cannot tell the ordinary codes apart
    index, _ = listed(x, codes)
    assert torch.equal(index, closest(x, codes))


def test_equal_codes_and_odd_vectors_have_no_proof_but_an_answer(proven):
    codes = noise(2300, 8, seed=1)
    codes[2250], codes[130], codes[131] = codes[5], codes[9], codes[9]
    x = torch.cat([codes[[5, 9, 5]], noise(5, 8)])
    x[4, 0], x[5, 1], x[6, 2] = NAN, INF, -INF
    index, number = listed(x, codes)
    assert index[:3].tolist() == [5, 9, 5]
    assert index[[3, 7]].tolist() == closest(x[[3, 7]], codes).tolist()
    assert ((index >= 0) & (index < 2300)).all()
    assert number >= 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("offset", [0.0, 20.0])
def test_a_proof_for_vectors_of_16_bits(proven, dtype, offset):
    x, codes = (noise(120, 40) + offset).to(dtype), noise(2100, 40, seed=1) + offset
    index, number = listed(x, codes)
    assert torch.equal(index, closest(x, codes))
    assert number < (60 if offset else 30)


def test_the_second_closest_is_proven_too(proven):
    x, codes = noise(80, 12), noise(2100, 12, seed=1)
    first = nearest_triton(x.to(DEVICE), codes.to(DEVICE), "euclidean", "exact")
    second = nearest_triton(x.to(DEVICE), codes.to(DEVICE), "euclidean", "exact", other_than_N=first).cpu()
    assert torch.equal(second, torch.cdist(x.double(), codes.double()).topk(2, largest=False).indices[:, 1])


@pytest.mark.parametrize("shares", [2, 5])
def test_a_proof_over_shares_of_the_codes(proven, monkeypatch, shares):
    monkeypatch.setattr("topovq.ops.triton.search.shares_of", lambda n, k, tiles: shares)
    x, codes = noise(90, 20), noise(2500, 20, seed=1)
    codes[2400] = codes[30]
    x[0] = codes[30]
    index, number = listed(x, codes)
    assert torch.equal(index[1:], closest(x, codes)[1:])
    assert index[0] == 30
    assert 1 <= number < 20


def smooth_map(k, d):
    """Codes along a curve, as those of a map whose neighborhood is wide."""
    waves = noise(1, d, seed=2) + 1.5
    return torch.sin(torch.linspace(0, 3, k)[:, None] * waves)


def test_codes_of_a_smooth_map_are_known_to_have_few_proofs(proven):
    codes = smooth_map(2200, 24)
    x = codes[::7] + 0.3 * noise(315, 24)
    _, number = listed(x, codes)
    assert number > 0.9 * len(x)
    assert not proof_pays(x.to(DEVICE), codes.to(DEVICE), "euclidean")
    assert proof_pays(x.to(DEVICE), noise(2200, 24, seed=1).to(DEVICE), "euclidean")


def test_whether_a_proof_pays_is_not_asked_where_none_is_sought():
    codes = smooth_map(300, 24)
    assert proof_pays(codes[::3].to(DEVICE), codes.to(DEVICE), "euclidean")


@pytest.mark.parametrize("smooth", [True, False])
def test_an_estimator_searches_a_smooth_map_without_proofs(proven, monkeypatch, smooth):
    asked = []

    def noted(*arguments):
        asked.append(arguments[-1])
        return nearest_triton(*arguments)

    monkeypatch.setattr("topovq.ops.triton.search.nearest_triton", noted)
    codes = smooth_map(2200, 24) if smooth else noise(2200, 24, seed=1)
    x = codes[::30] + 0.3 * noise(74, 24)
    table = DenseTable(x.to(DEVICE))
    first = table._nearest(codes.to(DEVICE), "euclidean")
    second = table._nearest(codes.to(DEVICE), "euclidean", first).cpu()
    distance = torch.cdist(x.double(), codes.double(), compute_mode="donot_use_mm_for_euclid_dist")
    lowest = distance.topk(2, largest=False).values
    chosen = distance.gather(1, torch.stack([first.cpu(), second], 1))
    assert torch.allclose(chosen, lowest, rtol=1e-5)
    assert (first.cpu() != second).all()
    assert asked == [not smooth] * 2
