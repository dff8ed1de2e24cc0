"""The exact search by one product and a proof for each vector (triton/which.py), and when an estimator does without."""

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton")

from kernels import DEVICE, noise

from topovq.ops.triton.replay import Work
from topovq.ops.triton.search import nearest_triton, proof_pays, proves, search
from topovq.som.tables import DenseTable

NAN, INF = float("nan"), float("inf")

# NumPy, which the interpreter computes with, warns where a kernel meets NaN or fills a tile up with zeros.
pytestmark = pytest.mark.filterwarnings(
    "ignore:invalid value encountered", "ignore:divide by zero encountered", "ignore:overflow encountered"
)


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
