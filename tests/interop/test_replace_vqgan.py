"""The quantizers of VQGAN's line (taming, SEED-Voken, LlamaGen), replaced by ours, which then do the same."""

import copy

import pytest
import torch
from compiled import check_compiled
from theirs import DIM, SIZE, Holder
from torch import nn
from vqgan_peers import CASES, USED, Embedded, LlamaGen, SeedVoken, Taming

from topovq import KohonenVQ, replace_quantizers


def made(case: str) -> nn.Module:
    torch.manual_seed(0)
    theirs = CASES[case]()
    nn.init.normal_(theirs.embedding.weight)
    return theirs


@pytest.mark.parametrize("case", CASES)
def test_tokens_codes_and_attributes_stay(case):
    theirs = made(case).eval()
    model = Holder(quantize=theirs)
    z = torch.randn(2, DIM, 3, 5)
    with torch.no_grad():
        z_q, _, (_, _, tokens) = theirs(z)
        assert replace_quantizers(model) == ["quantize"]
        ours = model.quantize
        our_z_q, _, (_, _, our_tokens) = ours(z)
    assert isinstance(ours.vq, KohonenVQ)
    assert not ours.training
    assert our_tokens.shape == tokens.shape
    assert torch.equal(our_tokens, tokens)
    assert len(our_tokens.unique()) > 4
    torch.testing.assert_close(our_z_q, z_q)
    for name, value in vars(theirs).items():
        if not name.startswith("_"):
            assert getattr(ours, name) == value, name
    flat = tokens.flatten()
    for shape in ((2, DIM, 3, 5) if case.startswith("LlamaGen") else (2, 3, 5, DIM), None):
        torch.testing.assert_close(ours.get_codebook_entry(flat, shape), theirs.get_codebook_entry(flat, shape))
    codes = theirs.codes() if case.startswith("LlamaGen") else theirs.embedding.weight
    torch.testing.assert_close(ours.embedding.weight, codes)


@pytest.mark.parametrize("case", CASES)
def test_the_encoder_learns_as_it_did_and_the_codes_by_the_rule(case):
    theirs = made(case).train()
    model = Holder(quantize=copy.deepcopy(theirs))
    replace_quantizers(model)
    ours = model.quantize
    assert ours.training
    before = ours.vq.codebook.clone()
    z = torch.randn(2, DIM, 3, 5)
    gradients, losses = [], []
    probe = torch.randn_like(z)
    for quantizer in (ours, theirs):
        z = z.detach().clone().requires_grad_()
        quantized, loss, _ = quantizer(z)
        parts = [loss] if torch.is_tensor(loss) else [part for part in loss if torch.is_tensor(part)]
        ((quantized * probe).sum() + sum(parts)).backward()
        gradients.append(z.grad)
        losses.append(loss)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-3, atol=1e-4)
    assert not torch.equal(ours.vq.codebook, before)
    assert ours.vq.step == 1
    if not torch.is_tensor(losses[0]):
        first = 1 if case == "IBQ with entropy" else 0  # IBQ's first term has lost the part that moved the codes
        for ours_, theirs_ in list(zip(*losses))[first:]:
            torch.testing.assert_close(torch.as_tensor(ours_), torch.as_tensor(theirs_), check_dtype=False)
    if case == "LlamaGen":
        assert not losses[0][0].requires_grad
        assert losses[0][3] == 0
    if case == "LlamaGen on the sphere":
        assert torch.equal(ours.codebook_used, theirs.codebook_used)
        assert losses[0][3] > 0


def test_taming_gives_the_perplexity_of_the_batch():
    theirs = made("taming 1").eval()
    model = Holder(quantize=theirs)
    replace_quantizers(model)
    z = torch.randn(2, DIM, 3, 5)
    torch.testing.assert_close(model.quantize(z)[2][0], theirs(z)[2][0])


def test_unknown_codes_get_a_random_token_of_those_in_use():
    model = Holder(quantize=Taming.VectorQuantizer2(SIZE, DIM, 0.25, USED, "random"))
    nn.init.normal_(model.quantize.embedding.weight)
    replace_quantizers(model)
    z = model.quantize.vq.codebook.T.reshape(1, DIM, 4, 4).clone()
    model.eval()
    seen = {tuple(model.quantize(z)[2][2].flatten().tolist()) for _ in range(20)}
    for tokens in seen:
        assert [tokens[code] for code in USED] == list(range(len(USED)))
        assert max(tokens) < len(USED)
    assert len(seen) > 1


def test_the_extra_token_stands_for_the_first_code_in_use():
    model = Holder(quantize=made("taming 2 remapped, extra").eval())
    replace_quantizers(model)
    codes = model.quantize.vq.codebook
    entries = model.quantize.get_codebook_entry(torch.tensor([1, 6]))
    assert torch.equal(entries, codes[[USED[1], USED[0]]])


def test_settings_for_other_quantizers_are_refused():
    model = Holder(quantize=made("taming 2"))
    replace_quantizers(model)
    z = torch.randn(1, DIM, 2, 2)
    assert model.quantize(z, temp=1.0)[0].shape == z.shape
    with pytest.raises(ValueError, match=r"temp=0\.5"):
        model.quantize(z, temp=0.5)
    with pytest.raises(TypeError, match=r"IndexPropagationQuantize: remap='used\.npy'"):
        replace_quantizers(Holder(vq=SeedVoken.IndexPropagationQuantize(SIZE, DIM, used=USED)))


@pytest.mark.parametrize("case", ["LlamaGen on the sphere", "SEED-Voken 2 by direction"])
def test_codes_without_a_direction_are_refused(case):
    theirs = made(case)
    with torch.no_grad():
        theirs.embedding.weight[3] = 0
    with pytest.raises(ValueError, match=r"codes \[3\] are all zeros"):
        replace_quantizers(Holder(vq=theirs))


@pytest.mark.parametrize("case", ["LlamaGen on the sphere", "SEED-Voken 2 by direction"])
def test_a_metric_comes_before_the_one_found(case):
    model = Holder(quantize=made(case))
    replace_quantizers(model, metric="dot")
    assert model.quantize.vq.codebook_of(0).metric == "dot"


def test_codes_searched_by_direction_keep_their_length():
    model = Holder(quantize=made("SEED-Voken 2 by direction"))
    codes = model.quantize.embedding.weight.detach().clone()
    replace_quantizers(model, neighborhood="none", decay=0.5)
    assert torch.equal(model.quantize.vq.codebook, codes)
    model.quantize(10 * codes.T.reshape(1, DIM, 4, 4))  # each code meets itself, ten times as long: N = 1, m = 5.5 w
    torch.testing.assert_close(model.quantize.vq.codebook, 5.5 * codes, rtol=1e-4, atol=1e-5)


def test_type_device_and_frozen_codes_are_kept():
    theirs = made("LlamaGen on the sphere").requires_grad_(False).half()
    model = Holder(quantize=theirs)
    replace_quantizers(model)
    before = model.quantize.vq.codebook.clone()
    z_q, _, (_, _, tokens) = model.quantize(torch.randn(1, DIM, 2, 2).half())
    assert z_q.dtype == torch.float16
    assert model.quantize.get_codebook_entry(tokens).dtype == torch.float16
    assert model.quantize.vq.codebook.dtype == torch.float32
    assert torch.equal(model.quantize.vq.codebook, before)


class VectorQuantizer(Embedded):
    """Another one of that name, which returns other things."""

    def get_codebook_entry(self, indices, shape):
        return self.embedding(indices)


class GumbelQuantize(nn.Module):
    pass


def test_near_misses_are_left_alone_and_named():
    other = VectorQuantizer(SIZE, DIM, 0.25)
    other.ema = True  # an attribute that taming's does not have
    clipped = Taming.VectorQuantizer(SIZE, DIM, 0.25)
    clipped.embedding = nn.Embedding(SIZE, DIM, max_norm=1.0)
    model = Holder(a=other, b=clipped, c=GumbelQuantize())
    with pytest.raises(ValueError, match=r"'a' \(.*VectorQuantizer\), 'b' \(.*\), 'c' \(.*GumbelQuantize\)"):
        replace_quantizers(model)
    model.d = LlamaGen.VectorQuantizer(SIZE, DIM, 0.25)
    assert replace_quantizers(model) == ["d"]
    assert model.a is other


@pytest.mark.parametrize(
    "peer",
    [
        lambda: SeedVoken.IndexPropagationQuantize(SIZE, DIM, use_entropy_loss=True),
        lambda: LlamaGen.VectorQuantizer(SIZE, DIM, 0.25, entropy_loss_ratio=1.0, show_usage=True),
    ],
    ids=["IBQ", "LlamaGen"],
)
def test_compiled_losses_see_the_codes_before_they_learn(peer):
    def replaced() -> nn.Module:
        model = Holder(vq=peer())
        replace_quantizers(model)
        return model.vq

    check_compiled(replaced, torch.randn(2, DIM, 4, 5, generator=torch.Generator().manual_seed(1)))
