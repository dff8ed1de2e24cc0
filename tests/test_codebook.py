"""The mini-batch rule against answers worked out by hand, then against EMA-VQ and K-means, then its promises.

By hand: decay = 0.75, beta = 0.25, eps = 0.25 (large, so that it shows).
LINE: codes 0, 2, 6; vectors -1, 1.5, 2.5, 8 chose 0, 1, 1, 2, so S = -1, 4, 8 and c = 1, 2, 1.
SQUARE: codes (0,0), (4,0), (0,4), (4,4); (0,1) and (1,0) chose 0, (5,4) chose 3: S_0 = (1,1), c_0 = 2, S_3 = (5,4),
c_3 = 1. Codes 1 and 2 were chosen by nothing.
m starts at the codes and N at count_init. The weights of A are those in test_rules.py; tau = 0.1.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from topovq.codebook import Codebook
from topovq.grid import Grid
from topovq.neighborhood import NEIGHBORHOODS, Neighborhood
from topovq.ops.accumulate import accumulate
from topovq.ops.nearest import nearest_reference


def double(values: list) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def book_of(codes: torch.Tensor, kind: str, *shape: int, step: int = 0, **options) -> Codebook:
    """A codebook as it is at the start, but with these codes, in their type."""
    options = {"decay": 0.75, "eps": 0.25, **options}
    book = Codebook(codes.shape[1], Neighborhood(kind, Grid(shape or len(codes))), **options).to(codes.dtype)
    book.codes.copy_(codes)
    book.sums.copy_(codes)
    book.step.fill_(step)
    return book


def learn(book: Codebook, x: torch.Tensor, index: torch.Tensor | list[int], skipped: int = 0) -> None:
    """One update from vectors and the codes they chose (-1: left out)."""
    book.learn(*accumulate(x, torch.as_tensor(index), book.size), torch.tensor(skipped))


def state_of(book: Codebook) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in book.state_dict().items()}


def assert_state(book: Codebook, state: dict[str, torch.Tensor]) -> None:
    for name, value in book.state_dict().items():
        assert torch.equal(value, state[name]), name


def assert_values(actual: torch.Tensor, expected: list) -> None:
    torch.testing.assert_close(actual, double(expected).view_as(actual), rtol=0, atol=1e-9)


LINE, LINE_X, LINE_INDEX = double([[0], [2], [6]]), double([[-1], [1.5], [2.5], [8]]), [0, 1, 1, 2]
SQUARE, SQUARE_X = double([[0, 0], [4, 0], [0, 4], [4, 4]]), double([[0, 1], [1, 0], [5, 4]])
SQUARE_INDEX = [0, 0, 3]


# By hand: every neighborhood


@pytest.mark.parametrize(
    ("kind", "step", "codes", "counts"),
    [
        # EMA-VQ: m = 0.75 w + 0.25 S = -0.25, 2.5, 6.5; N = 0.75 + 0.25 c = 1, 1.25, 1, in all 3.25. Smoothed:
        # (N + 0.25) * 3.25 / (3.25 + 3 * 0.25) = 1.25, 1.5, 1.25 times 0.8125.
        ("none", 0, [-0.2461538462, 2.0512820513, 6.4], [1.015625, 1.21875, 1.015625]),
        # A^T S = 3, 11, 12 and A^T c = 3, 4, 3: m = 0.75, 4.25, 7.5; N = 1.5, 1.75, 1.5, in all 4.75; smoothed
        # 1.75, 2, 1.75 times 4.75 / 5.5.
        ("hard", 0, [0.4962406015, 2.4605263158, 4.962406015], [1.5113636364, 1.7272727273, 1.5113636364]),
        # A^T S = 1, 7.5, 10 and A^T c = 2, 3, 2: m = 0.25, 3.375, 7; N = 1.25, 1.5, 1.25, in all 4; smoothed
        # 1.5, 1.75, 1.5 times 4 / 4.75.
        ("hard", 10, [0.1979166667, 2.2901785714, 5.5416666667], [1.2631578947, 1.4736842105, 1.2631578947]),
        # With a = A(1), b = A(2): A^T S = -1 + 4a + 8b, 4 + 7a, 8 + 4a - b and A^T c = 1 + 2a + b, 2 + 2a, 1 + 2a + b.
        ("gaussian", 0, [0.1285478086, 2.2343356077, 5.7100390756], [1.2019708518, 1.4070352776, 1.2019708518]),
        ("gaussian", 10, [-0.1052947357, 2.124975268, 6.1289043483], [1.082616246, 1.2879381642, 1.082616246]),
        ("exponential", 0, [1.3816803397, 2.4041747954, 4.3398843527], [1.659066036, 1.6984894316, 1.659066036]),
        ("exponential", 10, [1.2079662591, 2.3806774666, 4.5241859807], [1.5806491537, 1.6519578452, 1.5806491537]),
    ],
)
def test_a_line(kind, step, codes, counts):
    book = book_of(LINE, kind, step=step)
    learn(book, LINE_X, LINE_INDEX)
    assert_values(book.codes, codes)
    assert_values(book.counts, counts)
    torch.testing.assert_close(book.sums, book.codes * book.counts[:, None])
    assert book.step.item() == step + 1


@pytest.mark.parametrize(
    ("kind", "step", "codes", "counts"),
    [
        # m = (0.25, 0.25), (3, 0), (0, 3), (4.25, 4); N = 1.25, 0.75, 0.75, 1, in all 3.75; smoothed 1.5, 1, 1, 1.25
        # times 3.75 / 4.75: the codes that nothing chose have drifted toward the origin.
        (
            "none",
            0,
            [[0.2111111111, 0.2111111111], [3.8, 0], [0, 3.8], [4.3066666667, 4.0533333333]],
            [1.1842105263, 0.7894736842, 0.7894736842, 0.9868421053],
        ),
        # Everything reaches everything: A^T S = (6, 5), A^T c = 3. m = 0.75 w + (1.5, 1.25); all N are 1.5, so that
        # smoothing changes nothing.
        ("hard", 0, [[1, 0.8333333333], [3, 0.8333333333], [1, 2.8333333333], [3, 2.8333333333]], [1.5] * 4),
        # A^T S = (3.5, 3), (3, 2.5), (3, 2.5), (5.5, 4.5); A^T c = 2.5, 1.5, 1.5, 2; N = 1.375, 1.125, 1.125, 1.25, in
        # all 4.875; smoothed 1.625, 1.375, 1.375, 1.5 times 4.875 / 5.875.
        (
            "hard",
            10,
            [
                [0.6489151874, 0.5562130178],
                [3.2867132867, 0.5477855478],
                [0.6573426573, 3.1771561772],
                [3.514957265, 3.3141025641],
            ],
            [1.3484042553, 1.1409574468, 1.1409574468, 1.2446808511],
        ),
        # With a = A(1), b = A(sqrt 2): A^T S = (1 + 5b, 1 + 4b), (6a, 5a), (6a, 5a), (5 + b, 4 + b) and
        # A^T c = 2 + b, 3a, 3a, 1 + 2b.
        (
            "gaussian",
            0,
            [
                [0.3353446514, 0.3082768386],
                [3.4159489878, 0.4422583708],
                [0.530710045, 3.3274973137],
                [3.9893961436, 3.7565792143],
            ],
            [1.2499650802, 1.0397752351, 1.0397752351, 1.0738050739],
        ),
        (
            "gaussian",
            10,
            [
                [0.2271002375, 0.2232897126],
                [3.6409100969, 0.1922975138],
                [0.2307570165, 3.6024505942],
                [4.2307183504, 3.9821204022],
            ],
            [1.2016480105, 0.8797259036, 0.8797259036, 1.0056398364],
        ),
        (
            "exponential",
            0,
            [
                [0.9126326358, 0.7642831559],
                [3.0465004392, 0.790803751],
                [0.9489645012, 2.888339689],
                [3.1131753517, 2.9389446687],
            ],
            [1.4629701529, 1.4302496304, 1.4302496304, 1.4348792974],
        ),
        (
            "exponential",
            10,
            [
                [0.8333818727, 0.7016613869],
                [3.0921214333, 0.748450021],
                [0.8981400252, 2.9424314291],
                [3.2204476971, 3.0390512059],
            ],
            [1.4303741593, 1.3673771295, 1.3673771295, 1.3781964486],
        ),
    ],
)
def test_a_square(kind, step, codes, counts):
    book = book_of(SQUARE, kind, 2, 2, step=step)
    learn(book, SQUARE_X, SQUARE_INDEX)
    assert_values(book.codes, codes)
    assert_values(book.counts, counts)


# By hand: count_init, update_empty, count_smoothing


@pytest.mark.parametrize(
    ("kind", "step", "codes", "counts"),
    [
        # Nothing is smoothed: w = m / N of the table above.
        ("none", 0, [-0.25, 2, 6.5], [1, 1.25, 1]),
        ("hard", 0, [0.5, 2.4285714286, 5], [1.5, 1.75, 1.5]),
        ("hard", 10, [0.2, 2.25, 5.6], [1.25, 1.5, 1.25]),
        ("gaussian", 0, [0.130002774, 2.1924136537, 5.7746680249], [1.1885186303, 1.4339397206, 1.1885186303]),
        ("gaussian", 10, [-0.1067605999, 2.0770311566, 6.2142280974], [1.0677515073, 1.3176676416, 1.0677515073]),
        ("exponential", 0, [1.3833184426, 2.3986258257, 4.3450296654], [1.6571013973, 1.702418709, 1.6571013973]),
        ("exponential", 10, [1.2108034049, 2.3700499441, 4.5348119192], [1.576945388, 1.6593653765, 1.576945388]),
    ],
)
def test_without_update_empty_nothing_is_smoothed(kind, step, codes, counts):
    book = book_of(LINE, kind, step=step, update_empty=False)
    learn(book, LINE_X, LINE_INDEX)
    assert_values(book.codes, codes)
    assert_values(book.counts, counts)


def test_without_update_empty_codes_that_receive_nothing_stay():
    # EMA-VQ: codes 1 and 2 receive nothing. m_0 = 0.25 (1, 1) over N = 1.25; m_3 = (4.25, 4) over N = 1.
    book = book_of(SQUARE, "none", 2, 2, update_empty=False)
    learn(book, SQUARE_X, SQUARE_INDEX)
    assert_values(book.codes, [[0.2, 0.2], [4, 0], [0, 4], [4.25, 4]])
    assert_values(book.sums, [[0.25, 0.25], [4, 0], [0, 4], [4.25, 4]])
    assert_values(book.counts, [1.25, 1, 1, 1])
    # hard on a line: -1 chose code 0, which reaches code 1 but not code 2. m = -0.25, 1.5 - 0.25, 6; N = 1.
    book = book_of(LINE, "hard", update_empty=False)
    learn(book, LINE_X[:1], [0])
    assert_values(book.codes, [-0.25, 1.25, 6])
    assert_values(book.counts, [1, 1, 1])


def test_with_update_empty_codes_that_receive_nothing_decay():
    # Two vectors, 1.5 and 2.5, chose code 1: m = 0, 2.5, 4.5; N = 0.75, 1.25, 0.75, in all 2.75; smoothed 1, 1.5, 1
    # times 2.75 / 3.5. Code 2 moves from 6 toward the origin.
    book = book_of(LINE, "none")
    learn(book, LINE_X[1:3], [1, 1])
    assert_values(book.codes, [0, 2.1212121212, 5.7272727273])
    assert_values(book.sums, [0, 2.5, 4.5])
    assert_values(book.counts, [0.7857142857, 1.1785714286, 0.7857142857])


@pytest.mark.parametrize(
    ("kind", "step", "update_empty", "codes", "counts"),
    [
        # m = 0.75 w + 0.25 A^T S as before, N = 0.25 A^T c: sums and counts that do not fit together throw codes far
        # out: the common fault. none: N = 0.25, 0.5, 0.25, smoothed 0.5, 0.75, 0.5 times 1 / 1.75.
        ("none", 0, True, [-0.875, 5.8333333333, 22.75], [0.2857142857, 0.4285714286, 0.2857142857]),
        ("hard", 0, True, [0.975, 4.42, 9.75], [0.7692307692, 0.9615384615, 0.7692307692]),
        ("hard", 10, True, [0.4761904762, 4.8214285714, 13.3333333333], [0.525, 0.7, 0.525]),
        ("gaussian", 0, True, [0.3322324417, 4.9834908764, 14.7576239976], [0.4650681256, 0.6308407299, 0.4650681256]),
        ("exponential", 0, True, [2.5181158798, 4.3166719273, 7.909450103], [0.9103230485, 0.9459754066, 0.9103230485]),
        ("none", 0, False, [-1, 5, 26], [0.25, 0.5, 0.25]),
        ("hard", 0, False, [1, 4.25, 10], [0.75, 1, 0.75]),
        ("hard", 10, False, [0.5, 4.5, 14], [0.5, 0.75, 0.5]),
        ("gaussian", 10, False, [-0.3587513793, 4.821195617, 20.881888097], [0.3177515073, 0.5676676416, 0.3177515073]),
        ("exponential", 10, False, [2.3089443061, 4.324750996, 8.6476699005], [0.826945388, 0.9093653765, 0.826945388]),
    ],
)
def test_count_init_0(kind, step, update_empty, codes, counts):
    book = book_of(LINE, kind, step=step, count_init=0, update_empty=update_empty)
    learn(book, LINE_X, LINE_INDEX)
    assert_values(book.codes, codes)
    assert_values(book.counts, counts)


def test_count_init_0_and_codes_that_receive_nothing():
    # Two vectors chose code 1: N = 0, 0.5, 0, smoothed 0.25, 0.75, 0.25 times 0.5 / 1.25; m = 0, 2.5, 4.5.
    book = book_of(LINE, "none", count_init=0)
    learn(book, LINE_X[1:3], [1, 1])
    assert_values(book.codes, [0, 8.3333333333, 45])
    # Without update_empty they keep code, sum and count.
    book = book_of(LINE, "none", count_init=0, update_empty=False)
    learn(book, LINE_X[1:3], [1, 1])
    assert_values(book.codes, [0, 5, 6])
    assert_values(book.sums, [0, 2.5, 6])
    assert_values(book.counts, [0, 0.5, 0])


@pytest.mark.parametrize(
    ("count_smoothing", "first", "codes", "second"),
    [
        # The first step is that of test_a_line. In the second, m = 0.75 m + 0.25 S = -0.4375, 2.875, 6.875, and:
        # carried: N = 0.75 (1.015625, 1.21875, 1.015625) + 0.25 c = 1.01171875, 1.4140625, 1.01171875, in all 3.4375;
        # smoothed 1.26171875, 1.6640625, 1.26171875 times 3.4375 / 4.1875.
        (
            "carried",
            [1.015625, 1.21875, 1.015625],
            [-0.4224036026, 2.1046521554, 6.6377708978],
            [1.0357392724, 1.3660214552, 1.0357392724],
        ),
        # copy: N = 0.75 (1, 1.25, 1) + 0.25 c = 1, 1.4375, 1, in all 3.4375; divided by 1.25, 1.6875, 1.25 times
        # 3.4375 / 4.1875, kept as it is.
        ("copy", [1, 1.25, 1], [-0.4263636364, 2.0754208754, 6.7], [1, 1.4375, 1]),
    ],
)
def test_count_smoothing(count_smoothing, first, codes, second):
    book = book_of(LINE, "none", count_smoothing=count_smoothing)
    learn(book, LINE_X, LINE_INDEX)
    assert_values(book.codes, [-0.2461538462, 2.0512820513, 6.4])  # the same for both
    assert_values(book.counts, first)
    learn(book, LINE_X, LINE_INDEX)
    assert_values(book.codes, codes)
    assert_values(book.counts, second)


def test_cosine_codes_keep_length_1():
    # Codes (1, 0) and (0, 1); (3/5, 4/5) chose code 1. m = (0, 0.75) + 0.25 (0.6, 0.8) = (0.15, 0.95), of length
    # sqrt(0.925); the count does not matter for the direction.
    book = book_of(double([[1, 0], [0, 1]]), "none", metric="cosine")
    learn(book, double([[0.6, 0.8]]), [1])
    assert_values(book.codes, [[1, 0], [0.1559625735, 0.9877629653]])


# EMA-VQ and K-means


@given(
    st.integers(1, 12),
    st.floats(0, 0.999),
    st.sampled_from([0.0, 1.0, 3.0]),
    st.booleans(),
    st.sampled_from(["carried", "copy"]),
    st.integers(0, 2**16),
)
def test_no_neighborhood_is_ema_vq(size, decay, count_init, update_empty, count_smoothing, seed):
    generator = torch.Generator().manual_seed(seed)
    options = {"count_init": count_init, "update_empty": update_empty, "count_smoothing": count_smoothing}
    codes = torch.randn(size, 3, generator=generator, dtype=torch.float64)
    book = book_of(codes, "none", decay=decay, eps=1e-5, **options)
    sums, counts = codes.clone(), torch.full((size,), count_init, dtype=torch.float64)
    for _ in range(3):
        x = torch.randn(20, 3, generator=generator, dtype=torch.float64)
        index = torch.randint(size, (20,), generator=generator)
        learn(book, x, index)
        for k in range(size):
            members = x[index == k]
            if update_empty or len(members):
                sums[k] = decay * sums[k] + (1 - decay) * members.sum(0)
                counts[k] = decay * counts[k] + (1 - decay) * len(members)
        divisor = counts
        if update_empty:
            divisor = (counts + 1e-5) / (counts.sum() + size * 1e-5) * counts.sum()
            counts = divisor if count_smoothing == "carried" else counts
        moved = sums / divisor[:, None]
        codes = moved if update_empty else torch.where((index.bincount(minlength=size) > 0)[:, None], moved, codes)
    torch.testing.assert_close(book.codes, codes, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(book.counts, counts, rtol=1e-9, atol=1e-12)


def test_without_memory_it_is_a_step_of_kmeans(lloyd_step):
    # decay = 0 forgets what was: w = S / c.
    x, codes, expected = lloyd_step
    book = book_of(codes, "none", decay=0.0, update_empty=False)
    learn(book, x, book.search(x))
    torch.testing.assert_close(book.codes, expected, rtol=0, atol=1e-10)


# What a batch may look like


@given(st.sampled_from(NEIGHBORHOODS), st.booleans(), st.integers(0, 2**16))
def test_the_order_of_a_batch_does_not_matter(kind, update_empty, seed):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    x, index = (
        torch.randn(40, 3, generator=generator, dtype=torch.float64),
        torch.randint(6, (40,), generator=generator),
    )
    order = torch.randperm(40, generator=generator)
    one, other = (book_of(codes, kind, 2, 3, update_empty=update_empty) for _ in range(2))
    learn(one, x, index)
    learn(other, x[order], index[order])
    for name, value in one.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], value, rtol=1e-10, atol=1e-12)


@given(st.sampled_from(NEIGHBORHOODS), st.booleans(), st.integers(0, 2**16))
def test_masking_is_removing(kind, update_empty, seed):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randn(6, 3, generator=generator)
    x, index = torch.randn(40, 3, generator=generator), torch.randint(-1, 6, (40,), generator=generator)
    kept = index >= 0
    x[~kept] = float("nan")
    masked, removed = (book_of(codes, kind, 2, 3, update_empty=update_empty) for _ in range(2))
    learn(masked, x, index)
    learn(removed, x[kept], index[kept])
    assert_state(masked, state_of(removed))
    assert masked.codes.isfinite().all()


@pytest.mark.parametrize("kind", NEIGHBORHOODS)
@pytest.mark.parametrize("update_empty", [True, False])
def test_a_batch_of_nothing_changes_nothing(kind, update_empty):
    book = book_of(torch.randn(6, 3), kind, 2, 3, update_empty=update_empty)
    learn(book, torch.randn(10, 3), torch.arange(10) % 6)
    before = state_of(book)
    learn(book, torch.full((5, 3), float("nan")), torch.full((5,), -1))
    learn(book, torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64))
    assert_state(book, before)


def test_skipped_vectors_are_counted_even_if_nothing_else_is_learned():
    book = book_of(torch.randn(6, 3), "hard", 2, 3)
    learn(book, torch.zeros(4, 3), [-1] * 4, skipped=4)
    learn(book, torch.zeros(4, 3), [-1, 0, 0, 0], skipped=1)
    assert book.skipped.item() == 5
    assert book.step.item() == 1


def test_repeats_bit_for_bit():
    def trained() -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        book = Codebook(4, Neighborhood("exponential", Grid((5, 6))), dead_threshold=0.2)
        for _ in range(10):
            x = torch.randn(200, 4)
            learn(book, x, book.search(x))
            book.revive(x, torch.ones(200, dtype=torch.bool))
        return book.state_dict()

    first, second = trained(), trained()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


# Freezing, reviving, setting


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


def revived_book(scale: float = 1.0, **options) -> tuple[Codebook, torch.Tensor]:
    """Counts 10, 0.5, 10, 9.5 times scale: their mean is 7.5 times scale, of which a tenth is 0.75."""
    book = book_of(torch.zeros(4, 2), "none", update_empty=False, dead_threshold=0.1, **options)
    book.counts.copy_(torch.tensor([10, 0.5, 10, 9.5]) * scale)
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
    book.counts.copy_(torch.tensor([0.0, 0.0, 10.0, 10.0]))
    book.revive(x, torch.ones(8, dtype=torch.bool))
    assert not torch.equal(book.codes[0], book.codes[1])


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


def test_invalid_vectors_do_not_start_codes():
    x = torch.randn(20, 2)
    valid = torch.arange(20) % 3 == 0
    x[~valid] = float("nan")
    assert started(x, valid, kmeans_iters=2).codes.isfinite().all()
    codes = started(x, valid, kmeans_iters=0).codes
    assert (codes[:, None] == x[valid][None]).all(2).any(1).all()


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
            assert_state(parts, before)
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
        expected["grid_shape"] = torch.int64
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
    # Chosen once, a code counts as used for 1 / (1 - decay) = 2 more updates, one chosen twice for one more than that.
    used = []
    for _ in range(4):
        learn(book, torch.zeros(1, 1), [3])
        used.append(book.usage().item())
    assert used == [1, 1, 0.5, 0.25]


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
        ({"decay": 1.0}, r"decay=1.0 must be at least 0 and below 1"),
        ({"decay": -0.1}, r"decay=-0.1"),
        ({"eps": 0.0}, r"eps=0.0 must be above 0"),
        ({"count_init": -1.0}, r"count_init=-1.0 must be at least 0"),
        ({"count_smoothing": "both"}, r"count_smoothing='both' is unknown; choose one of 'carried', 'copy'"),
        ({"dead_threshold": 2.0}, r"threshold_ema_dead_code=2.0 .*share of the mean"),
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
