"""The one type that all quantizers are: the same questions, and answers that fit their tokens."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from topovq import GradientVQ, GroupedResidualVQ, KohonenVQ, Quantizer, ResidualVQ, SoftKohonenVQ

DIM, SIZE = 4, 16
# name -> (quantizer, the numbers of its codebooks in the order of its tokens)
ALL = {
    "kohonen": (lambda: KohonenVQ(DIM, SIZE), [0]),
    "shared heads": (lambda: KohonenVQ(DIM, SIZE, heads=2, codebook_dim=2), [0, 0]),
    "heads": (lambda: KohonenVQ(DIM, SIZE, heads=2, codebook_dim=2, separate_codebook_per_head=True), [0, 1]),
    "gradient": (lambda: GradientVQ(DIM, SIZE), [0]),
    "soft": (lambda: SoftKohonenVQ(DIM, SIZE), [0]),
    "residual": (lambda: ResidualVQ(DIM, SIZE, num_quantizers=3), [0, 1, 2]),
    "shared": (lambda: ResidualVQ(DIM, SIZE, num_quantizers=3, shared_codebook=True), [0, 0, 0]),
    "grouped": (lambda: GroupedResidualVQ(DIM, SIZE, num_quantizers=2, groups=2), [0, 1, 2, 3]),
}


@pytest.fixture(params=list(ALL))
def made(request: pytest.FixtureRequest) -> tuple[Quantizer, list[int]]:
    torch.manual_seed(0)
    build, order = ALL[request.param]
    return build(), order


def tokens_last(vq: Quantizer, tokens: torch.Tensor) -> torch.Tensor:
    """[N, tokens]: groups come first in what a grouped quantizer gives."""
    tokens = tokens.movedim(0, -2) if isinstance(vq, GroupedResidualVQ) else tokens
    return tokens.reshape(32, -1)


def test_maps_are_the_codebooks_in_the_order_of_the_tokens(made: tuple[Quantizer, list[int]]) -> None:
    vq, order = made
    assert isinstance(vq, Quantizer)
    known = vq.books()
    assert [[book is each for each in known].index(True) for book in vq.maps] == order
    tokens = tokens_last(vq, vq(torch.randn(32, DIM))[1])
    assert tokens.shape[1] == len(vq.maps)
    # One batch: the hits are its counts, times 1 - decay.
    for book in known:
        mine = [place for place, each in enumerate(vq.maps) if each is book]
        counts = torch.bincount(tokens[:, mine].flatten(), minlength=SIZE)
        if not isinstance(vq, SoftKohonenVQ):  # whose codes are hit by weights
            torch.testing.assert_close(book.hits, counts * (1 - book.decay), atol=1e-5, rtol=1e-5)


def test_they_answer_the_same_questions(made: tuple[Quantizer, list[int]]) -> None:
    vq, _ = made
    x = torch.randn(32, DIM)
    vq(x)
    assert vq.codebook_size == SIZE == vq.grid.size
    assert vq.step.item() == 1
    health = vq.health()
    assert health.usage == pytest.approx(vq.usage.item())
    assert health.perplexity == pytest.approx(vq.perplexity.item())
    vq.eval()
    quantized, indices, _ = vq(x)
    torch.testing.assert_close(vq.get_output_from_indices(indices), quantized)
    assert vq.get_codes_from_indices(indices).isfinite().all()
    assert torch.equal(vq.coords(indices), vq.grid.coords(indices))


def test_freezing_holds_every_codebook(made: tuple[Quantizer, list[int]]) -> None:
    vq, _ = made
    if isinstance(vq, GradientVQ):
        pytest.skip("its codes move by an optimizer")
    vq.freeze()
    before = [book.codes.clone() for book in vq.books()]
    vq(torch.randn(32, DIM))
    assert all(torch.equal(book.codes, codes) for book, codes in zip(vq.books(), before))
    vq.unfreeze()
    vq(torch.randn(32, DIM))
    assert not any(torch.equal(book.codes, codes) for book, codes in zip(vq.books(), before))
    with pytest.raises(ValueError, match="code 16 is out of range: expected 0 to 15"):
        vq.freeze([16])


def test_a_vector_that_is_not_finite_is_counted_where_it_comes_in() -> None:
    x = torch.randn(32, DIM)
    x[3, 0] = torch.nan  # in the first group
    x[7, 3] = torch.nan  # in the last
    for name, expected in (("kohonen", 2), ("heads", 2), ("residual", 2), ("grouped", 2)):
        vq = ALL[name][0]()
        vq(x)
        assert vq.skipped.item() == expected, name


@pytest.mark.parametrize("name", ["kohonen", "soft", "residual"])
def test_a_frozen_layer_under_checkpointing_sees_the_same_codes_twice(name: str) -> None:
    torch.manual_seed(0)
    vq = ALL[name][0]()
    for frozen in (False, True):  # the first step keeps codes that are older than those of the second
        grads = []
        for again in (False, True) if frozen else (True,):
            x = torch.linspace(-2, 2, 32 * DIM).view(32, DIM).requires_grad_()

            def loss(x: torch.Tensor) -> torch.Tensor:
                quantized, _, loss = vq(x, freeze_codebook=frozen)  # noqa: B023
                return quantized.square().sum() + loss.sum()

            (checkpoint(loss, x, use_reentrant=False) if again else loss(x)).backward()
            grads.append(x.grad)
    torch.testing.assert_close(grads[0], grads[1])
