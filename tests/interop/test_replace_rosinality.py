"""rosinality's VQ-VAE-2, whose two quantizers are replaced by ours and restored."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from there_and_back import assert_exported, assert_runs_without_topovq
from torch import nn

from topovq import KohonenVQ
from topovq.convert import export_quantizers, from_rosinality, replace_quantizers

SIZE, DIM = 16, 4


class Quantize(nn.Module):
    """The attributes, state and results of rosinality's class, which is in a repository and in no package."""

    def __init__(self, dim, n_embed, decay=0.99, eps=1e-5):
        super().__init__()
        self.dim, self.n_embed, self.decay, self.eps = dim, n_embed, decay, eps
        codes = torch.randn(dim, n_embed)
        for name, value in (("embed", codes), ("cluster_size", torch.zeros(n_embed)), ("embed_avg", codes.clone())):
            self.register_buffer(name, value)

    def forward(self, input):
        distance = (input.reshape(-1, self.dim, 1) - self.embed).square().sum(1)
        tokens = distance.argmin(1).view(input.shape[:-1])
        quantized = self.embed_code(tokens)
        if self.training:
            chosen = F.one_hot(tokens.flatten(), self.n_embed).to(input.dtype)
            self.cluster_size.lerp_(chosen.sum(0), 1 - self.decay)
            self.embed_avg.lerp_(input.detach().reshape(-1, self.dim).T @ chosen, 1 - self.decay)
            total = self.cluster_size.sum()
            counts = (self.cluster_size + self.eps) / (total + self.n_embed * self.eps) * total
            self.embed.copy_(self.embed_avg / counts)
        diff = (quantized.detach() - input).square().mean()
        return input + (quantized - input).detach(), diff, tokens

    def embed_code(self, embed_id):
        return F.embedding(embed_id, self.embed.T)


class TwoLevels(nn.Module):
    """As VQVAE uses its quantizers."""

    def __init__(self):
        super().__init__()
        self.enc = nn.Conv2d(3, DIM, 2, 2)
        self.quantize_t = Quantize(DIM, SIZE, decay=0.9)
        self.quantize_b = Quantize(DIM, 2 * SIZE)
        self.dec = nn.Conv2d(2 * DIM, 3, 1)

    def encode(self, x):
        z = self.enc(x).permute(0, 2, 3, 1)
        quant_t, diff_t, id_t = self.quantize_t(z)
        quant_b, diff_b, id_b = self.quantize_b(z - quant_t)
        return quant_t, quant_b, diff_t.unsqueeze(0) + diff_b.unsqueeze(0), id_t, id_b

    def decode(self, quant_t, quant_b):
        return self.dec(torch.cat([quant_t, quant_b], -1).permute(0, 3, 1, 2))

    def decode_code(self, code_t, code_b):
        return self.decode(self.quantize_t.embed_code(code_t), self.quantize_b.embed_code(code_b))

    def forward(self, x):
        quant_t, quant_b, diff, _, _ = self.encode(x)
        return self.decode(quant_t, quant_b), diff


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = TwoLevels().train()
    for _ in range(3):
        model(torch.randn(2, 3, 8, 8))
    return model.eval()


def test_a_replaced_model_does_the_same(model):
    x = torch.randn(2, 3, 8, 8)
    *before, id_t, id_b = model.encode(x)
    output, decoded = model(x)[0], model.decode_code(id_t, id_b)
    embed = model.quantize_t.embed.clone()
    assert replace_quantizers(model) == ["quantize_t", "quantize_b"]
    assert isinstance(model.quantize_t.vq, KohonenVQ)
    assert not model.quantize_t.training
    book = model.quantize_t.vq.codebook_of(0)
    assert (book.decay, book.eps, book.size) == (0.9, 1e-5, SIZE)
    assert torch.equal(model.quantize_t.embed, embed)
    *after, our_t, our_b = model.encode(x)
    assert torch.equal(our_t, id_t)
    assert torch.equal(our_b, id_b)
    torch.testing.assert_close(after, before)
    torch.testing.assert_close(model(x)[0], output)
    torch.testing.assert_close(model.decode_code(id_t, id_b), decoded)
    assert (model.quantize_t.dim, model.quantize_t.n_embed) == (DIM, SIZE)


def test_the_encoder_learns_as_it_did_and_the_codes_by_the_rule(model):
    torch.manual_seed(1)
    x = torch.randn(2, 3, 8, 8)
    model.train()
    state = {name: value.clone() for name, value in model.state_dict().items()}

    def gradient():
        model.zero_grad()
        output, diff = model(x)
        (output.square().mean() + 0.25 * diff.mean()).backward()
        return diff.detach(), model.enc.weight.grad.clone()

    theirs = gradient()
    model.load_state_dict(state)
    replace_quantizers(model)
    codes = model.quantize_b.vq.codebook.clone()
    ours = gradient()
    torch.testing.assert_close(ours, theirs)
    assert model.quantize_b.vq.step == 1
    assert not torch.equal(model.quantize_b.vq.codebook, codes)


def test_with_no_neighborhood_it_learns_as_theirs_does(model):
    theirs = model.quantize_t.train()
    start = {name: value.clone() for name, value in theirs.state_dict().items()}
    batches = torch.randn(20, 32, DIM)
    for z in batches:
        theirs(z)
    learned = theirs.embed.clone()
    theirs.load_state_dict(start)
    replace_quantizers(model, neighborhood="none", count_smoothing="copy")
    for z in batches:
        model.quantize_t(z)
    torch.testing.assert_close(model.quantize_t.embed, learned)


def test_the_way_back(model, tmp_path):
    x = torch.randn(2, 3, 8, 8)
    keys = list(model.state_dict())
    replace_quantizers(model)
    model.train()
    for _ in range(10):  # until no two codes are the same
        model(torch.randn(2, 3, 8, 8))
    model.eval()
    output, tokens = model(x)[0], model.encode(x)[3]
    sums, counts = model.quantize_t.vq.codebook_of(0).sums.clone(), model.quantize_t.vq.codebook_of(0).counts.clone()
    assert_exported(model, keys)
    assert type(model.quantize_t) is Quantize
    assert not model.quantize_t.training
    assert (model.quantize_t.decay, model.quantize_b.decay) == (0.9, 0.99)
    assert torch.equal(model.encode(x)[3], tokens)
    torch.testing.assert_close(model(x)[0], output)
    assert torch.equal(model.quantize_t.cluster_size, counts)
    used = counts > 0.1  # codes of no count are still where theirs put them
    torch.testing.assert_close(model.quantize_t.embed_avg[:, used], sums.T[:, used], rtol=1e-2, atol=1e-3)
    # Learning goes on there: one more update moves the codes a little, not away.
    before = model.quantize_t.embed.clone()
    model.train()(x)
    assert not torch.equal(model.quantize_t.embed, before)
    assert (model.quantize_t.embed - before)[:, used].abs().max() < 1


def test_it_runs_without_topovq(tmp_path, monkeypatch):
    # The class above lives in a file that imports topovq: a file of its own stands for rosinality's.
    source = Path(__file__).read_text()
    source = source[source.index("class Quantize") : source.index("class TwoLevels")]
    imports = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n\n\n"
    (tmp_path / "vqvae.py").write_text(imports + source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "vqvae", raising=False)
    model = nn.ModuleList([importlib.import_module("vqvae").Quantize(DIM, SIZE)])
    x = torch.randn(20, DIM)
    replace_quantizers(model)
    for _ in range(10):
        model[0](torch.randn(20, DIM))
    tokens = model.eval()[0](x)[2]
    export_quantizers(model)
    assert_runs_without_topovq(model, x, tokens, "model[0](x)[2]", [str(tmp_path)], tmp_path)


@pytest.mark.parametrize("far", [1e3, 1e5, 1e6, 1e8])
def test_far_codes_neither_change_tokens_nor_stay_far(far):
    # Codes that nothing chose lie at m / eps there.
    torch.manual_seed(0)
    theirs = Quantize(DIM, 64)
    z = torch.randn(2000, DIM)
    theirs(z)
    theirs.embed[:, :6] = torch.randn(DIM, 6) * far
    theirs.embed_avg[:, :6] = theirs.embed[:, :6] * 1e-5
    theirs.cluster_size[:6] = 1e-12
    apart = (z.double()[:, :, None] - theirs.embed.double()).square().sum(1)
    tokens = apart.argmin(1)
    lowest = apart.sort(1).values
    clear = lowest[:, 1] - lowest[:, 0] > 1e-5  # not a tie within float32's rounding
    assert clear.sum() > 1990
    model = nn.ModuleList([theirs]).eval()
    assert torch.equal(from_rosinality(theirs.state_dict()).eval()(z).indices[clear], tokens[clear])
    replace_quantizers(model)
    assert torch.equal(model[0](z)[2][clear], tokens[clear])
    assert torch.equal(model[0].embed, theirs.embed)
    for _ in range(150):  # in which they come back, one place asked at a time
        model.train()[0](z)
    assert model[0].embed.abs().max() < 10
    export_quantizers(model)
    assert model[0].embed.abs().max() < 10


def test_other_classes_of_that_name_are_left_alone():
    class Other(Quantize):
        pass

    Other.__name__ = "Quantize"
    other = Other(DIM, SIZE)
    other.temperature = 1.0
    with pytest.raises(ValueError, match=r"Quantize of rosinality.*[Ll]eft alone.*Quantize"):
        replace_quantizers(nn.ModuleList([other]))


def test_half_precision():
    model = nn.ModuleList([Quantize(DIM, SIZE)]).bfloat16()
    replace_quantizers(model)
    quantized, _, tokens = model[0](torch.randn(3, 5, DIM).bfloat16())
    assert quantized.dtype == model[0].embed_code(tokens).dtype == torch.bfloat16
    assert model[0].vq.codebook.dtype == torch.float32
    export_quantizers(model)
    assert {value.dtype for value in model.state_dict().values()} == {torch.bfloat16}
