"""lucidrains' ResidualVQ and GroupedResidualVQ, whose layers are replaced by ours and restored."""

import pytest
import torch
from there_and_back import assert_exported, assert_runs_without_topovq
from torch import nn
from vector_quantize_pytorch import GroupedResidualVQ, ResidualVQ, VectorQuantize

import topovq
from topovq import KohonenVQ
from topovq.convert import export_quantizers, replace_quantizers

SIZE, DIM, LAYERS = 16, 8, 3
FOLLOW_THE_RULE = {"learnable_codebook": False, "ema_update": True}  # as what is replaced does

KINDS = [
    (ResidualVQ, {}),
    (ResidualVQ, {"codebook_dim": 4}),
    (ResidualVQ, {"codebook_size": (16, 8, 4)}),
    (ResidualVQ, {"use_cosine_sim": True, "rotation_trick": False}),
    (ResidualVQ, {"shared_codebook": True}),
    (ResidualVQ, {"shared_codebook": True, "use_cosine_sim": True, "threshold_ema_dead_code": 2}),
    (ResidualVQ, {"shared_codebook": True, "learnable_codebook": True, "ema_update": False}),
    (ResidualVQ, {"beam_size": 1, "eval_beam_size": 3}),
    (ResidualVQ, {"beam_size": 2, "shared_codebook": True}),
    (GroupedResidualVQ, {"groups": 2}),
    (GroupedResidualVQ, {"groups": 2, "shared_codebook": True}),
]


def make(kind, options) -> nn.ModuleDict:
    """A model that holds a quantizer which has seen three batches."""
    torch.manual_seed(0)
    options = {"dim": DIM, "num_quantizers": LAYERS, "codebook_size": SIZE, "decay": 0.9, **options}
    model = nn.ModuleDict({"rvq": kind(**options, quantize_dropout=True)})
    for _ in range(3):
        model["rvq"](torch.randn(2, 20, DIM))
    return model.eval()


def layers_of(model) -> list[nn.Module]:
    return [layer for rvq in model.modules() if isinstance(rvq, ResidualVQ) for layer in rvq.layers]


@pytest.fixture(params=KINDS, ids=lambda kind: "-".join((kind[0].__name__, *kind[1])))
def model(request):
    return make(*request.param)


def test_a_replaced_quantizer_does_the_same(model):
    rvq = model["rvq"]
    x = torch.randn(2, 20, DIM)
    quantized, tokens, losses = rvq(x)[:3]
    decoded = rvq.get_output_from_indices(tokens)
    few = tokens.clone()
    few[..., 1:] = -1  # as dropout leaves them
    decoded_few, codes = rvq.get_output_from_indices(few), rvq.get_codes_from_indices(tokens)
    shorter = None
    if not isinstance(rvq, GroupedResidualVQ):
        shorter = rvq.get_output_from_indices(tokens[..., :2])
    names = replace_quantizers(model)
    assert len(names) == len(layers_of(model))
    assert all(isinstance(layer, KohonenVQ) for layer in layers_of(model))
    ours = rvq(x)
    assert torch.equal(ours[1], tokens)
    torch.testing.assert_close(ours[0], quantized)
    assert ours[2].shape == losses.shape  # theirs are 0 outside training
    torch.testing.assert_close(rvq.get_output_from_indices(tokens), decoded)
    torch.testing.assert_close(rvq.get_output_from_indices(few), decoded_few)
    torch.testing.assert_close(rvq.get_codes_from_indices(tokens), codes)
    if shorter is not None:
        torch.testing.assert_close(rvq.get_output_from_indices(tokens[..., :2]), shorter)


@pytest.mark.parametrize("dropped", [False, True])
def test_the_encoder_learns_as_it_did_and_the_codes_by_the_rule(dropped):
    x, results = torch.randn(2, 20, DIM), []
    for replaced in (False, True):
        model = make(ResidualVQ, {"codebook_dim": 4})
        if replaced:
            replace_quantizers(model)
            before = [layer.codebook.clone() for layer in layers_of(model)]
        rvq, z = model.train()["rvq"], x.clone().requires_grad_()
        rvq.quantize_dropout = dropped
        quantized, tokens, losses = rvq(z, rand_quantize_dropout_fixed_seed=1)
        (quantized.square().sum() + losses.sum()).backward()
        results.append((quantized.detach(), tokens, losses.detach(), z.grad, rvq.project_in.weight.grad))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)
    used = (tokens >= 0).flatten(0, -2).all(0).tolist()
    assert all(used) != dropped
    moved = [not torch.equal(layer.codebook, codes) for layer, codes in zip(layers_of(model), before)]
    assert moved == used


@pytest.mark.parametrize("options", [{}, {"use_cosine_sim": True}, {"learnable_codebook": True, "ema_update": False}])
def test_a_shared_codebook_stays_one_and_learns_as_ours_does(options):
    """Theirs keeps a share of each layer's statistics in turn; the rule here is one update from all vectors."""
    model = make(ResidualVQ, {"shared_codebook": True, **options})
    rvq = model["rvq"]
    rvq.quantize_dropout = False
    replace_quantizers(model, neighborhood="none", decay=0.9)
    first, *rest = layers_of(model)
    assert all(layer.codebook_of(0) is first.codebook_of(0) for layer in rest)
    ours = topovq.ResidualVQ(
        DIM, SIZE, LAYERS, shared_codebook=True, neighborhood="none", decay=0.9, **{**options, **FOLLOW_THE_RULE}
    )
    ours.layers[0].codebooks.load_state_dict(first.codebooks.state_dict())
    model.train()
    for _ in range(3):
        x = torch.randn(2, 20, DIM)
        assert torch.equal(rvq(x)[1], ours(x).indices)
        torch.testing.assert_close(rvq.codebooks, ours.codebooks)
    assert first.step == 3
    rvq(torch.randn(2, 20, DIM), freeze_codebook=True)
    assert first.step == 3
    torch.testing.assert_close(rvq.codebooks, ours.codebooks, rtol=0, atol=0)
    export_quantizers(model)
    first, *rest = layers_of(model)
    assert all(layer._codebook is first._codebook for layer in rest)
    torch.testing.assert_close(rvq.codebooks, ours.codebooks)


def test_dead_codes_of_a_shared_codebook_revive():
    model = make(ResidualVQ, {"shared_codebook": True, "threshold_ema_dead_code": 2})
    replace_quantizers(model, neighborhood="none")
    vq = layers_of(model)[0]
    vq.codebook = torch.cat([vq.codebook[:-1], torch.full((1, DIM), 1e3)])
    vq.codebook_of(0).counts[-1] = 1.0
    model.train()["rvq"](torch.randn(2, 20, DIM))
    assert vq.codebook.abs().max() < 100


@pytest.mark.parametrize("training", [False, True])
def test_beams_under_a_mask(training):
    model = make(ResidualVQ, {"beam_size": 3})
    rvq, x, mask = model["rvq"], torch.randn(2, 20, DIM), torch.rand(2, 20) > 0.3
    quantized, tokens, losses = rvq(x, mask=mask)
    replace_quantizers(model)
    rvq.quantize_dropout = False
    ours = rvq.train(training)(x, mask=mask)
    assert torch.equal(ours[1], tokens)
    torch.testing.assert_close(ours[0], quantized)
    torch.testing.assert_close(ours[2], losses)


def test_the_way_back(model):
    rvq, keys = model["rvq"], list(model.state_dict())
    x = torch.randn(2, 20, DIM)
    replace_quantizers(model)
    model.train()
    for _ in range(10):
        rvq(torch.randn(2, 20, DIM))
    quantized, tokens = model.eval()["rvq"](x)[:2]
    assert_exported(model, keys)
    assert all(type(layer) is VectorQuantize for layer in layers_of(model))
    after = rvq(x)
    assert torch.equal(after[1], tokens)
    torch.testing.assert_close(after[0], quantized)


def test_it_runs_without_topovq(tmp_path):
    model = make(ResidualVQ, {})
    replace_quantizers(model)
    for _ in range(10):
        model.train()["rvq"](torch.randn(2, 20, DIM))
    x = torch.randn(2, 20, DIM)
    tokens = model.eval()["rvq"](x)[1]
    export_quantizers(model)
    assert_runs_without_topovq(model, x, tokens, "model['rvq'](x)[1]", [], tmp_path)
