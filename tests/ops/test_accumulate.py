import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from topovq.ops import accumulate as module
from topovq.ops.accumulate import accumulate, accumulate_reference


def test_by_hand():
    x = torch.tensor([[1.0, 10.0], [2.0, 20.0], [4.0, 40.0], [8.0, 80.0]])
    sums, counts = accumulate(x, torch.tensor([2, 0, 2, -1]), 4)
    assert sums.tolist() == [[2, 20], [0, 0], [5, 50], [0, 0]]
    assert counts.tolist() == [1, 0, 2, 0]
    assert sums.dtype == counts.dtype == torch.float32


def test_a_vector_left_out_may_hold_anything():
    x = torch.tensor([[1.0], [float("nan")], [float("inf")], [2.0]])
    sums, counts = accumulate(x, torch.tensor([0, -1, -1, 1]), 2)
    assert sums.tolist() == [[1], [2]]
    assert counts.tolist() == [1, 1]


def test_nothing_to_add():
    sums, counts = accumulate(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64), 2)
    assert sums.tolist() == [[0, 0, 0], [0, 0, 0]]
    assert counts.tolist() == [0, 0]
    sums, counts = accumulate(torch.ones(4, 3), torch.full((4,), -1), 2)
    assert sums.tolist() == [[0, 0, 0], [0, 0, 0]]
    assert counts.tolist() == [0, 0]


@given(st.integers(0, 200), st.integers(1, 50), st.integers(1, 20), st.integers(0, 2**16))
def test_against_one_hots_in_float64(n, k, d, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=generator)
    index = torch.randint(-1, k, (n,), generator=generator)
    exact_sums, exact_counts = accumulate_reference(x.double(), index, k)
    magnitude = accumulate_reference(x.double().abs(), index, k)[0]
    for values, roundings in ((x, n * 2**-24), (x.double(), n * 2**-53)):
        sums, counts = accumulate(values, index, k)
        assert sums.dtype == values.dtype
        assert ((sums - exact_sums).abs() <= roundings * magnitude).all()
        assert torch.equal(counts.double(), exact_counts)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_added_up_in_float32(dtype):
    # In bfloat16 256 + 1 = 256, in float16 2048 + 1 = 2048.
    sums, counts = accumulate(torch.ones(5000, 2, dtype=dtype), torch.zeros(5000, dtype=torch.int64), 1)
    assert sums.dtype == counts.dtype == torch.float32
    assert sums.tolist() == [[5000, 5000]]
    assert counts.tolist() == [5000]


def test_layouts_and_index_types():
    x, index = torch.randn(6, 4), torch.tensor([0, 1, 1, -1, 2, 0])
    expected = accumulate(x, index, 3)
    for vectors in (x.T.contiguous().T, torch.stack([x, x], 2)[..., 0], x.repeat_interleave(2, 0)[::2]):
        assert not vectors.is_contiguous()
        for indices in (index, index.int(), index.repeat_interleave(2)[::2]):
            for actual, wanted in zip(accumulate(vectors, indices, 3), expected):
                assert torch.equal(actual, wanted)


def test_blocks_give_the_same_sums(monkeypatch):
    x, index = torch.randn(1000, 3), torch.randint(-1, 7, (1000,))
    whole = accumulate(x, index, 7)
    monkeypatch.setattr(module, "ROWS", 64)
    for actual, wanted in zip(accumulate(x, index, 7), whole):
        assert torch.equal(actual, wanted)


def test_repeats_bit_for_bit():
    x, index = torch.randn(20_000, 8), torch.randint(-1, 5, (20_000,))
    first = accumulate(x, index, 5)
    for _ in range(3):
        for actual, wanted in zip(accumulate(x, index, 5), first):
            assert torch.equal(actual, wanted)


def test_gives_no_gradient():
    sums, _ = accumulate(torch.randn(3, 2, requires_grad=True), torch.tensor([0, 1, 0]), 2)
    assert not sums.requires_grad


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"vectors of shape \(3, 2\) and indices of shape \(4,\) do not fit"):
        accumulate(torch.zeros(3, 2), torch.zeros(4, dtype=torch.int64), 2)
    with pytest.raises(ValueError, match=r"shape \(3,\).*expected \[N, D\] and \[N\]"):
        accumulate(torch.zeros(3), torch.zeros(3, dtype=torch.int64), 2)
