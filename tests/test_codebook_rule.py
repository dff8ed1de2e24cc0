"""The mini-batch rule against answers worked out by hand, then against EMA-VQ and K-means, and what a batch may be.

By hand: decay = 0.75, beta = 0.25, eps = 0.25 (large, so that it shows).
LINE: codes 0, 2, 6; vectors -1, 1.5, 2.5, 8 chose 0, 1, 1, 2, so S = -1, 4, 8 and c = 1, 2, 1.
SQUARE: codes (0,0), (4,0), (0,4), (4,4); (0,1) and (1,0) chose 0, (5,4) chose 3: S_0 = (1,1), c_0 = 2, S_3 = (5,4),
c_3 = 1. Codes 1 and 2 were chosen by nothing.
m starts at the codes and N at count_init. The weights of A are those in test_rules.py; tau = 0.1.
"""

import pytest
import torch
from books import (
    LINE,
    LINE_INDEX,
    LINE_X,
    SQUARE,
    SQUARE_INDEX,
    SQUARE_X,
    assert_state,
    assert_values,
    book_of,
    double,
    learn,
    state_of,
)
from hypothesis import given
from hypothesis import strategies as st

from topovq.codebook import Codebook
from topovq.grid import Grid
from topovq.neighborhood import NEIGHBORHOODS, Neighborhood

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
