"""Reviving codes: which ones, where they start anew, and what they get to prove themselves."""

import pytest
import torch
from books import assert_state, book_of, learn, state_of

from topovq import KohonenVQ
from topovq.codebook import Codebook
from topovq.grid import Grid
from topovq.neighborhood import Neighborhood


def revived_book(scale: float = 1.0, **options) -> tuple[Codebook, torch.Tensor]:
    """Counts 10, 0.5, 10, 9.5 times scale: their mean is 7.5 times scale, of which a tenth is 0.75."""
    book = book_of(torch.zeros(4, 2), "none", update_empty=False, dead_threshold=0.1, **options)
    for running in (book.counts, book.received):
        running.copy_(torch.tensor([10, 0.5, 10, 9.5]) * scale)
    return book, torch.arange(16.0).view(8, 2) + 1


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e5])
def test_revival_is_relative_to_the_mean_count(scale):
    book, x = revived_book(scale)
    before = state_of(book)
    book.revive(x, torch.ones(8, dtype=torch.bool))
    for name in ("codes", "sums", "counts"):
        assert torch.equal(book.state_dict()[name][[0, 2, 3]], before[name][[0, 2, 3]])
    # The code is a vector of the batch, its count the mean, its sum the one that goes with them.
    assert (x == book.codes[1]).all(1).any()
    assert book.counts[1].item() == pytest.approx(7.5 * scale)
    torch.testing.assert_close(book.sums[1] / book.counts[1], book.codes[1])


def test_a_revived_code_is_not_undone_by_the_next_update():
    book, x = revived_book()
    book.update_empty = True
    book.eps = 1e-5
    book.revive(x, torch.ones(8, dtype=torch.bool))
    revived = book.codes[1].clone()
    learn(book, x, torch.zeros(8, dtype=torch.int64))
    torch.testing.assert_close(book.codes[1], revived, rtol=1e-4, atol=0)
    # Chosen once, it goes a quarter of the way that the weights 0.75 * mean and 0.25 * 1 give.
    book, x = revived_book()
    book.revive(x, torch.ones(8, dtype=torch.bool))
    revived = book.codes[1].clone()
    learn(book, x[:1], [1])
    torch.testing.assert_close(book.codes[1], (0.75 * 7.5 * revived + 0.25 * x[0]) / (0.75 * 7.5 + 0.25))


def test_revival_takes_valid_vectors_and_leaves_frozen_codes():
    for _ in range(10):
        book, x = revived_book()
        valid = torch.arange(8) == 5
        x[~valid] = float("nan")
        book.revive(x, valid)
        assert torch.equal(book.codes[1], torch.tensor([11.0, 12.0]))
    for valid, frozen in ((torch.zeros(8, dtype=torch.bool), False), (torch.ones(8, dtype=torch.bool), True)):
        book, x = revived_book()
        book.frozen[1] = frozen
        before = state_of(book)
        book.revive(x, valid)
        assert_state(book, before)
    book, _ = revived_book()
    before = state_of(book)
    book.revive(torch.zeros(0, 2), torch.zeros(0, dtype=torch.bool))
    assert_state(book, before)


def test_two_dead_codes_start_at_different_vectors():
    book, x = revived_book()
    book.received.copy_(torch.tensor([0.0, 0.0, 10.0, 10.0]))
    book.revive(x, torch.ones(8, dtype=torch.bool))
    assert not torch.equal(book.codes[0], book.codes[1])


# By recent use, where empty codes keep their counts


def test_codes_that_once_lived_are_revived_where_empty_codes_keep_their_counts():
    vq = KohonenVQ(1, 4, neighborhood="none", update_empty=False, threshold_ema_dead_code=0.1, decay=0.5)
    vq.codebook = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    vq(torch.tensor([0.0, 1, 2, 3] * 4)[:, None])
    book = vq.codebook_of(0)
    kept = book.counts[3].item()
    revived = []
    for _ in range(8):
        assert book.counts[3].item() == kept  # as long as it is not revived
        vq(torch.tensor([0.0, 1, 2] * 4)[:, None])
        revived.append(vq.codebook[3].item() != 3)
        if revived[-1]:
            break
    # It received (1 + 4) / 2 = 2.5, then nothing: 2.5 / 2^t; the others tend from 2.5 to 4, with a mean of
    # (3 (4 - 1.5 / 2^t) + 2.5 / 2^t) / 4. A tenth of that is 0.295 for t = 3 and 0.298 for t = 4.
    assert revived == [False, False, False, True]
    assert vq.codebook[3].item() in (0, 1, 2)


def test_what_a_code_receives_from_its_neighbors_keeps_it_alive():
    book = book_of(torch.zeros(3, 1), "hard", update_empty=False, dead_threshold=0.3, decay=0.5)
    learn(book, torch.zeros(4, 1), [0] * 4)
    # At step 0 the strength is 1: the next place receives all 4, the one after that nothing.
    assert book.received.tolist() == [2.5, 2.5, 0.5]
    assert book.counts.tolist() == [2.5, 2.5, 1]
    learn(book, torch.zeros(1, 1), [-1])  # nothing changes
    assert book.received.tolist() == [2.5, 2.5, 0.5]
    book.revive(torch.ones(1, 1), torch.ones(1, dtype=torch.bool))
    assert book.codes.flatten().tolist() == [0, 0, 1]  # 0.5 is under 0.3 * 5.5 / 3
    assert book.received[2].item() == pytest.approx(5.5 / 3)
    assert book.counts[2].item() == 2  # the mean of 2.5, 2.5 and 1
    assert book.sums[2].item() == 2


def test_states_from_before_what_codes_receive_was_kept_load():
    around = Neighborhood("none", Grid(4))
    old, new = Codebook(2, around), Codebook(2, around, dead_threshold=0.1, update_empty=False)
    learn(old, torch.randn(8, 2), [0, 0, 0, 0, 1, 1, 2, 3])
    new.load_state_dict(old.state_dict())
    assert torch.equal(new.received, old.counts)
    new.received.fill_(7)
    again = Codebook(2, around, dead_threshold=0.1, update_empty=False)
    again.load_state_dict(new.state_dict())
    assert again.received.tolist() == [7] * 4
    old.load_state_dict(new.state_dict())  # which does not revive, and needs none


# An absolute threshold


def test_a_threshold_of_one_or_more_is_a_count_per_batch():
    vq = KohonenVQ(1, 3, neighborhood="none", threshold_ema_dead_code=2, decay=0.5)
    vq.codebook = torch.tensor([[0.0], [10.0], [20.0]])
    vq(torch.tensor([0.0] * 4 + [10.0] * 3)[:, None])
    # Counts (1 + 4) / 2, (1 + 3) / 2 and 1 / 2, of which eps takes and gives 1e-5: the third is under 2.
    book = vq.codebook_of(0)
    torch.testing.assert_close(book.counts[:2], torch.tensor([2.5, 2.0]), rtol=1e-4, atol=0)
    assert book.counts[2].item() == 2
    assert vq.codebook[2].item() in (0, 10)
    assert book.sums[2].item() == 2 * vq.codebook[2].item()


@pytest.mark.parametrize("threshold", [1.1, 1.7, 2.3])  # counts are 0.8 + 0.2 times an integer: none is equal
def test_the_absolute_threshold_is_that_of_vector_quantize_pytorch(threshold):
    torch.manual_seed(0)
    theirs = pytest.importorskip("vector_quantize_pytorch").VectorQuantize(
        4, 16, threshold_ema_dead_code=threshold, decay=0.8, rotation_trick=False
    )
    options = {"neighborhood": "none", "count_smoothing": "copy"}
    ours = KohonenVQ(4, 16, threshold_ema_dead_code=threshold, decay=0.8, **options)
    ours.codebook = theirs.codebook
    theirs._codebook.embed_avg.copy_(theirs._codebook.embed)
    x = torch.randn(64, 4)
    theirs(x[None])
    ours(x[None])
    book, counts = ours.codebook_of(0), theirs._codebook.cluster_size[0]
    torch.testing.assert_close(book.counts, counts)
    revived = counts == threshold
    assert 0 < revived.sum() < 16
    torch.testing.assert_close(ours.codebook[~revived], theirs.codebook[~revived])
    for code in ours.codebook[revived]:
        assert (x == code).all(1).any()
    torch.testing.assert_close(book.sums[revived], threshold * book.codes[revived])


def test_an_absolute_threshold_goes_by_recent_use_where_empty_codes_keep_their_counts():
    book = book_of(torch.zeros(2, 1), "none", update_empty=False, dead_threshold=2, decay=0.5)
    for index in ([0] * 8 + [1] * 8, [0] * 8, [0] * 8):
        learn(book, torch.zeros(len(index), 1), index)
    assert book.received.tolist() == [7.125, 1.125]  # 4.5; 6.25 and 2.25; then these
    assert book.counts.tolist() == [7.125, 4.5]
    book.revive(torch.ones(1, 1), torch.ones(1, dtype=torch.bool))
    assert book.codes.flatten().tolist() == [0, 1]
    assert book.received.tolist() == [7.125, 2]
    assert book.counts.tolist() == [7.125, 2]
