"""What a codebook promises beside its rule: freezing, starting, accumulating, precision, figures, state."""

import pytest
import torch
from books import (
    assert_state,
    book_of,
    learn,
    state_of,
)

from topovq.codebook import Codebook
from topovq.grid import Grid
from topovq.neighborhood import Neighborhood
from topovq.ops.search import nearest_reference

# Freezing, setting


@pytest.mark.parametrize("kind", ["none", "hard"])
def test_frozen_codes_stay_and_the_others_move_as_ever(kind):
    x, index = torch.randn(40, 3), torch.arange(40) % 6
    codes = torch.randn(6, 3)
    book, free = book_of(codes, kind, 2, 3), book_of(codes, kind, 2, 3)
    book.frozen[torch.tensor([1, 4])] = True
    before = state_of(book)
    for each in (book, free):
        learn(each, x, index)
    frozen = [1, 4]
    moving = [0, 2, 3, 5]
    for name in ("codes", "sums", "counts"):
        assert torch.equal(book.state_dict()[name][frozen], before[name][frozen])
        assert torch.equal(book.state_dict()[name][moving], free.state_dict()[name][moving])
    assert not torch.equal(book.codes[moving], before["codes"][moving])
    assert torch.equal(book.hits, free.hits)  # they are still chosen


@pytest.mark.parametrize("count_init", [0.0, 1.0, 4.0])
def test_set_codes_brings_the_statistics_along(count_init):
    book = book_of(torch.randn(6, 3), "none", 2, 3, update_empty=False, count_init=count_init)
    learn(book, torch.randn(40, 3), torch.arange(40) % 6)
    codes = torch.randn(6, 3)
    book.set_codes(codes)
    assert torch.equal(book.codes, codes)
    torch.testing.assert_close(book.sums, book.codes * book.counts[:, None])
    assert (book.counts > 0).all()
    # Vectors that lie on the codes do not move them: the next step does not undo what was set.
    learn(book, codes, torch.arange(6))
    torch.testing.assert_close(book.codes, codes)


def test_set_codes_refuses_another_shape():
    book = book_of(torch.randn(6, 3), "none")
    with pytest.raises(ValueError, match=r"codes of shape \(3, 6\) do not fit: expected \(6, 3\)"):
        book.set_codes(torch.randn(3, 6))


def test_set_codes_of_a_cosine_codebook_have_length_1():
    book = book_of(torch.randn(6, 3), "none", metric="cosine")
    book.set_codes(torch.tensor([[3.0, 0.0, 4.0]]).repeat(6, 1))
    torch.testing.assert_close(book.codes, torch.tensor([[0.6, 0.0, 0.8]]).repeat(6, 1))
    torch.testing.assert_close(book.sums, book.codes * book.counts[:, None])


# Starting from data


def started(x: torch.Tensor, valid: torch.Tensor | None = None, size: int = 6, **options) -> Codebook:
    book = Codebook(x.shape[1], Neighborhood("none", Grid(size)), kmeans_init=True, **options)
    assert not book.is_initialized
    torch.manual_seed(1)
    book.initialize(x, torch.ones(len(x), dtype=torch.bool) if valid is None else valid)
    assert book.is_initialized
    assert book.initialized.item()
    return book


def test_without_iterations_codes_are_different_vectors_of_the_batch():
    x = torch.randn(50, 2)
    codes = started(x, kmeans_iters=0).codes
    chosen = (codes[:, None] == x[None]).all(2)
    assert (chosen.sum(1) == 1).all()
    assert len(chosen.int().argmax(1).unique()) == 6


def test_codes_repeat_only_where_vectors_are_few():
    x = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    codes = started(x, kmeans_iters=0, size=6).codes.flatten().tolist()
    assert set(codes) == {1, 2, 3, 4}
    assert max(codes.count(value) for value in codes) == 2


def test_iterations_are_those_of_kmeans():
    x = torch.randn(60, 2)
    drawn = started(x, kmeans_iters=0).codes
    expected = drawn.clone()
    for _ in range(3):
        index = nearest_reference(x, expected)
        expected = torch.stack([x[index == k].mean(0) for k in range(6)])
    book = started(x, kmeans_iters=3)
    torch.testing.assert_close(book.codes, expected)
    # Sums and counts are on one scale, and learning goes on from here.
    torch.testing.assert_close(book.sums, book.codes * book.counts[:, None])
    assert (book.counts == 1).all()


def test_an_empty_batch_does_not_start_codes():
    book = Codebook(3, Neighborhood("none", Grid(6)), kmeans_init=True)
    before = state_of(book)
    book.initialize(torch.empty(0, 3), torch.empty(0, dtype=torch.bool))
    assert_state(book, before)
    assert not book.is_initialized


def test_frozen_codes_are_not_started():
    book = Codebook(3, Neighborhood("none", Grid(6)), kmeans_init=True)
    book.frozen[:2] = True
    before = book.codes.clone()
    x = torch.randn(40, 3)
    book.initialize(x, torch.ones(40, dtype=torch.bool))
    assert (book.codes == before).all(1).tolist() == [True, True, False, False, False, False]
    assert torch.equal(book.sums, book.codes * book.counts[:, None])


@pytest.mark.parametrize("learnable", [True, False])
def test_codes_that_were_set_to_be_frozen_leave_the_others_their_start(learnable):
    book = Codebook(3, Neighborhood("none", Grid(6)), kmeans_init=True, learnable=learnable, ema_update=not learnable)
    with torch.no_grad():
        book.codes[:2] = 7.0
    book.frozen[:2] = True
    book.initialize(torch.full((40, 3), 50.0), torch.ones(40, dtype=torch.bool))
    assert book.codes[:, 0].tolist() == [7, 7, 50, 50, 50, 50]


def test_invalid_vectors_do_not_start_codes():
    x = torch.randn(20, 2)
    valid = torch.arange(20) % 3 == 0
    x[~valid] = float("nan")
    assert started(x, valid, kmeans_iters=2).codes.isfinite().all()
    codes = started(x, valid, kmeans_iters=0).codes
    assert (codes[:, None] == x[valid][None]).all(2).any(1).all()


# A decay of 1


@pytest.mark.parametrize("kind", ["none", "hard"])
@pytest.mark.parametrize("count_init", [0.0, 1.0])
def test_a_decay_of_one_keeps_the_codes_and_follows_their_use(kind, count_init):
    codes = torch.randn(6, 3)
    book = book_of(codes, kind, 2, 3, decay=1.0, count_init=count_init)
    book.counts.copy_(torch.arange(6.0))  # smoothing them would move the codes
    for _ in range(3):
        learn(book, torch.randn(40, 3), torch.arange(40) % 2)
    assert torch.equal(book.codes, codes)
    assert torch.equal(book.sums, codes)
    assert book.counts.tolist() == [0, 1, 2, 3, 4, 5]
    assert book.step.item() == 3
    assert book.usage().item() == pytest.approx(2 / 6)
    assert book.perplexity().item() == pytest.approx(2)
    assert book.read_health()[4].item() == pytest.approx(40 * (1 + 0.99 + 0.99**2), rel=1e-5)


def test_with_a_decay_of_one_codes_may_start_from_data():
    x = torch.randn(50, 2)
    book = started(x, kmeans_iters=0, decay=1.0)
    codes = book.codes.clone()
    assert (codes[:, None] == x[None]).all(2).any(1).all()
    learn(book, x, book.search(x))
    assert torch.equal(book.codes, codes)


# Accumulating


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("kind", ["none", "hard"])
def test_accumulated_updates_are_one_large_batch(kind, dtype, tolerance):
    x, index = torch.randn(60, 3, dtype=dtype), torch.arange(60) % 6
    codes = torch.randn(6, 3, dtype=dtype)
    parts, whole = book_of(codes, kind, 2, 3), book_of(codes, kind, 2, 3)
    for _ in range(2):  # the second time shows that nothing is left over
        before = state_of(parts)
        with parts.accumulate_updates():
            learn(parts, x[:20], index[:20])
            learn(parts, x[20:40], index[20:40], skipped=3)
            assert_state(parts, before | {"pending": parts.pending})
        learn(parts, x[40:], index[40:])
        learn(whole, x, index, skipped=3)
        for name, value in whole.state_dict().items():
            torch.testing.assert_close(parts.state_dict()[name], value, rtol=tolerance, atol=tolerance)
    assert parts.step.item() == 2
    assert parts.skipped.item() == 6


def test_a_last_batch_of_nothing_still_learns_from_what_was_accumulated():
    x, codes = torch.randn(20, 3), torch.randn(6, 3)
    parts, whole = book_of(codes, "hard", 2, 3), book_of(codes, "hard", 2, 3)
    with parts.accumulate_updates():
        learn(parts, x, torch.arange(20) % 6)
    learn(parts, x, torch.full((20,), -1))
    learn(whole, x, torch.arange(20) % 6)
    torch.testing.assert_close(parts.codes, whole.codes)
    assert parts.step.item() == 1


# Precision and memory


@pytest.mark.parametrize("convert", ["half", "bfloat16"])
def test_half_precision_leaves_the_state_as_it_is(convert):
    book = book_of(torch.randn(6, 3), "hard", 2, 3)
    learn(book, torch.randn(40, 3), torch.arange(40) % 6)
    before = state_of(book)
    assert getattr(book, convert)() is book
    assert_state(book, before)
    assert_state(book.to(getattr(torch, {"half": "float16"}.get(convert, convert))), before)
    for name, value in book.state_dict().items():
        expected = {"step": torch.int64, "skipped": torch.int64, "frozen": torch.bool, "initialized": torch.bool}
        expected |= {"grid_shape": torch.int64, "idle": torch.int32}
        assert value.dtype == expected.get(name, torch.float32), name


def test_double_and_back():
    book = book_of(torch.randn(6, 3), "hard", 2, 3).double()
    for name in ("codes", "sums", "counts", "hits"):
        assert getattr(book, name).dtype == torch.float64
    assert book.step.dtype == torch.int64
    learn(book, torch.randn(40, 3, dtype=torch.float64), torch.arange(40) % 6)
    assert book.codes.dtype == torch.float64
    assert book.float().codes.dtype == torch.float32


def test_slow_averages_do_not_stall_in_bfloat16():
    # Every code is chosen twice per batch: N = 2 - 0.999^t, by steps of 0.001 that bfloat16 would round away.
    book = book_of(torch.zeros(8, 2), "none", decay=0.999, eps=1e-5).bfloat16()
    x = torch.ones(16, 2, dtype=torch.bfloat16)
    for _ in range(100):
        learn(book, x, torch.arange(16) % 8)
    # 0.999^100 = 0.9047921471; m = 2 * (1 - 0.999^100), w = m / N
    torch.testing.assert_close(book.counts, torch.full((8,), 1.0952078529))
    torch.testing.assert_close(book.codes, torch.full((8, 2), 0.1738626191))


def test_no_code_is_lost_in_bfloat16():
    # The same vectors, as bfloat16 to one and as float32 to the other: the same codes, bit for bit, all in use.
    torch.manual_seed(0)
    codes = torch.randn(64, 4)
    low = book_of(codes, "hard", 8, 8, decay=0.999, eps=1e-5).bfloat16()
    full = book_of(codes, "hard", 8, 8, decay=0.999, eps=1e-5)
    for _ in range(100):
        x = torch.randn(256, 4).bfloat16()
        learn(low, x, low.search(x))
        learn(full, x.float(), full.search(x.float()))
    assert_state(low, state_of(full))
    assert low.usage().item() == 1


def test_addresses_never_change():
    book = Codebook(3, Neighborhood("gaussian", Grid((2, 3))), kmeans_init=True, dead_threshold=0.5)
    addresses = {name: value.data_ptr() for name, value in book.state_dict().items()}
    x, valid = torch.randn(40, 3), torch.ones(40, dtype=torch.bool)
    book.initialize(x, valid)
    for _ in range(3):
        with book.accumulate_updates():
            learn(book, x, book.search(x))
        learn(book, x, book.search(x))
        book.revive(x, valid)
    book.set_codes(torch.randn(6, 3))
    assert {name: value.data_ptr() for name, value in book.state_dict().items()} == addresses


# Figures


def test_perplexity_and_usage():
    book = book_of(torch.zeros(4, 1), "none", decay=0.5)
    assert book.perplexity().item() == 1
    assert book.usage().item() == 0
    # One batch of counts 1, 1, 2, 0: p = 1/4, 1/4, 1/2, so 2^1.5; three of four codes in use.
    learn(book, torch.zeros(4, 1), [0, 1, 2, 2])
    assert book.hits.tolist() == [0.5, 0.5, 1, 0]
    assert book.perplexity().item() == pytest.approx(2.8284271, rel=1e-6)
    assert book.usage().item() == 0.75
    # A code counts as used in the 1 / (1 - decay) = 2 updates from the one that chose it, however often it did.
    used = []
    for _ in range(3):
        learn(book, torch.zeros(1, 1), [3])
        used.append(book.usage().item())
    assert used == [1, 0.25, 0.25]


def test_usage_without_memory_is_that_of_the_last_batch():
    book = book_of(torch.zeros(4, 1), "none", decay=0.0)
    learn(book, torch.zeros(4, 1), [0, 1, 2, 2])
    assert book.usage().item() == 0.75
    learn(book, torch.zeros(1, 1), [3])
    assert book.usage().item() == 0.25


# State


def test_state_survives_saving():
    book = Codebook(3, Neighborhood("hard", Grid((2, 3))), kmeans_init=True)
    x = torch.randn(40, 3)
    book.initialize(x, torch.ones(40, dtype=torch.bool))
    learn(book, x, book.search(x))
    again = Codebook(3, Neighborhood("hard", Grid((2, 3))), kmeans_init=True)
    again.load_state_dict(book.state_dict())
    assert again.is_initialized  # it will not start anew from its next batch
    assert_state(again, book.state_dict())
    for each in (book, again):
        learn(each, x, torch.arange(40) % 6)
    assert_state(again, book.state_dict())


def test_codes_do_not_change_their_places_unnoticed():
    state = Codebook(3, Neighborhood("hard", Grid((2, 6)))).state_dict()
    other = Codebook(3, Neighborhood("hard", Grid((3, 4))))
    before = state_of(other)
    with pytest.raises(
        RuntimeError, match=r"map of shape \(2, 6\), this codebook's is \(3, 4\): build it with grid=\(2, 6\)"
    ):
        other.load_state_dict(state)
    assert torch.equal(other.grid_shape, before["grid_shape"])
    Codebook(3, Neighborhood("none", Grid(12))).load_state_dict(state)  # where places mean nothing
    del state["grid_shape"]  # as other libraries, and states from before it was stored, have it
    other.load_state_dict(state)
    assert torch.equal(other.codes, state["codes"])
    assert other.grid_shape.tolist() == [3, 4]
    assert "grid_shape" not in state


def test_a_map_whose_last_row_is_partly_empty_is_kept_too():
    state = Codebook(3, Neighborhood("hard", Grid.balanced(11))).state_dict()
    assert state["grid_shape"].tolist() == [3, 4]
    assert state["codes"].shape == (11, 3)
    Codebook(3, Neighborhood("hard", Grid((3, 4), size=11))).load_state_dict(state)
    with pytest.raises(
        RuntimeError, match=r"this codebook's is \(2, 6\): build it with grid=Grid\(\(3, 4\), size=11\)"
    ):
        Codebook(3, Neighborhood("hard", Grid((2, 6), size=11))).load_state_dict(state)
    # A codebook without a neighborhood had a line of places where its size has no balanced shape.
    state["grid_shape"] = torch.tensor([11])
    book = Codebook(3, Neighborhood("none", Grid.balanced(11)))
    book.load_state_dict(state)
    assert torch.equal(book.codes, state["codes"])


def test_parameters_are_moved_by_their_optimizer_alone():
    book = Codebook(3, Neighborhood("hard", Grid((2, 3))), learnable=True)
    before = book.codes.detach().clone()
    learn(book, torch.randn(40, 3), torch.arange(40) % 6)
    assert torch.equal(book.codes, before)
    assert isinstance(book.codes, torch.nn.Parameter)
    assert book.step.item() == 1
    assert book.usage().item() == 1


def test_a_batch_of_nothing_changes_nothing_where_codes_are_parameters():
    book = Codebook(3, Neighborhood("hard", Grid((2, 3))), learnable=True)
    learn(book, torch.randn(40, 3), torch.arange(40) % 6)
    before = state_of(book)
    learn(book, torch.randn(40, 3), [-1] * 40)
    assert_state(book, before)


# Refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decay": 1.01}, r"decay=1.01 must be from 0 to 1"),
        ({"decay": float("nan")}, r"decay=nan must be from 0 to 1"),
        ({"decay": -0.1}, r"decay=-0.1"),
        ({"eps": 0.0}, r"eps=0.0 must be above 0"),
        ({"count_init": -1.0}, r"count_init=-1.0 must be at least 0"),
        ({"count_smoothing": "both"}, r"count_smoothing='both' is unknown; choose one of 'carried', 'copy'"),
        (
            {"dead_threshold": -0.1},
            r"threshold_ema_dead_code=-0.1 must be 0 .*share of the mean .*, or a count",
        ),
        ({"dead_threshold": float("nan")}, r"threshold_ema_dead_code=nan must be 0"),
        ({"dead_threshold": float("inf")}, r"threshold_ema_dead_code=inf must be 0"),
        ({"dead_threshold": 2, "decay": 1.0}, r"threshold_ema_dead_code=2 needs running counts.*decay=1"),
        ({"dead_threshold": 0.1, "learnable": True}, r"threshold_ema_dead_code=0.1 needs running counts"),
        ({"dead_threshold": 0.1, "ema_update": False}, r"threshold_ema_dead_code=0.1 needs running counts"),
        ({"eps": float("nan")}, r"eps=nan must be above 0"),
        ({"count_init": float("nan")}, r"count_init=nan must be at least 0"),
        ({"kmeans_iters": -1}, r"kmeans_iters=-1 must be at least 0"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Codebook(3, Neighborhood("hard", Grid(6)), **options)
