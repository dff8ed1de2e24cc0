"""The quantizer of diffusers' VQModel, replaced by ours."""

import numpy as np
import pytest
import torch
from theirs import DIM, SIZE, Holder
from torch import nn
from vector_quantize_pytorch import VectorQuantize

from topovq.convert import replace_quantizers


class VectorQuantizer(nn.Module):
    """The interface of diffusers' class, for where that is not installed."""

    __module__ = "diffusers.models.autoencoders.vae"

    def __init__(self, n_e, vq_embed_dim, beta, remap=None, sane_index_shape=False, legacy=True):
        super().__init__()
        self.n_e, self.vq_embed_dim, self.beta, self.legacy = n_e, vq_embed_dim, beta, legacy
        self.remap, self.sane_index_shape = remap, sane_index_shape
        self.embedding = nn.Embedding(n_e, vq_embed_dim)

    def forward(self, z):
        z = z.permute(0, 2, 3, 1).contiguous()
        tokens = torch.cdist(z.view(-1, self.vq_embed_dim), self.embedding.weight).argmin(1)
        z_q = self.embedding(tokens).view(z.shape)
        moves_encoder, moves_codes = (z_q.detach() - z).square().mean(), (z_q - z.detach()).square().mean()
        loss = moves_encoder + self.beta * moves_codes if self.legacy else self.beta * moves_encoder + moves_codes
        z_q = (z + (z_q - z).detach()).permute(0, 3, 1, 2).contiguous()
        tokens = tokens.reshape(z_q.shape[0], *z_q.shape[2:]) if self.sane_index_shape else tokens
        return z_q, loss, (None, None, tokens)

    def get_codebook_entry(self, indices, shape):
        z_q = self.embedding(indices)
        return z_q if shape is None else z_q.view(shape).permute(0, 3, 1, 2).contiguous()


@pytest.fixture(params=["stand-in", "diffusers"])
def diffusers_quantizer(request):
    if request.param == "stand-in":
        return VectorQuantizer
    vae = pytest.importorskip("diffusers.models.autoencoders.vae", reason="diffusers is not installed")
    return vae.VectorQuantizer


@pytest.mark.parametrize("sane", [False, True])
@pytest.mark.parametrize("legacy", [False, True])
def test_replaced_diffusers_quantizer_does_the_same(diffusers_quantizer, sane, legacy):
    torch.manual_seed(0)
    theirs = diffusers_quantizer(SIZE, DIM, 0.25, sane_index_shape=sane, legacy=legacy)
    nn.init.normal_(theirs.embedding.weight)
    model = Holder(quantize=theirs).eval()
    z = torch.randn(2, DIM, 3, 5)
    z_q, _, (_, _, tokens) = theirs(z)
    assert replace_quantizers(model) == ["quantize"]
    ours = model.quantize
    assert not ours.training
    assert torch.equal(ours.vq.codebook, theirs.embedding.weight)
    our_z_q, _, (perplexity, encodings, our_tokens) = ours(z)
    torch.testing.assert_close(our_z_q, z_q)
    assert our_z_q.is_contiguous()
    assert torch.equal(our_tokens, tokens)
    assert perplexity.shape == ()
    assert encodings is None
    assert (ours.n_e, ours.vq_embed_dim) == (SIZE, DIM)
    for indices, shape in ((tokens, (2, 3, 5, DIM)), (tokens.reshape(2, 15), (2, 3, 5, DIM)), (tokens, None)):
        entries = ours.get_codebook_entry(indices, shape)
        assert torch.equal(entries, theirs.get_codebook_entry(indices, shape))

    model.train(), theirs.train()  # the encoder learns as it did
    z1, z2 = z.clone().requires_grad_(), z.clone().requires_grad_()
    before = ours.vq.codebook.clone()
    for quantizer, inputs in ((ours, z1), (theirs, z2)):
        quantized, loss, _ = quantizer(inputs)
        (quantized.square().sum() + loss).backward()
    torch.testing.assert_close(z1.grad, z2.grad)
    assert not torch.equal(ours.vq.codebook, before)


def test_diffusers_half_and_frozen(diffusers_quantizer):
    model = Holder(quantize=diffusers_quantizer(SIZE, DIM, 0.25)).half()
    replace_quantizers(model)
    z_q, _, (_, _, tokens) = model.quantize(torch.randn(1, DIM, 2, 2).half())
    assert z_q.dtype == torch.float16
    assert model.quantize.get_codebook_entry(tokens, (1, 2, 2, DIM)).dtype == torch.float16
    assert model.quantize.vq.codebook.dtype == torch.float32

    model = Holder(quantize=diffusers_quantizer(SIZE, DIM, 0.25).requires_grad_(False))
    replace_quantizers(model)
    before = model.quantize.vq.codebook.clone()
    model.quantize(torch.randn(1, DIM, 2, 2))
    assert torch.equal(model.quantize.vq.codebook, before)


@pytest.mark.parametrize("sane", [False, True])
@pytest.mark.parametrize("unknown", ["extra", 2])
def test_a_remap_is_kept(tmp_path, unknown, sane):
    vae = pytest.importorskip("diffusers.models.autoencoders.vae", reason="diffusers is not installed")
    np.save(tmp_path / "used.npy", np.array([3, 5, 7, 11, 2, 9]))
    torch.manual_seed(0)
    theirs = vae.VectorQuantizer(SIZE, DIM, 0.25, str(tmp_path / "used.npy"), unknown, sane_index_shape=sane).eval()
    nn.init.normal_(theirs.embedding.weight)
    model = Holder(quantize=theirs)
    z = torch.randn(2, DIM, 3, 5)
    tokens = theirs(z)[2][2]
    assert len(tokens.unique()) > 4
    replace_quantizers(model)
    ours = model.quantize(z)[2][2]
    assert ours.shape == tokens.shape
    assert torch.equal(ours, tokens)
    shape = (2, 3, 5, DIM)
    assert torch.equal(model.quantize.get_codebook_entry(ours, shape), theirs.get_codebook_entry(tokens.clone(), shape))


def test_a_whole_vq_model_of_diffusers():
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    torch.manual_seed(0)
    model = diffusers.VQModel(
        block_out_channels=(32,), norm_num_groups=8, num_vq_embeddings=SIZE, vq_embed_dim=DIM, lookup_from_codebook=True
    ).eval()
    nn.init.normal_(model.quantize.embedding.weight)
    x = torch.randn(1, 3, 16, 16)
    with torch.no_grad():
        before = model(x).sample
        tokens = model.quantize(model.encode(x).latents)[2][2]
        decoded = model.decode(tokens, force_not_quantize=True, shape=(1, 16, 16, DIM)).sample
        assert replace_quantizers(model) == ["quantize"]
        torch.testing.assert_close(model(x).sample, before)
        again = model.decode(tokens, force_not_quantize=True, shape=(1, 16, 16, DIM)).sample
    torch.testing.assert_close(again, decoded)


def test_subclasses_are_left_alone():
    class Special(VectorQuantize):
        pass

    with pytest.raises(ValueError, match="subclasses are left alone"):
        replace_quantizers(Holder(vq=Special(DIM, SIZE)))
