import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from topovq.tokenizer.data.order import AUGMENTATION, ORDER, epoch_order, order_slice, random_words


def test_order_is_fixed_for_ever():
    # A resumed run depends on these very numbers: they may not change with a version of numpy or of this library.
    assert epoch_order(8, 0, 0).tolist() == [7, 2, 0, 4, 3, 5, 6, 1]
    assert epoch_order(8, 7, 3).tolist() == [4, 3, 6, 1, 5, 2, 7, 0]


def test_slice_goes_on_into_the_next_epoch():
    first, second = epoch_order(5, 1, 0).tolist(), epoch_order(5, 1, 1).tolist()
    assert order_slice(5, 1, 3, 4).tolist() == first[3:] + second[:2]


def test_slice_longer_than_an_epoch():
    assert np.bincount(order_slice(3, 2, 0, 9)).tolist() == [3, 3, 3]


@given(n=st.integers(1, 40), seed=st.integers(0, 2**63), start=st.integers(0, 200), size=st.integers(1, 60))
def test_batches_are_pieces_of_one_sequence(n, seed, start, size):
    together = order_slice(n, seed, start, 2 * size)
    assert order_slice(n, seed, start, size).tolist() == together[:size].tolist()
    assert order_slice(n, seed, start + size, size).tolist() == together[size:].tolist()


@pytest.mark.parametrize("epoch", [0, 1, 10**12])
def test_an_epoch_is_a_permutation(epoch):
    assert sorted(epoch_order(100, 3, epoch).tolist()) == list(range(100))


def test_epochs_seeds_and_streams_differ():
    orders = [epoch_order(50, seed, epoch).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    assert random_words(0, ORDER, 5, 4).tolist() != random_words(0, AUGMENTATION, 5, 4).tolist()


def test_an_order_cannot_be_changed_by_its_user():
    with pytest.raises(ValueError, match="read-only"):
        epoch_order(4, 0, 0)[0] = 1
