"""The way back: after training, the original class with the new codes, in a process without topovq."""

import copy
from pathlib import Path

import pytest
import torch
import vqgan_peers
from theirs import DIM, SIZE, Holder, trained, vectors
from torch import nn
from vector_quantize_pytorch import ResidualVQ, VectorQuantize
from warm import python

from topovq import KohonenVQ, export_quantizers, replace_quantizers
from topovq.convert import VectorQuantizeReplacement

LUCIDRAINS = {
    "plain": {},
    "projected": {"dim": 6, "codebook_dim": 4},
    "cosine": {"use_cosine_sim": True},
    "heads": {"dim": 8, "heads": 2, "codebook_dim": 4, "separate_codebook_per_head": True},
    "images": {"accept_image_fmap": True},
    "learnable": {"learnable_codebook": True, "ema_update": False},
}


@pytest.mark.parametrize("case", LUCIDRAINS)
def test_vector_quantize_comes_back(case):
    peer = trained(**LUCIDRAINS[case])
    model = Holder(vq=peer)
    names = {kind: [name for name, _ in getattr(model, kind)()] for kind in ("named_parameters", "named_buffers")}
    codes = peer.codebook.detach().clone()
    replace_quantizers(model)
    projection = model.vq.project_in
    ours = model.train().vq
    for _ in range(3):
        ours(vectors(ours))
    model.eval()
    x = vectors(ours)
    quantized, tokens, _ = ours(x)
    assert export_quantizers(model) == ["vq"]
    assert type(model.vq) is VectorQuantize
    assert not model.vq.training
    for kind, expected in names.items():
        assert [name for name, _ in getattr(model, kind)()] == expected
    assert model.vq.project_in is projection  # an optimizer may know its parameters
    back_quantized, back_tokens, _ = model.vq(x)
    assert torch.equal(back_tokens, tokens)
    torch.testing.assert_close(back_quantized, quantized)
    assert not torch.equal(model.vq.codebook, codes)
    assert torch.equal(model.vq.codebook, ours.codebook)
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in Holder(vq=peer).parameters()]


@pytest.mark.parametrize("cosine", [False, True])
def test_statistics_come_back_so_that_learning_goes_on(cosine):
    """There and back without a step in between is what it was, and so is the update after it."""
    peer = trained(use_cosine_sim=cosine)
    model = Holder(vq=copy.deepcopy(peer))
    replace_quantizers(model)
    export_quantizers(model)
    for name, value in peer.state_dict().items():
        torch.testing.assert_close(model.vq.state_dict()[name], value)
    peer.train(), model.train()
    x = vectors(peer)
    peer(x), model.vq(x)
    torch.testing.assert_close(model.vq.codebook, peer.codebook)


def test_statistics_learned_here_go_on_there():
    model = Holder(vq=trained().train())
    replace_quantizers(model, neighborhood="none", decay=0.9)
    for _ in range(20):
        model.vq(torch.randn(64, DIM))
    book = model.vq.codebook_of(0)
    codes, counts = book.codes.clone(), book.counts.clone()
    export_quantizers(model)
    assert torch.equal(model.vq._codebook.cluster_size[0], counts)
    model.vq(codes)  # every code meets itself and stays
    torch.testing.assert_close(model.vq.codebook, codes, rtol=1e-3, atol=1e-3)


def test_codes_that_are_still_to_be_found_are_found_there():
    model = Holder(vq=VectorQuantize(DIM, SIZE, kmeans_init=True))
    replace_quantizers(model)
    export_quantizers(model)
    assert not model.vq._codebook.initted
    model.vq(torch.randn(100, DIM) + 50)
    assert model.vq.codebook.mean() > 40


def test_residual_vq_comes_back():
    torch.manual_seed(0)
    peer = ResidualVQ(dim=8, num_quantizers=3, codebook_size=SIZE).eval()
    keys = list(peer.state_dict())
    x = torch.randn(2, 10, 8)
    replace_quantizers(peer)
    peer.train()(x)
    tokens = peer.eval()(x)[1]
    export_quantizers(peer)
    assert list(peer.state_dict()) == keys
    assert torch.equal(peer(x)[1], tokens)


def learned(theirs: nn.Module) -> tuple[Holder, torch.Tensor, torch.Tensor]:
    """(a model whose quantizer has learned and come back, an input, the tokens that ours gave)."""
    torch.manual_seed(0)
    nn.init.normal_(theirs.embedding.weight)
    model = Holder(quantize=theirs)
    before, keys = theirs.embedding.weight.detach().clone(), list(model.state_dict())
    replace_quantizers(model)
    for _ in range(3):
        model.quantize(torch.randn(2, DIM, 3, 5))
    model.eval()
    z = torch.randn(2, DIM, 3, 5)
    tokens = model.quantize(z)[2][2]
    assert export_quantizers(model) == ["quantize"]
    assert list(model.state_dict()) == keys
    assert type(model.quantize) is type(theirs)
    assert not torch.equal(model.quantize.embedding.weight, before)
    return model, z, tokens


@pytest.mark.parametrize("case", vqgan_peers.CASES)
def test_the_vqgan_line_comes_back(case):
    theirs = vqgan_peers.CASES[case]()
    model, z, tokens = learned(theirs)
    assert torch.equal(model.quantize(z)[2][2], tokens)
    assert [name for name, _ in model.quantize.named_parameters()] == ["embedding.weight"]
    assert model.quantize.embedding.weight.requires_grad
    assert {name: value for name, value in vars(model.quantize).items() if name[0] != "_"} == {
        **{name: value for name, value in vars(theirs).items() if name[0] != "_"},
        "training": False,
    }


def test_a_process_without_topovq_loads_and_runs_it(tmp_path):
    saved = {}
    for case, make in vqgan_peers.CASES.items():
        model, z, tokens = learned(make())
        saved[case] = (model.state_dict(), z, tokens)
    torch.save(saved, tmp_path / "vqgan.pt")

    model = Holder(vq=trained(codebook_dim=2))
    replace_quantizers(model)
    model.train().vq(torch.randn(64, DIM))
    x = torch.randn(5, DIM)
    tokens = model.eval().vq(x)[1]
    export_quantizers(model)
    torch.save((model.state_dict(), x, tokens), tmp_path / "lucidrains.pt")
    torch.save(model, tmp_path / "whole.pt")

    code = f"""
import sys
sys.modules["topovq"] = None
sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch, vqgan_peers
from theirs import Holder
from vector_quantize_pytorch import VectorQuantize

for case, (state, z, tokens) in torch.load("vqgan.pt").items():
    model = Holder(quantize=vqgan_peers.CASES[case]())
    model.load_state_dict(state)
    assert torch.equal(model.eval().quantize(z)[2][2], tokens), case
state, x, tokens = torch.load("lucidrains.pt")
model = Holder(vq=VectorQuantize(dim=4, codebook_size=16, decay=0.9, codebook_dim=2))
model.load_state_dict(state)
assert torch.equal(model.eval().vq(x)[1], tokens)
assert torch.equal(torch.load("whole.pt", weights_only=False).vq(x)[1], tokens)
"""
    done = python("-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]


def test_diffusers_comes_back():
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    torch.manual_seed(0)
    model = diffusers.VQModel(block_out_channels=(32,), norm_num_groups=8, num_vq_embeddings=SIZE, vq_embed_dim=DIM)
    keys = list(model.state_dict())
    x = torch.randn(1, 3, 16, 16)
    replace_quantizers(model)
    model.train()(x)
    with torch.no_grad():
        before = model.eval()(x).sample
        assert export_quantizers(model) == ["quantize"]
        torch.testing.assert_close(model(x).sample, before)
    assert list(model.state_dict()) == keys
    fresh = diffusers.VQModel(**model.config).eval()
    fresh.load_state_dict(model.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(fresh(x).sample, before)


def test_type_mode_and_places_follow_the_model():
    peer = vqgan_peers.Taming.VectorQuantizer(SIZE, DIM, 0.25).requires_grad_(False)
    model = Holder(a=peer, b=Holder(c=peer))
    replace_quantizers(model)
    model = copy.deepcopy(model).half().train()
    assert export_quantizers(model) == ["a", "b.c"]
    assert model.a is model.b.c
    assert model.a.embedding.weight.dtype == torch.float16
    assert not model.a.embedding.weight.requires_grad
    assert model.a.training


def test_the_original_costs_no_memory_and_is_not_changed():
    peer = vqgan_peers.Taming.VectorQuantizer(SIZE, DIM, 0.25)
    weight = peer.embedding.weight
    model = Holder(quantize=peer)
    replace_quantizers(model)
    assert peer.embedding.weight is weight
    assert all(value.is_meta for value in model.quantize.original.skeleton.state_dict().values())
    model.quantize(torch.randn(1, DIM, 2, 2))
    export_quantizers(model)
    assert model.quantize.embedding.weight.data_ptr() != weight.data_ptr()


def test_what_cannot_come_back_says_so():
    with pytest.raises(ValueError, match="Linear holds nothing that replace_quantizers made"):
        export_quantizers(nn.Linear(2, 2))
    model = Holder(vq=trained())
    replace_quantizers(model)
    with pytest.raises(ValueError, match=r"itself a VectorQuantizeReplacement.*\.restored\(\)"):
        export_quantizers(model.vq)
    model = Holder(a=model.vq, b=VectorQuantizeReplacement(DIM, SIZE))
    with pytest.raises(ValueError, match="does not know its original") as caught:
        export_quantizers(model)
    assert "'b'; no quantizer was exported" in caught.value.__notes__[0]
    assert isinstance(model.a, KohonenVQ)
