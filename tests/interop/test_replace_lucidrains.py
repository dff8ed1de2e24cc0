"""Quantizers of vector-quantize-pytorch inside a model, replaced by ours, which then do the same."""

import re

import pytest
import torch
from theirs import DIM, SIZE, Holder, trained, vectors
from torch import nn
from vector_quantize_pytorch import GroupedResidualVQ, HierarchicalVQ, RandomProjectionQuantizer, VectorQuantize
from vector_quantize_pytorch import ResidualVQ as PeerResidualVQ

from topovq import KohonenVQ, ResidualVQ, export_quantizers
from topovq.convert import replace_quantizers
from topovq.quantizers.extras import Extras


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rotation_trick": False, "commitment_weight": 0.25, "decay": 0.95, "eps": 1e-4},
        {"channel_last": False},
        {"accept_image_fmap": True},
        {"accept_image_fmap": True, "dim": 8, "codebook_dim": 2, "heads": 2},
        {"accept_3d_fmap": True},
        {"dim": 8, "heads": 2, "codebook_dim": 4},
        {"dim": 8, "heads": 2, "codebook_dim": 4, "separate_codebook_per_head": True},
        {"dim": 6, "codebook_dim": 4},
        {"use_cosine_sim": True},
        {"freeze_codebook": True},
        {"ema_update": False},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_replaced_vector_quantize_does_the_same(options):
    peer = trained(**options)
    model = nn.Sequential(nn.Identity(), peer).eval()
    x = vectors(peer)
    theirs = model(x)
    assert replace_quantizers(model) == ["1"]
    vq = model[1]
    assert isinstance(vq, KohonenVQ)
    ours = model(x)
    assert torch.equal(ours[1], theirs[1])
    torch.testing.assert_close(ours[0], theirs[0])
    torch.testing.assert_close(vq.get_output_from_indices(ours[1]), theirs[0])
    for name in ("rotation_trick", "commitment_weight", "freeze_codebook", "channel_last", "heads", "dim"):
        assert getattr(vq, name) == getattr(peer, name), name
    assert vq.codebook_of(0).decay == peer._codebook.decay
    assert vq.codebook_of(0).eps == peer._codebook.eps
    assert vq.neighborhood.kind == KohonenVQ(DIM, SIZE).neighborhood.kind

    model.train(), peer.train()
    x1, x2 = x.clone().requires_grad_(), x.clone().requires_grad_()
    before = vq.codebook.clone()
    (quantized, _, loss), (their_quantized, _, their_loss) = model(x1), peer(x2)
    torch.testing.assert_close(loss, their_loss)
    probe = torch.randn_like(quantized)
    ((quantized * probe).sum() + loss).backward(), ((their_quantized * probe).sum() + their_loss).backward()
    torch.testing.assert_close(x1.grad, x2.grad, rtol=1e-3, atol=1e-4)
    moves = not options.get("freeze_codebook") and options.get("ema_update", True)
    assert torch.equal(vq.codebook, before) != moves


def test_replacing_keeps_mode_type_device_and_parameters():
    model = Holder(vq=VectorQuantize(8, SIZE, codebook_dim=4).train()).bfloat16()
    weight = model.vq.project_in.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replace_quantizers(model)
    assert model.vq.training
    assert model.vq.project_in.weight is weight
    assert model.vq.codebook.dtype == torch.float32
    quantized, _, loss = model.vq(torch.randn(2, 5, 8, dtype=torch.bfloat16))
    assert quantized.dtype == torch.bfloat16
    before = weight.clone()
    loss.backward()
    optimizer.step()
    assert not torch.equal(model.vq.project_in.weight, before)

    model = Holder(vq=VectorQuantize(DIM, SIZE).eval()).double()
    codes = model.vq.codebook.clone()
    replace_quantizers(model)
    assert not model.vq.training
    assert torch.equal(model.vq.codebook, codes)
    assert model.vq.codebook.dtype == torch.float64


def test_options_come_first():
    model = Holder(a=trained(), b=trained(accept_image_fmap=True))
    names = replace_quantizers(model, neighborhood="hard", tau=0.5, grid=(2, 8), decay=0.7, rotation_trick=False)
    assert names == ["a", "b"]
    for vq in (model.a, model.b):
        assert vq.neighborhood.kind == "hard"
        assert vq.grid.shape == (2, 8)
        assert vq.codebook_of(0).decay == 0.7
        assert not vq.rotation_trick
    assert model.b.accept_image_fmap


@pytest.mark.parametrize("metric", ["dot", "euclidean", "cosine"])
def test_a_metric_comes_before_the_one_found(metric):
    model = Holder(vq=trained(use_cosine_sim=True))
    replace_quantizers(model, metric=metric)
    assert model.vq.codebook_of(0).metric == metric


def test_codes_that_followed_the_gradient_follow_the_rule():
    model = Holder(vq=VectorQuantize(DIM, SIZE, learnable_codebook=True, ema_update=False))
    replace_quantizers(model)
    before = model.vq.codebook.clone()
    model.vq(torch.randn(64, DIM))
    assert not list(model.vq.parameters())
    assert not torch.equal(model.vq.codebook, before)
    assert model.vq.codebook_of(0).decay == 0.99

    model = Holder(vq=VectorQuantize(DIM, SIZE, learnable_codebook=True, ema_update=False).requires_grad_(False))
    replace_quantizers(model)
    before = model.vq.codebook.clone()
    model.vq(torch.randn(64, DIM))
    assert torch.equal(model.vq.codebook, before)


def test_one_module_in_two_places_stays_one_module():
    peer = trained()
    model = Holder(encoder=Holder(vq=peer), decoder=Holder(vq=peer))
    assert replace_quantizers(model) == ["encoder.vq", "decoder.vq"]
    assert model.encoder.vq is model.decoder.vq


@pytest.mark.parametrize("projected", [False, True])
def test_inside_residual_vq(projected):
    torch.manual_seed(0)
    peer = PeerResidualVQ(
        dim=8,
        codebook_dim=4 if projected else 8,
        num_quantizers=3,
        codebook_size=SIZE,
        decay=0.9,
        quantize_dropout=True,
    )
    for _ in range(3):
        peer(torch.randn(2, 10, 8))
    peer.eval()
    x = torch.randn(2, 10, 8)
    quantized, indices, _, codes = peer(x, return_all_codes=True)
    outputs = peer.get_output_from_indices(indices)
    assert replace_quantizers(peer) == ["layers.0", "layers.1", "layers.2"]
    ours = peer(x, return_all_codes=True)
    assert torch.equal(ours[1], indices)
    torch.testing.assert_close(ours[0], quantized)
    assert ours[2].shape == (3,)
    torch.testing.assert_close(ours[3], codes)
    torch.testing.assert_close(peer.get_output_from_indices(indices), outputs)
    before = peer.codebooks.clone()
    peer.train()
    peer(x, rand_quantize_dropout_fixed_seed=3)
    assert not torch.equal(peer.codebooks[0], before[0])


def test_inside_grouped_residual_vq():
    torch.manual_seed(0)
    peer = GroupedResidualVQ(dim=8, groups=2, num_quantizers=2, codebook_size=SIZE).eval()
    x = torch.randn(2, 10, 8)
    quantized, indices, _ = peer(x)
    assert replace_quantizers(peer) == [f"rvqs.{group}.layers.{layer}" for group in (0, 1) for layer in (0, 1)]
    ours = peer(x)
    assert torch.equal(ours[1], indices)
    torch.testing.assert_close(ours[0], quantized)


def test_inside_hierarchical_vq():
    torch.manual_seed(0)
    peer = HierarchicalVQ(dim=DIM, codebook_size=SIZE, scales=(1, 4), accept_image_fmap=True).eval()
    x = torch.randn(2, DIM, 4, 4) if peer.channel_first else torch.randn(2, 4, 4, DIM)
    quantized, indices, _ = peer(x)
    assert replace_quantizers(peer, threshold_ema_dead_code=0.0)
    ours = peer(x)
    torch.testing.assert_close(ours[0], quantized)
    assert all(torch.equal(a, b) for a, b in zip(ours[1], indices))


def test_penalty_and_drawing_go_on_and_come_back():
    peer = trained(orthogonal_reg_weight=10.0, orthogonal_reg_max_codes=5, stochastic_sample_codes=True)
    model = Holder(vq=peer.train())
    replace_quantizers(model, neighborhood="none")
    assert model.vq.extras == Extras(
        orthogonal_reg_weight=10.0, orthogonal_reg_max_codes=5, stochastic_sample_codes=True, sample_codebook_temp=1.0
    )
    model.vq(vectors(model.vq)).loss.backward()
    assert model.vq.codebook_of(0).codes.grad.any()
    codes = model.vq.codebook.detach().clone()
    export_quantizers(model)
    assert type(model.vq) is VectorQuantize
    assert isinstance(model.vq._codebook.embed, nn.Parameter)
    assert torch.equal(model.vq.codebook, codes)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("layernorm_after_project_in", {"layernorm_after_project_in": True, "codebook_dim": 2}),
        ("commitment_use_cross_entropy_loss", {"commitment_use_cross_entropy_loss": True}),
        ("codebook_diversity_loss_weight", {"codebook_diversity_loss_weight": 1.0}),
        ("straight_through", {"straight_through": True, "rotation_trick": False}),
        ("directional_reparam", {"directional_reparam": True, "threshold_ema_dead_code": 2}),
        ("affine_param", {"affine_param": True}),
        ("vq_bridge", {"vq_bridge": nn.Linear(DIM, DIM)}),
        ("manual_ema_update", {"manual_ema_update": True}),
        (
            "in_place_codebook_optimizer",
            {"in_place_codebook_optimizer": torch.optim.SGD, "learnable_codebook": True, "ema_update": False},
        ),
        ("sync_update_v", {"sync_update_v": 0.5, "learnable_codebook": True, "ema_update": False}),
        ("return_zeros_for_masked_padding", {"return_zeros_for_masked_padding": False}),
        ("route_gradients_to_input", {"route_gradients_to_input": False}),
        ("threshold_ema_dead_code", {"threshold_ema_dead_code": 0.5}),
    ],
)
def test_options_without_counterpart_are_named_and_nothing_is_replaced(name, options):
    first, second = trained(), VectorQuantize(DIM, SIZE, **options)
    model = Holder(first=first, second=second)
    with pytest.raises(TypeError, match=re.escape(name)) as caught:
        replace_quantizers(model)
    assert "'second'" in "".join(caught.value.__notes__)
    assert model.first is first
    assert model.second is second


@pytest.mark.parametrize(("given", "expected"), [({}, 2), ({"threshold_ema_dead_code": 0.1}, 0.1)])
def test_a_dead_code_threshold_stays_a_count_or_is_restated(given, expected):
    model = Holder(vq=VectorQuantize(DIM, SIZE, threshold_ema_dead_code=2))
    replace_quantizers(model, **given)
    assert model.vq.codebook_of(0).dead_threshold == expected


@pytest.mark.parametrize(
    ("option", "advice"),
    [("implicit_neural_codebook", "more quantizers"), ("diveq", r"topovq\.ResidualVQ\(.*diveq=True\).*`codebook`")],
)
def test_residual_options_without_counterpart_are_named(option, advice):
    peer = PeerResidualVQ(dim=DIM, num_quantizers=2, codebook_size=SIZE, **{option: True})
    with pytest.raises(TypeError, match=f"ResidualVQ: {option}=True is not supported; .*{advice}"):
        replace_quantizers(peer)


def test_codes_are_carried_over_as_the_advice_says():
    peer = PeerResidualVQ(dim=DIM, num_quantizers=2, codebook_size=SIZE, diveq=True).eval()
    rvq = ResidualVQ(DIM, SIZE, 2, diveq=True).eval()
    for ours, theirs in zip(rvq.quantizers, peer.layers):
        ours.codebook = theirs.codebook
    x = torch.randn(2, 20, DIM)
    assert torch.equal(rvq(x).indices, peer(x)[1])


def test_models_that_cannot_be_served_say_so():
    with pytest.raises(ValueError, match=r"Linear holds no quantizer.*VectorQuantize of.*VectorQuantizer of diffusers"):
        replace_quantizers(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"itself a VectorQuantize.*nn\.Sequential\(quantizer\)"):
        replace_quantizers(VectorQuantize(DIM, SIZE))
    with pytest.raises(TypeError, match="inside vector_quantize_pytorch's RandomProjectionQuantizer"):
        replace_quantizers(RandomProjectionQuantizer(dim=DIM, codebook_size=SIZE, codebook_dim=2))
    with pytest.raises(ValueError, match="holds 15 codes, but codebook_size=17") as caught:
        replace_quantizers(Holder(vq=VectorQuantize(DIM, 17)), grid=(3, 5))
    assert "'vq'" in caught.value.__notes__[0]
