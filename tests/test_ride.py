"""The recommended rule: codes with a mean of their own that ride along with their neighbors on the map."""

import math

import pytest
import torch
from books import LINE, LINE_INDEX, LINE_X, assert_state, double, learn, state_of
from torch import Tensor

from topovq import KohonenVQ
from topovq.codebook import Codebook
from topovq.grid import Grid
from topovq.metrics import topographic_error
from topovq.neighborhood import ENOUGH, GAIN, LONGEST_WAIT, PULL, PULL_SPAN, TRIES, WAIT, Neighborhood
from topovq.ops import ride as rides
from topovq.ops.use import NEVER

GRIDS = [
    Grid(40),
    Grid(40, wrap=True),
    Grid((5, 8)),
    Grid((5, 9), size=40),
    Grid((4, 10), wrap=(False, True)),
    Grid((4, 10), topology="hexagonal"),
    Grid((2, 4, 5)),
]


def book_on(grid: Grid, codes: Tensor, **options) -> Codebook:
    """A codebook that has its start, with these codes."""
    book = Codebook(codes.shape[1], Neighborhood("none", grid), ride=True, **{"decay": 0.75, **options}).to(codes.dtype)
    book.set_codes(codes)
    return book


# The rule


def test_a_line_by_hand():
    # decay 3/4 and t = 0: the pull is a quarter. Vectors -1 | 1.5, 2.5 | 8 are -1 | -0.5, 0.5 | 2 from codes 0, 2, 6.
    # Points at -1 and 3, so shares (3/4, 1/4), (1/2, 1/2), (1/4, 3/4): A is 5/8, 1/2, 3/8 | 1/2, 1/2, 1/2 | ...
    book = book_on(Grid(3), LINE)
    learn(book, LINE_X, LINE_INDEX)
    own, near, far = 5 / 8, 1 / 2, 3 / 8
    along = [
        0.3 * ((own * -1 + far * 2) + 0.25 * (2 * near * 2 + far * 6)) / (own + 2 * near + far),
        0.3 * ((near * -1 + near * 2) + 0.25 * (near * -2 + near * 4)) / (4 * near),
        0.3 * ((far * -1 + own * 2) + 0.25 * (far * -6 + 2 * near * -4)) / (own + 2 * near + far),
    ]
    counts = [1, 1.25, 1]
    means = [-0.25, 2, 6.5]  # (3/4 * 0 - 1/4) / 1, (3/4 * 2 + 1/4 * 4) / 1.25, (3/4 * 6 + 1/4 * 8) / 1
    expected = double([[mean + moved] for mean, moved in zip(means, along)])
    torch.testing.assert_close(book.codes, expected, rtol=1e-12, atol=0)
    assert book.counts.tolist() == counts
    torch.testing.assert_close(book.sums, expected * double(counts)[:, None], rtol=1e-12, atol=0)
    assert book.step.item() == 1


def hats(grid: Grid) -> Tensor:
    """P [K, points] by its definition."""
    shares = torch.ones(grid.size, 1, dtype=torch.float64)
    for position, axis, period in zip(grid.positions().T, rides.axes_of(grid), grid.periods):
        apart = (position[:, None] - axis.first - axis.spacing * torch.arange(axis.points)).abs()
        apart = torch.minimum(apart, period - apart)
        hat = (1 - apart / axis.spacing).clamp(min=0) if axis.points > 1 else torch.ones_like(apart)
        shares = (shares[:, :, None] * hat[:, None, :]).flatten(1)
    return shares


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_points_are_four_cells_apart_and_every_code_has_its_shares_in_them(grid):
    shares = hats(grid)
    torch.testing.assert_close(shares.sum(1), torch.ones(grid.size, dtype=torch.float64))
    assert (shares > 0).sum(1).max() <= 2**grid.ndim
    stats = torch.randn(grid.size, 3, dtype=torch.float64)
    torch.testing.assert_close(rides.through_points(stats, grid), shares @ shares.T @ stats)
    for axis in rides.axes_of(grid):
        assert axis.points == 1 or 2.6 < axis.spacing < 5.4


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_codes_move_by_the_weighted_mean_over_vectors(grid):
    torch.manual_seed(0)
    codes, x = torch.randn(40, 3).double(), torch.randn(70, 3).double()
    index = torch.randint(20, (70,))  # the other half of the codes is not chosen
    book = book_on(grid, codes, decay=0.9, dead_threshold=1e-9)
    book.step.fill_(1000)
    learn(book, x, index)
    pull = PULL * 0.1 / GAIN / math.sqrt(1 + 1000 / PULL_SPAN)
    shares = hats(grid)
    for k in range(40):
        share = shares[index] @ shares[k]
        moved = (x - codes[index]) + pull * (codes[index] - codes[k])
        along = GAIN * (share[:, None] * moved).sum(0) / max(share.sum().item(), ENOUGH)
        own = x[index == k]
        mean = (0.9 * codes[k] + 0.1 * own.sum(0)) / (0.9 + 0.1 * len(own))
        torch.testing.assert_close(book.codes[k], mean + along, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(book.sums, book.codes * book.counts[:, None])


def test_the_pull_is_a_share_of_a_codes_own_whatever_decay_is():
    for decay in (0.9, 0.99, 0.999):
        at = [rides.pull_at(torch.tensor(t), decay).item() for t in (0, 3 * PULL_SPAN)]
        assert at == pytest.approx([PULL * (1 - decay) / GAIN, PULL * (1 - decay) / GAIN / 2])
    assert rides.pull_at(torch.tensor(0), 0.0).item() == 1


def test_codes_of_length_one_keep_it():
    torch.manual_seed(0)
    unit = torch.nn.functional.normalize(torch.randn(90, 4), dim=1)
    book = book_on(Grid((5, 8)), torch.randn(40, 4), metric="cosine")
    learn(book, unit, book.search(unit))
    torch.testing.assert_close(book.codes.norm(dim=1), torch.ones(40))


def test_a_code_without_weight_near_it_stays_and_so_does_a_frozen_one():
    book = book_on(Grid(40), torch.arange(40.0)[:, None])
    book.frozen[3] = True
    before = state_of(book)
    learn(book, torch.full((1, 1), 5.0), [0])
    moved = (book.codes != before["codes"])[:, 0]
    # Code 0 has a share in the points at -0.5 and 3.5, and these give to places below 7.5.
    assert moved.tolist() == [k < 8 and k != 3 for k in range(40)]
    assert book.counts[3] == before["counts"][3]


def test_a_code_that_is_not_finite_harms_no_other_and_comes_back():
    torch.manual_seed(0)
    vq = KohonenVQ(4, 64)
    vq(torch.randn(256, 4))
    book = vq.codebook_of(0)
    book.codes[20], book.sums[20] = torch.nan, torch.nan
    vq(torch.randn(256, 4))
    assert book.codes.isfinite().all(1).tolist() == [k != 20 for k in range(64)]
    for _ in range(2 * WAIT + 50):
        vq(torch.randn(256, 4))
    assert book.codes.isfinite().all()
    assert book.sums.isfinite().all()


def test_nothing_moves_for_an_empty_batch():
    book = book_on(Grid(3), LINE)
    before = state_of(book)
    learn(book, LINE_X, [-1] * 4)
    assert_state(book, before)


@pytest.mark.parametrize("update_empty", [True, False])
def test_a_code_that_no_vector_chose_keeps_its_count_if_asked_but_rides(update_empty):
    book = book_on(Grid(3), LINE, update_empty=update_empty)
    learn(book, double([[1.0]]), [0])
    assert book.counts.tolist() == [1, *[0.75 if update_empty else 1] * 2]
    assert (book.codes != LINE).all()
    torch.testing.assert_close(book.sums, book.codes * book.counts[:, None])


def test_a_code_whose_count_is_gone_stays_until_a_vector_comes():
    book = book_on(Grid(40), torch.arange(40.0)[:, None], decay=0.5, dead_threshold=1e-30)
    book.frozen[0] = True
    for _ in range(200):
        learn(book, torch.zeros(1, 1), [0])
    assert book.counts[39] == 0
    assert book.codes[39] == 39
    learn(book, torch.full((1, 1), 41.0), [39])
    assert book.codes.isfinite().all()
    assert book.counts[39] == 0.5


# Dead codes


def waiting(codes: Tensor, dead: list[int], asked: list[int], monkeypatch: pytest.MonkeyPatch) -> Codebook:
    """A codebook on a line in which codes have waited for long, and the places that codes ask are known."""
    monkeypatch.setattr(rides, "asked", lambda *_: torch.tensor(asked))
    monkeypatch.setattr(rides, "GAIN", 1e-12)  # no code rides
    book = book_on(Grid(len(codes)), codes, decay=0.5)
    book.idle.zero_()
    book.idle[dead] = LONGEST_WAIT + 1
    return book


def test_a_dead_code_comes_to_the_vector_that_a_busy_one_won(monkeypatch):
    book = waiting(torch.tensor([[0.0], [10.0], [20.0], [30.0]]), [3], [-1, 0, 0, 0], monkeypatch)
    book.counts[0] = book.sums[0] = 3.0
    book.sums[0] = 0
    learn(book, torch.tensor([[4.0], [11.0]]), [0, 1])
    # Code 0: N = (3 + 1) / 2 = 2 and m = (0 + 4) / 2, of which each of the two gets half of the count.
    assert book.codes[:, 0].tolist() == pytest.approx([1, 10.5, 20, 4])
    assert book.counts.tolist() == pytest.approx([1, 1, 0.5, 1])
    torch.testing.assert_close(book.sums, book.codes * book.counts[:, None])
    assert book.idle.tolist() == [0, 0, 1, NEVER]
    assert book.hits.tolist() == [0.5, 0.5, 0, 0], "only vectors count"


def test_several_vectors_spread_the_code_that_comes_back(monkeypatch):
    book = waiting(torch.tensor([[0.0], [50.0]]), [1], [0, 0], monkeypatch)
    learn(book, torch.tensor([[3.0], [3.0], [3.0], [7.0]]), [0, 0, 0, 0])
    code = 16 / 5  # (0 + 16) / (1 + 4)
    assert book.codes[:, 0].tolist() == pytest.approx([code, code + 2 * (4 - code)])


@pytest.mark.parametrize("why", ["frozen", "not waited", "off the map", "place not chosen", "place not busy"])
def test_who_is_not_revived(why, monkeypatch):
    asked = {"off the map": [-1] * 4, "place not chosen": [2] * 4}.get(why, [0] * 4)
    book = waiting(torch.tensor([[0.0], [10.0], [20.0], [30.0]]), [3], asked, monkeypatch)
    book.counts[0 if why != "place not busy" else 1] = 9.0
    book.frozen[3] = why == "frozen"
    if why == "not waited":
        book.idle[3] = WAIT - 1
    learn(book, torch.tensor([[4.0], [11.0]]), [0, 1])
    assert book.codes[3] == 30


def test_on_the_cpu_no_place_is_looked_for_while_no_code_waits(monkeypatch):
    """That is most of a small step's time."""
    book = waiting(torch.tensor([[0.0], [10.0]]), [], [], monkeypatch)
    monkeypatch.setattr(rides, "asked", lambda *_: 1 / 0)
    learn(book, torch.tensor([[4.0], [11.0]]), [0, 1])
    assert book.counts.tolist() == [1, 1]
    book.idle[1] = LONGEST_WAIT + 1
    with pytest.raises(ZeroDivisionError):
        learn(book, torch.tensor([[4.0]]), [0])


def test_one_code_comes_to_a_place_at_a_time(monkeypatch):
    book = waiting(torch.tensor([[0.0], [10.0], [20.0], [30.0]]), [2, 3], [0] * 4, monkeypatch)
    book.counts[0] = 9.0
    learn(book, torch.tensor([[4.0]]), [0])
    assert book.codes[:, 0].tolist()[1:] == pytest.approx([10, 20, 4])


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_the_places_asked_are_mostly_near_at_times_far_and_of_all_sides(grid):
    distances, sides = [], set()
    for step in range(600):
        places = rides.asked(grid, torch.tensor(step), step % TRIES, torch.device("cpu"))
        code = 21
        if places[code] >= 0:
            distances.append(grid.distance(code, places[code]).item())
            sides.add(places[code].item())
        assert places.min() >= -1
        assert places.max() < 40
    assert len(distances) > 100
    assert sum(distance < 2.3 for distance in distances) / len(distances) > 0.4
    assert max(distances) > 4 or grid.ndim == 3
    assert {code - 1, code + 1} <= sides


def test_random_numbers_are_uniform_and_follow_from_code_and_step():
    every = torch.arange(20_000)
    first = rides.uniform(every, torch.tensor(7), 1)
    assert torch.equal(first, rides.uniform(every, 7, 1))
    for other in (rides.uniform(every, 8, 1), rides.uniform(every, 7, 2)):
        assert abs(torch.corrcoef(torch.stack([first, other]))[0, 1]) < 0.03
    assert first.histc(10, 0, 1).sub(2000).abs().max() < 250
    assert first.min() > 0
    assert first.max() < 1


# Vectors that move (no model: seconds)


def turning(d: int):
    """Vectors whose distribution turns and grows, fast at first: what an encoder does to its codes."""
    made = torch.Generator().manual_seed(0)
    first, second = (torch.randn(6, 48, generator=made) for _ in range(2))
    out, other = (torch.randn(48, d, generator=made) / 7 for _ in range(2))
    scale = torch.tensor([2, 1.4, 1, 0.7, 0.5, 0.3])

    def draw(n: int, progress: float) -> Tensor:
        angle = 2.2 * (1 - math.exp(-4 * progress)) + 0.4 * progress
        inner = torch.tanh(
            torch.randn(n, 6, generator=made) * scale @ (math.cos(angle) * first + math.sin(angle) * second) * 0.5
        )
        return inner @ (math.cos(angle) * out + math.sin(angle) * other) * (0.3 + min(1, 3 * progress))

    return draw


def used_and_disorder(vq: KohonenVQ, x: Tensor) -> tuple[float, float]:
    counts = torch.bincount(vq.codebook_of(0).search(x), minlength=vq.codebook_size)
    return (counts > 0).double().mean().item(), topographic_error(x[:4096], vq.codebook, vq.grid).item()


def after(neighborhood: str, updates: int = 300, **options) -> tuple[float, float]:
    torch.manual_seed(0)
    draw, vq = turning(8), KohonenVQ(8, 1024, neighborhood=neighborhood, **options)
    for t in range(updates):
        vq(draw(256, t / updates))
    return used_and_disorder(vq, draw(20 * 1024, 1))


def test_no_code_is_lost_and_the_order_stays_while_vectors_move():
    used, disorder = after("ride")
    assert used > 0.99
    assert disorder < 0.65
    before, disorder_before = after("narrowing", steps=300)
    assert before < 0.95, "or this shows nothing"
    assert disorder_before > 0.75


def test_codes_follow_vectors_that_jump():
    def used(**options):
        torch.manual_seed(0)
        vq = KohonenVQ(8, 512, **options)
        for t in range(300):
            vq(torch.randn(256, 8) * 0.3 + (9 if t > 100 else 0))
        return used_and_disorder(vq, torch.randn(10_240, 8) * 0.3 + 9)[0]

    assert used() > 0.85
    assert used(neighborhood="narrowing", steps=300) < 0.6, "or this shows nothing"


def test_codes_come_back_from_a_first_batch_that_says_nothing():
    """As the encoder of a new model may give: all vectors alike."""
    torch.manual_seed(0)
    vq = KohonenVQ(4, 256)
    vq(torch.zeros(256, 4))
    assert len(vq.codebook.unique(dim=0)) == 256
    for _ in range(400):
        vq(torch.randn(256, 4))
    assert used_and_disorder(vq, torch.randn(5_120, 4))[0] > 0.97
