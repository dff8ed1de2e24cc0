import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from topovq.ops import search as module
from topovq.ops.search import METRICS, center_of, nearest, nearest_reference, sample_of

NAN, INF = float("nan"), float("inf")


def scores(x: torch.Tensor, codes: torch.Tensor, metric: str) -> torch.Tensor:
    """What the closest code minimizes, N x K, in float64."""
    x, codes = x.double(), codes.double()
    if metric == "euclidean":
        return ((x[:, None] - codes[None]) ** 2).sum(-1) / 2
    if metric == "cosine":
        codes = codes / codes.norm(dim=1, keepdim=True)
    return -(x @ codes.T)


def assert_closest(index: torch.Tensor, x: torch.Tensor, codes: torch.Tensor, metric: str = "euclidean") -> None:
    """The code chosen is the closest, to within the rounding of a float32 product of this many terms.

    For Euclidean distances that rounding is relative to the spread of the codes and the vector's distance from them,
    not to the distance of all of them from the origin, and not to codes far away from the others.
    """
    assert index.dtype == torch.int64
    assert index.shape == x.shape[:1]
    assert ((index >= 0) & (index < len(codes))).all()
    score = scores(x, codes, metric)
    excess = score.gather(1, index[:, None])[:, 0] - score.amin(1)
    center = codes.double().median(0).values if metric == "euclidean" else 0
    reach = (x.double() - center).norm(dim=1)
    size = (codes.double() - center).norm(dim=1)
    far = 1.0 if metric == "cosine" else size[size <= 20 * size.median()].max()
    rounding = 2 * (x.shape[1] + 3) * 2**-24 * (reach * far + (far**2 / 2 if metric == "euclidean" else 0))
    assert (excess <= rounding).all(), (excess - rounding).max()


# By hand


def test_by_hand():
    codes = torch.tensor([[0.0, 0.0], [4.0, 0.0], [0.0, 1.0]])
    x = torch.tensor([[1.0, 0.2], [3.0, 3.0], [-1.0, 2.0]])
    # Squared distances: 1.04, 9.04, 1.64 | 18, 10, 13 | 5, 29, 2
    assert nearest(x, codes).tolist() == [0, 1, 2]
    # Products: 0, 4, 0.2 | 0, 12, 3 | 0, -4, 2
    assert nearest(x, codes, "dot").tolist() == [1, 1, 2]
    # With codes of length 1 (the first stays 0): 0, 1, 0.2 | 0, 3, 3 (a tie) | 0, -1, 2
    assert nearest(x, codes, "cosine").tolist() == [1, 1, 2]


def test_the_lowest_index_wins_a_tie():
    codes = torch.tensor([[3.0], [1.0], [-1.0], [1.0]])  # small integers: nothing is rounded
    assert nearest(torch.tensor([[0.0], [2.0], [1.5]]), codes).tolist() == [1, 0, 1]


# Agreement with float64


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(
    ("n", "k", "d"), [(1, 1, 1), (1, 50, 3), (50, 1, 3), (37, 129, 65), (300, 64, 4), (5, 1000, 17)]
)
def test_random_vectors(metric, n, k, d):
    generator = torch.Generator().manual_seed(n + k + d)
    x, codes = torch.randn(n, d, generator=generator), torch.randn(k, d, generator=generator)
    assert_closest(nearest(x, codes, metric), x, codes, metric)
    # In float64 there is nothing to choose.
    x, codes = x.double(), codes.double()
    assert torch.equal(nearest(x, codes, metric), nearest_reference(x, codes, metric))


@given(st.integers(0, 40), st.integers(1, 70), st.integers(1, 20), st.sampled_from(METRICS), st.integers(0, 2**16))
def test_any_shape(n, k, d, metric, seed):
    generator = torch.Generator().manual_seed(seed)
    x, codes = torch.randn(n, d, generator=generator), torch.randn(k, d, generator=generator)
    assert_closest(nearest(x, codes, metric), x, codes, metric)


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("metric", METRICS)
def test_scales(scale, metric):
    x, codes = torch.randn(200, 16) * scale, torch.randn(100, 16) * scale
    assert_closest(nearest(x, codes, metric), x, codes, metric)


@pytest.mark.parametrize("shift", [1e2, 1e4])
def test_vectors_far_from_the_origin(shift):
    x, codes = torch.randn(200, 16) + shift, torch.randn(100, 16) + shift
    assert_closest(nearest(x, codes), x, codes)


FAR = [1e3, 1e4, 1e5, 1e6, 1e7, 1e8]


def strewn(far: float, shift: float, codes: torch.Tensor) -> dict[str, torch.Tensor]:
    """Codes of which some lie `far` from the others: one, every eighth at one place, three quarters all over."""
    generator = torch.Generator().manual_seed(0)
    one, eighth, most = codes.clone(), codes.clone(), codes.clone()
    one[0] = far
    eighth[::8] = -far
    if not shift:  # beside so many there is no center: what is far from the origin as well keeps no digits
        most[16:] = far * torch.randn(most[16:].shape, generator=generator)
    return {"one": one, "eighth": eighth, "most": most}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shift", [0.0, 300.0])
@pytest.mark.parametrize("far", FAR)
def test_codes_far_away_from_the_others_cost_them_nothing(far, shift, dtype):
    generator = torch.Generator().manual_seed(1)
    x = (torch.randn(256, 16, generator=generator) + shift).to(dtype)
    codes = torch.randn(64, 16, generator=generator) + shift
    for which, strewn_codes in strewn(far, shift, codes).items():
        expected = nearest_reference(x.double(), strewn_codes.double())
        assert (nearest(x, strewn_codes) != expected).sum() <= (0 if shift == 0 else 1), which
        assert_closest(nearest(x, strewn_codes), x, strewn_codes)


def test_the_center_is_among_the_codes_or_the_origin():
    codes = torch.randn(1000, 8, generator=torch.Generator().manual_seed(0))
    assert not center_of(codes).any()
    shifted = codes + 100
    assert (center_of(shifted) - 100).abs().max() < 5
    shifted[::3] = 1e6  # a third of the codes, at regular distances
    assert (center_of(shifted) - 100).abs().max() < 5 or not center_of(shifted).any()
    codes[::2] = 1e6  # half of them
    assert not center_of(codes).any()
    assert torch.equal(center_of(torch.full((1, 3), 7.0)), torch.full((3,), 7.0))
    assert len(set(sample_of(40, torch.device("cpu")).tolist())) == 32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_types_of_vectors(dtype):
    x, codes = torch.randn(100, 8).to(dtype), torch.randn(40, 8)
    assert_closest(nearest(x, codes), x, codes)
    # Half-precision vectors are searched in float32, as if they had come so.
    wide = torch.promote_types(dtype, torch.float32)
    assert torch.equal(nearest(x, codes), nearest(x.to(wide), codes.to(wide)))
    assert_closest(nearest(x, codes.to(dtype)), x, codes.to(dtype))


def test_autocast_does_not_lower_the_precision():
    x, codes = torch.randn(200, 32), torch.randn(100, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        index = nearest(x, codes)
    assert torch.equal(index, nearest(x, codes))


def test_layouts():
    x, codes = torch.randn(30, 6), torch.randn(20, 6)
    expected = nearest(x, codes)
    for vectors in (x.T.contiguous().T, x.repeat_interleave(2, 0)[::2], torch.stack([x, x], 2)[..., 0]):
        for rows in (codes.T.contiguous().T, codes.repeat_interleave(3, 0)[::3]):
            assert torch.equal(nearest(vectors, rows), expected)


# Duplicated codes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("metric", METRICS)
def test_of_codes_that_are_the_same_the_first_wins(metric, dtype):
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        n, k, d = (int(torch.randint(1, high, (), generator=generator)) for high in (50, 60, 80))
        x = torch.randn(n, d, generator=generator, dtype=dtype)
        codes = torch.randn(k, d, generator=generator, dtype=dtype).repeat(3, 1)
        assert (nearest(x, codes, metric) < k).all(), (n, k, d)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("columns", [40, 61])
def test_of_the_same_codes_in_different_blocks_the_first_wins(monkeypatch, columns, dtype):
    # Blocks of few codes, whose last is narrower than the others: copies lie more than one block apart.
    monkeypatch.setattr(module, "ROWS", 32)
    monkeypatch.setattr(module, "BLOCK", 32 * columns)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(100, 40, generator=generator, dtype=dtype)
    codes = torch.randn(107, 40, generator=generator, dtype=dtype)
    index = nearest(x, codes.repeat(2, 1))
    assert (index < 107).all()
    assert_closest(index, x, codes)


# Odd vectors


def test_no_vectors():
    for metric in METRICS:
        index = nearest(torch.zeros(0, 4), torch.randn(3, 4), metric)
        assert index.shape == (0,)
        assert index.dtype == torch.int64


@pytest.mark.parametrize("metric", METRICS)
def test_a_vector_with_nan_or_infinity_gets_a_valid_index_and_disturbs_no_other(metric):
    x, codes = torch.randn(12, 3), torch.randn(70, 3)
    expected = nearest(x, codes, metric)
    odd = x.clone()
    odd[1] = NAN
    odd[3, 0] = NAN
    odd[5] = INF
    odd[7, 2] = -INF
    odd[9] = torch.tensor([INF, -INF, NAN])
    index = nearest(odd, codes, metric)
    assert ((index >= 0) & (index < 70)).all()
    assert torch.equal(index[::2], expected[::2])
    alone = nearest(odd, codes[:1], metric)
    assert alone.tolist() == [0] * 12


def test_gives_no_gradient():
    assert not nearest(torch.randn(3, 2, requires_grad=True), torch.randn(4, 2, requires_grad=True)).requires_grad


# Memory


def test_no_n_by_k_tensor_exists(run_with_gauge):
    # The matrix of scores would take 2 GiB; no single step of the way may come near it.
    run_with_gauge("""
        from topovq.ops.search import nearest
        x, codes = torch.randn(8192, 64), torch.randn(65536, 64)
        nearest(x[:2], codes[:2])
        start_gauge()
        index = nearest(x, codes)
        assert growth() < 1024, f"{growth():.0f} MiB"
        some = torch.arange(0, 8192, 1024)
        assert torch.equal(index[some], torch.cdist(x[some].double(), codes.double()).argmin(1))
    """)


# Refusals


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="metric='manhattan' is unknown; choose one of 'euclidean', 'dot', 'cosine'"):
        nearest(torch.zeros(1, 2), torch.zeros(1, 2), "manhattan")
    with pytest.raises(ValueError, match=r"vectors of shape \(3, 2\) and codes of shape \(4, 5\) do not fit"):
        nearest(torch.zeros(3, 2), torch.zeros(4, 5))
    with pytest.raises(ValueError, match=r"vectors of shape \(2,\)"):
        nearest(torch.zeros(2), torch.zeros(4, 2))
    with pytest.raises(ValueError, match="there are no codes"):
        nearest(torch.zeros(3, 2), torch.zeros(0, 2))
