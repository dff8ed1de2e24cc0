"""Heads: answers worked out by hand on a map of 2 x 3, then what must hold on any map."""

import math

import pytest
import torch

from topovq import Grid
from topovq.prior import FlatHead, MapHead

ROWS = torch.tensor([2.0, 3.0])  # p(row) = 2/5, 3/5
COLUMNS = torch.tensor([[1.0, 2.0, 1.0], [5.0, 3.0, 2.0]])  # p(column | row), times 4 and 10


class Set(MapHead):
    """A head of a 2 x 3 map whose probabilities are set."""

    def __init__(self):
        super().__init__(4, Grid((2, 3)))

    def factor_logits(self, hidden, before):
        logits = ROWS.expand(*hidden.shape[:-1], 2) if before.shape[-1] == 0 else COLUMNS[before[..., 0]]
        return logits.log()


def hidden(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def test_the_loss_of_a_token_is_that_of_its_row_and_column():
    # token 4 is row 1, column 1: p = 3/5 * 3/10
    assert Set().loss(torch.zeros(1, 4), torch.tensor([4])).item() == pytest.approx(-math.log(3 / 5 * 3 / 10))
    assert Set().log_probs(torch.zeros(2, 4), torch.tensor([0, 5])).exp().tolist() == pytest.approx([0.1, 0.12])


def test_probabilities_factor_by_factor_are_what_a_coder_needs():
    row, column = Set().distributions(torch.zeros(1, 4), torch.tensor([4]))
    assert row[0].tolist() == pytest.approx([0.4, 0.6])
    assert column[0].tolist() == pytest.approx([0.5, 0.3, 0.2])


def test_all_codes_have_the_product_of_their_factors():
    assert Set().all_log_probs(torch.zeros(4)).exp().tolist() == pytest.approx([0.1, 0.2, 0.1, 0.3, 0.18, 0.12])


def test_the_smoothed_loss_is_the_cross_entropy_of_a_gaussian_on_the_map():
    """Width 1 around token 0 of the 2 x 3 map: rows weigh 1 and 1/e, columns 1, 1/e and 1/e^4."""
    e = math.e
    rows = [1 / (1 + 1 / e), 1 / e / (1 + 1 / e)]
    columns = [w / (1 + 1 / e + e**-4) for w in (1, 1 / e, e**-4)]
    p = [[0.1, 0.2, 0.1], [0.3, 0.18, 0.12]]
    expected = -sum(rows[r] * columns[c] * math.log(p[r][c]) for r in range(2) for c in range(3))
    torch.manual_seed(0)
    estimates = Set().smoothed(torch.zeros(200_000, 4), torch.zeros(200_000, dtype=torch.long), torch.tensor(1.0))
    # The row is drawn: there are two values, and their mean is the cross entropy.
    assert estimates.unique().numel() == 2
    assert estimates.mean().item() == pytest.approx(expected, abs=4 * estimates.std().item() / 200_000**0.5)


MAPS = {
    "line": (Grid(7), None),
    "plane": (Grid((4, 6)), None),
    "split": (Grid((4, 6)), [(2, 2), (3, 2)]),
    "split with room to spare": (Grid((5, 7)), [(2, 3), (3, 3)]),
    "last row not full": (Grid((3, 4), size=10), None),
    "last row not full, split": (Grid((3, 4), size=10), [(3,), (2, 2)]),
    "hexagonal": (Grid((4, 5), topology="hexagonal"), None),
    "torus": (Grid((4, 5), wrap=True), None),
    "cube": (Grid((2, 3, 4)), None),
    "bits": (Grid(32), [(4, 8)]),
}


def make(name, kind=MapHead, code_dim=3):
    torch.manual_seed(0)
    grid, splits = MAPS[name]
    head = MapHead(8, grid, splits=splits, code_dim=code_dim) if kind is MapHead else FlatHead(8, grid)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    if head.takes_codes:
        head.set_codes(torch.randn(grid.size, 3))
    return head


@pytest.mark.parametrize("name", MAPS)
def test_probabilities_sum_to_one_over_the_codes(name):
    head, h = make(name), hidden(3, 8)
    every = torch.arange(head.size)
    assert torch.equal(head.tokens(head.digits(every)), every)
    each = torch.stack([head.log_probs(h, token.expand(3)) for token in every], -1)
    torch.testing.assert_close(each.exp().sum(-1), torch.ones(3))
    torch.testing.assert_close(head.all_log_probs(h), each)


@pytest.mark.parametrize("name", MAPS)
def test_the_last_digit_adds_how_well_its_code_fits(name):
    """Token by token in float64, the code looked up by its number; of few hidden states and of many."""
    head, plain = make(name).double(), make(name, code_dim=None).double()
    plain.load_state_dict({key: tensor for key, tensor in head.state_dict().items() if not key.startswith("fit.")})
    codes_KC = torch.randn(head.size, 3, generator=torch.Generator().manual_seed(2)).double()
    head.set_codes(codes_KC)
    codes_KC = codes_KC / codes_KC.square().mean().sqrt()
    last, every = len(head.factors) - 1, torch.arange(head.size)
    for number in (1, 40):
        h = hidden(number, 8).double()
        for token in (every[0], every[-1]):
            before = head.digits(token.expand(number))[:, :last]
            x = h
            for embed, digit in zip(head.embed, before.unbind(-1)):
                scale, shift = embed(digit).chunk(2, -1)
                x = (1 + scale) * x + shift
            query = head.fit.query(head.mix[last](x)) / 4
            added = head.factor_logits(h, before) - plain.factor_logits(h, before)
            same_path = (head.digits(every)[:, :last] == before[0]).all(-1)
            for k in every[same_path]:
                expected = query @ head.fit.features(codes_KC[k])
                torch.testing.assert_close(added[:, head.digits(k)[last]].double(), expected, atol=1e-5, rtol=1e-5)


def test_codes_that_are_alike_are_likely_together():
    """Columns of one code have one probability, wherever they lie, as long as their own weights are 0."""
    torch.manual_seed(0)
    head, h = MapHead(8, Grid((2, 6)), code_dim=2), torch.zeros(1, 8)
    codes = torch.randn(3, 2)[[0, 1, 2, 2, 1, 0]].repeat(2, 1)
    head.set_codes(codes)
    torch.nn.init.zeros_(head.out[1].weight)
    torch.nn.init.zeros_(head.out[1].bias)
    p = head.all_log_probs(h).view(2, 6).exp()
    torch.testing.assert_close(p, p.flip(1))
    assert (p[:, 0] - p[:, 1]).abs().min() > 1e-3


def test_a_head_saved_before_it_knew_codes_says_what_it_said():
    before, head, h = make("plane", code_dim=None), make("plane"), hidden(5, 8)
    head.load_state_dict(before.state_dict())
    torch.testing.assert_close(head.all_log_probs(h), before.all_log_probs(h), rtol=0, atol=0)
    damaged = {name: tensor for name, tensor in head.state_dict().items() if name != "fit.query.weight"}
    with pytest.raises(RuntimeError, match=r"Missing key.*fit\.query\.weight"):
        make("plane").load_state_dict(damaged)


@pytest.mark.parametrize("kind", [MapHead, FlatHead])
@pytest.mark.parametrize("name", MAPS)
def test_smoothed_targets_are_the_gaussian_of_the_map(name, kind):
    """Against the sum over all codes with the distances of the grid. Only where a row's own sum differs from its
    neighbor's (hexagons, a last row that is not full) rows are weighed by their own distance."""
    head, grid = make(name, kind), MAPS[name][0]
    h, token, width, draws = hidden(8), torch.tensor(grid.size // 2), torch.tensor(1.3), 20_000
    weights = torch.exp(-((grid.distance(token, torch.arange(grid.size)) / 1.3) ** 2)).float()
    if grid.topology == "hexagonal" or grid.size < grid.places:
        rows, row = grid.coords()[:, 0], grid.coords(token)[0]
        height = math.sqrt(3) / 2 if grid.topology == "hexagonal" else 1.0
        for r in range(grid.shape[0]):
            own = math.exp(-((height * (r - row) / 1.3) ** 2))
            weights[rows == r] *= own / weights[rows == r].sum()
    weights = weights / weights.sum()
    expected = -(weights * head.all_log_probs(h)).sum()
    torch.manual_seed(1)
    found = head.smoothed(h.expand(draws, 8), token.expand(draws), width)
    assert found.mean().item() == pytest.approx(expected.item(), abs=4 * found.std().item() / draws**0.5 + 1e-4)


@pytest.mark.parametrize("kind", [MapHead, FlatHead])
def test_without_width_nothing_is_smoothed(kind):
    head, h, tokens = make("plane", kind), hidden(5, 8), torch.arange(5)
    torch.testing.assert_close(head.loss(h, tokens, width=0.0), head.loss(h, tokens))
    assert head.loss(h, tokens, width=1.0) != head.loss(h, tokens)


@pytest.mark.parametrize("name", ["plane", "split with room to spare", "last row not full", "line"])
def test_samples_follow_the_probabilities(name):
    head, h, number = make(name), hidden(8), 40_000
    drawn = head.sample(h.expand(number, 8), generator=torch.Generator().manual_seed(2))
    share = drawn.bincount(minlength=head.size) / number
    p = head.all_log_probs(h).exp()
    assert drawn.max() < head.size
    assert ((share - p).abs() <= 5 * (p * (1 - p) / number).sqrt() + 1e-9).all()


def test_sampling_options_by_hand():
    head, h = Set(), torch.zeros(4000, 4)
    one = torch.Generator().manual_seed(0)
    assert head.sample(h, temperature=0).unique().tolist() == [3]  # row 1, column 0
    # top_p 0.5 keeps row 1 (3/5), and of its columns 0 alone (1/2).
    assert head.sample(h, top_p=0.5, generator=one).unique().tolist() == [3]
    # 0.55 keeps columns 0 and 1 of row 1, which has 0.6.
    assert head.sample(h, top_p=0.55, generator=one).unique().tolist() == [3, 4]
    # Twice the logits of rows: 4/13 and 9/13.
    rows = head.sample(h, temperature=0.5, generator=one) // 3
    assert rows.float().mean().item() == pytest.approx(9 / 13, abs=0.03)


def test_guidance_of_one_is_the_condition_alone():
    head, h, other = make("plane"), hidden(50, 8), hidden(50, 8).flip(0)
    uniform = torch.rand(50, 2, generator=torch.Generator().manual_seed(3))
    plain = head.pick(h, uniform)
    assert torch.equal(head.pick(h, uniform, without=other, guidance=1.0), plain)
    assert torch.equal(head.pick(h, uniform, without=other, guidance=0.0), head.pick(other, uniform))
    assert not torch.equal(head.pick(h, uniform, without=other, guidance=3.0), plain)


def test_a_tied_head_has_the_product_with_the_codes():
    head = FlatHead(3, 2, code_dim=2)
    head.set_codes(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))  # their mean square is 1/2
    with torch.no_grad():
        head.out.weight.copy_(torch.tensor([[1.0, 0, 0], [0, 2.0, 0]]))
    logits = head.factor_logits(torch.tensor([1.0, 1.0, 9.0]), torch.zeros(0, dtype=torch.long))
    assert logits.tolist() == pytest.approx([math.sqrt(2), 2 * math.sqrt(2)])


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="token 24 is out of range: expected 0 to 23"):
        make("plane").loss(hidden(1, 8), torch.tensor([24]))
    with pytest.raises(ValueError, match="product is at least the axis, 6"):
        MapHead(8, Grid((4, 6)), splits=[(4,), (2, 2)])
    with pytest.raises(ValueError, match="needs one an axis"):
        MapHead(8, Grid((4, 6)), splits=[(4,)])
    with pytest.raises(ValueError, match="the split 4 must be ints whose product is at least the axis, 4"):
        MapHead(8, Grid((4, 6)), splits=(4, 6))
    with pytest.raises(ValueError, match="has 4 axes"):
        MapHead(8, Grid((2, 2, 2, 2)))
    with pytest.raises(ValueError, match="dim=0 must be an int of at least 1"):
        MapHead(0, Grid((4, 6)))
    for name, value in (
        *(("temperature", value) for value in (-1.0, math.nan, math.inf)),
        *(("top_p", value) for value in (0.0, 1.5, math.nan)),
        *(("guidance", value) for value in (-1.0, math.nan, math.inf)),
    ):
        with pytest.raises(ValueError, match=f"{name}={value!r} must be"):
            make("plane").sample(hidden(1, 8), without=hidden(1, 8), **{name: value})
    with pytest.raises(ValueError, match=r"guidance=2.0 needs without="):
        make("plane").sample(hidden(1, 8), guidance=2.0)


@pytest.mark.parametrize("kind", [MapHead, FlatHead])
def test_tokens_that_do_not_fit_the_hidden_states_are_refused(kind):
    head, h, tokens = make("plane", kind), hidden(2, 8), torch.tensor([1, 23])
    for width in (None, 1.0):
        assert head.loss(h, tokens.int(), width=width).isfinite()
        with pytest.raises(ValueError, match=r"hidden states \(2, 8\) do not fit tokens \(1,\): \(1, 8\) is expected"):
            head.loss(h, tokens[:1], width=width)
        with pytest.raises(TypeError, match=r"tokens must be integers, got torch.float32"):
            head.loss(h, tokens.float(), width=width)
        with pytest.raises(ValueError, match="token 24 is out of range: expected 0 to 23"):
            head.loss(h, tokens + 1, width=width)


@pytest.mark.parametrize("kind", [MapHead, FlatHead])
@pytest.mark.parametrize("token", [-1, 24])
def test_a_token_that_is_no_code_stops_a_compiled_loss(kind, token):
    """Compiled, and on a GPU, nothing is checked beforehand: the token must not pass for another."""
    loss = torch.compile(make("plane", kind).loss, backend="eager")
    with pytest.raises(IndexError, match="out of bounds"):
        loss(hidden(1, 8), torch.tensor([token]))


@pytest.mark.parametrize("kind", [MapHead, FlatHead])
def test_a_width_that_is_none_is_refused(kind):
    head = make("plane", kind)
    for width in (-1.0, math.nan, -1, torch.tensor(math.nan), torch.tensor(-2.0)):
        with pytest.raises(ValueError, match=r"width=.* must be at least 0: cells of the map"):
            head.loss(hidden(2, 8), torch.tensor([0, 1]), width=width)


@pytest.mark.parametrize("kind", [MapHead, FlatHead])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_is_drawn_from_logits_that_are_not_finite(kind, temperature):
    h = hidden(3, 8)
    h[1, 2] = math.nan
    with pytest.raises(ValueError, match=r"the logits of 1 of 3 tokens are NaN or infinite.*hidden states"):
        make("plane", kind).sample(h, temperature)
    with pytest.raises(ValueError, match=r"the logits of 1 of 3 tokens"):
        make("plane", kind).sample(hidden(3, 8), temperature, without=h, guidance=2.0)


def test_a_head_compiles_whole():
    """Under torch.compile, with the smoothed loss, in one graph."""
    head, h, tokens = make("last row not full, split"), hidden(6, 8), torch.arange(6)
    compiled = torch.compile(head.loss, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(h, tokens), head.loss(h, tokens))
    torch.manual_seed(0)
    one = compiled(h, tokens, torch.tensor(1.0))
    torch.manual_seed(0)
    torch.testing.assert_close(one, head.loss(h, tokens, torch.tensor(1.0)))


@pytest.mark.parametrize("kind", [MapHead, FlatHead])
def test_a_head_that_waits_for_codes_says_so(kind):
    head, h, tokens = kind(8, Grid((3, 4)), code_dim=2), hidden(5, 8), torch.arange(5)
    with pytest.raises(RuntimeError, match=r"knows no codes yet: give them by set_codes\(codes\)"):
        head.loss(h, tokens)
    again = kind(8, Grid((3, 4)), code_dim=2)
    head.set_codes(torch.randn(12, 2))
    again.load_state_dict(head.state_dict())
    torch.testing.assert_close(again.loss(h, tokens), head.loss(h, tokens))


@pytest.mark.parametrize("kind", [MapHead, FlatHead])
def test_codes_that_do_not_fit_are_refused(kind):
    head = kind(8, Grid((3, 4)), code_dim=2)
    with pytest.raises(ValueError, match=r"codes of shape \(11, 2\) do not fit: expected \(12, 2\)"):
        head.set_codes(torch.randn(11, 2))
    with pytest.raises(ValueError, match="1 of 12 codes are NaN or infinite"):
        head.set_codes(torch.tensor([[1.0, math.nan]] + 11 * [[0.0, 1.0]]))
    codes = torch.randn(12, 2)
    head.set_codes(codes.numpy())
    with pytest.raises(ValueError, match="this head has no use for codes: make it with code_dim"):
        kind(8, Grid((3, 4))).set_codes(codes)


@pytest.mark.parametrize(
    ("kind", "given"), [(MapHead, {"code_dim": 0}), (MapHead, {"hidden": 0}), (FlatHead, {"code_dim": -1})]
)
def test_widths_that_are_none_are_refused(kind, given):
    with pytest.raises(ValueError, match=r"(code_dim|hidden)=(0|-1) must be an int of at least 1"):
        kind(8, 12, **given)


def test_hidden_states_without_the_condition_must_be_alike():
    with pytest.raises(ValueError, match=r"without= of shape \(3, 8\) must be as the hidden states are: \(5, 8\)"):
        make("line").sample(hidden(5, 8), guidance=2.0, without=hidden(3, 8))
