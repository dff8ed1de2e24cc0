"""DAC's quantizers, which search by direction and put out plain codes, replaced by ours and restored."""

import importlib
import importlib.util
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from there_and_back import assert_exported, assert_runs_without_topovq
from torch import nn

from topovq import KohonenVQ
from topovq.convert import export_quantizers, replace_quantizers

SIZE, DIM, CHANNELS, LAYERS = 32, 3, 10, 4


class VectorQuantize(nn.Module):
    """The attributes, state and results of descript's class, for where dac is not installed."""

    def __init__(self, input_dim, codebook_size, codebook_dim):
        super().__init__()
        self.codebook_size, self.codebook_dim = codebook_size, codebook_dim
        self.in_proj = nn.utils.weight_norm(nn.Conv1d(input_dim, codebook_dim, 1))
        self.out_proj = nn.utils.weight_norm(nn.Conv1d(codebook_dim, input_dim, 1))
        self.codebook = nn.Embedding(codebook_size, codebook_dim)

    def forward(self, z):
        z_e = self.in_proj(z)
        z_q, tokens = self.decode_latents(z_e)
        moves_encoder, moves_codes = (z_e - z_q.detach()).square(), (z_q - z_e.detach()).square()
        z_q = self.out_proj(z_e + (z_q - z_e).detach())
        return z_q, moves_encoder.mean([1, 2]), moves_codes.mean([1, 2]), tokens, z_e

    def embed_code(self, embed_id):
        return self.codebook(embed_id)

    def decode_code(self, embed_id):
        return self.embed_code(embed_id).mT

    def decode_latents(self, latents):
        directions = F.normalize(latents, dim=1).mT[:, :, None, :] - F.normalize(self.codebook.weight, dim=1)
        tokens = directions.square().sum(-1).argmin(-1)
        return self.decode_code(tokens), tokens


class ResidualVectorQuantize(nn.Module):
    def __init__(self, input_dim, n_codebooks, codebook_size, codebook_dim, quantizer_dropout=0.0):
        super().__init__()
        self.n_codebooks, self.quantizer_dropout = n_codebooks, quantizer_dropout
        self.quantizers = nn.ModuleList(
            VectorQuantize(input_dim, codebook_size, codebook_dim) for _ in range(n_codebooks)
        )

    def forward(self, z, n_quantizers=None):
        counts = torch.full((len(z),), n_quantizers or self.n_codebooks)
        if self.training:
            dropped = int(len(z) * self.quantizer_dropout)
            counts[:dropped] = torch.randint(1, self.n_codebooks + 1, (dropped,))
        total, commitment, codebook, tokens, latents = 0, 0, 0, [], []
        for i, quantizer in enumerate(self.quantizers[: int(counts.max())]):
            z_q, commitment_i, codebook_i, tokens_i, z_e = quantizer(z)
            used = i < counts
            total, z = total + z_q * used[:, None, None], z - z_q
            commitment = commitment + (commitment_i * used).mean()
            codebook = codebook + (codebook_i * used).mean()
            tokens.append(tokens_i)
            latents.append(z_e)
        return total, torch.stack(tokens, 1), torch.cat(latents, 1), commitment, codebook

    def from_codes(self, codes):
        parts = [vq.decode_code(tokens) for vq, tokens in zip(self.quantizers, codes.unbind(1))]
        return sum(vq.out_proj(part) for vq, part in zip(self.quantizers, parts)), torch.cat(parts, 1), codes

    def from_latents(self, latents):
        found = [vq.decode_latents(part) for vq, part in zip(self.quantizers, latents.split(DIM, 1))]
        total = sum(vq.out_proj(part) for vq, (part, _) in zip(self.quantizers, found))
        return total, torch.cat([part for part, _ in found], 1), torch.stack([tokens for _, tokens in found], 1)


def quantize_of_dac(monkeypatch):
    """The real file, without the packages around it, which need audiotools."""
    found = importlib.util.find_spec("dac")
    if found is None:
        pytest.skip("descript-audio-codec is not installed")
    for name, folder in (("dac", ""), ("dac.nn", "nn")):
        package = types.ModuleType(name)
        package.__path__ = [str(Path(found.submodule_search_locations[0]) / folder)]
        monkeypatch.setitem(sys.modules, name, package)
    return importlib.import_module("dac.nn.quantize")


@pytest.fixture(params=["stand-in", "dac"])
def model(request, monkeypatch):
    """A model that holds a ResidualVectorQuantize, descript's or the one above, with codes of many lengths."""
    kind = ResidualVectorQuantize
    if request.param == "dac":
        kind = quantize_of_dac(monkeypatch).ResidualVectorQuantize
    torch.manual_seed(0)
    rvq = kind(CHANNELS, LAYERS, SIZE, DIM, quantizer_dropout=0.5)
    for quantizer in rvq.quantizers:
        quantizer.codebook.weight.data *= torch.rand(SIZE, 1) * 4
    return nn.ModuleDict({"rvq": rvq}).eval()


def test_by_hand():
    vq = VectorQuantize(2, 2, 2)
    nn.utils.remove_weight_norm(vq.in_proj), nn.utils.remove_weight_norm(vq.out_proj)
    for projection in (vq.in_proj, vq.out_proj):
        projection.weight.data = torch.eye(2)[:, :, None]
        projection.bias.data.zero_()
    vq.codebook.weight.data = torch.tensor([[3.0, 0.0], [0.0, 0.5]])
    model = nn.ModuleList([vq])
    replace_quantizers(model, neighborhood="none", decay=0.5, update_empty=False)
    # Both lie closer to the second code, but the first of them in the direction of the first code.
    z = torch.tensor([[[0.5, 0.2], [0.4, 0.4]]])  # [B, D, T]
    quantized, commitment, codebook, tokens, latents = model[0](z)
    assert tokens.tolist() == [[0, 1]]
    assert quantized.tolist() == [[[3.0, 0.0], [0.0, 0.5]]]
    # (2.5^2 + 0.4^2 + 0.2^2 + 0.1^2) / 4
    torch.testing.assert_close(commitment, torch.tensor([1.615]))
    torch.testing.assert_close(codebook, torch.tensor([1.615]))
    assert torch.equal(latents, z)
    # m = (w + x) / 2 and N = 1: lengths are kept and learned.
    torch.testing.assert_close(model[0].codebook.weight, torch.tensor([[1.75, 0.2], [0.1, 0.45]]))


def test_a_replaced_quantizer_does_the_same(model):
    rvq, z = model["rvq"], torch.randn(2, CHANNELS, 40)
    before, few = rvq(z), rvq(z, n_quantizers=2)
    codes, latents = before[1], before[2]
    from_codes, from_two, from_latents = rvq.from_codes(codes), rvq.from_codes(codes[:, :2]), rvq.from_latents(latents)
    projection = rvq.quantizers[0].in_proj
    assert replace_quantizers(model) == [f"rvq.quantizers.{i}" for i in range(LAYERS)]
    ours = rvq.quantizers[0]
    assert isinstance(ours.codebook.vq, KohonenVQ)
    assert ours.in_proj is projection
    assert (ours.codebook_size, ours.codebook_dim, ours.training) == (SIZE, DIM, False)
    for after, wanted in (
        (rvq(z), before),
        (rvq(z, n_quantizers=2), few),
        (rvq.from_codes(codes), from_codes),
        (rvq.from_codes(codes[:, :2]), from_two),
        (rvq.from_latents(latents), from_latents),
    ):
        torch.testing.assert_close(after, wanted)
    assert torch.equal(rvq(z)[1], codes)
    assert torch.equal(ours.embed_code(codes[:, 0]), ours.codebook.weight[codes[:, 0]])


def test_the_encoder_learns_as_it_did_and_the_codes_by_the_rule(model):
    rvq, z = model.train()["rvq"], torch.randn(4, CHANNELS, 40)
    results = []
    for replaced in (False, True):
        if replaced:
            replace_quantizers(model)
            codes = rvq.quantizers[3].codebook.weight.clone()
        x = z.clone().requires_grad_()
        model.zero_grad()
        torch.manual_seed(1)  # the same samples lose the same quantizers
        total, _, _, commitment, codebook = rvq(x)
        (total.square().sum() + 0.25 * commitment + codebook).backward()
        projections = [rvq.quantizers[1].in_proj, rvq.quantizers[1].out_proj]
        grads = [parameter.grad for projection in projections for parameter in projection.parameters()]
        results.append((total.detach(), commitment.detach(), codebook.detach(), x.grad, grads))
    torch.testing.assert_close(results[1], results[0])
    assert all(vq.codebook.vq.step == 1 for vq in rvq.quantizers)
    assert not torch.equal(rvq.quantizers[3].codebook.weight, codes)
    codes = rvq.quantizers[3].codebook.weight.clone()
    rvq.from_latents(torch.randn(4, DIM * LAYERS, 5))  # decoding teaches nothing
    assert torch.equal(rvq.quantizers[3].codebook.weight, codes)


def test_the_codes_come_to_fit_the_data(model):
    replace_quantizers(model, steps=200, kmeans_init=False)
    vq, z = model["rvq"].quantizers[0].train(), torch.randn(4, CHANNELS, 100)
    first = vq(z)[1].mean()
    for _ in range(200):
        vq(z)
    assert vq(z)[1].mean() < 0.5 * first
    assert vq.codebook.vq.usage == 1


def test_the_way_back(model):
    rvq, z, kind = model["rvq"], torch.randn(2, CHANNELS, 40), type(model["rvq"].quantizers[0])
    keys = list(model.state_dict())
    rvq.quantizers[1].codebook.requires_grad_(False)
    replace_quantizers(model)
    model.train()
    for _ in range(10):
        rvq(torch.randn(2, CHANNELS, 40))
    before, projection = model.eval()["rvq"](z), rvq.quantizers[0].out_proj
    weights = [vq.codebook.weight.clone() for vq in rvq.quantizers]
    assert_exported(model, keys)
    theirs = rvq.quantizers[0]
    assert type(theirs) is kind
    assert type(theirs.codebook) is nn.Embedding
    assert theirs.out_proj is projection
    assert (theirs.codebook.weight.requires_grad, rvq.quantizers[1].codebook.weight.requires_grad) == (True, False)
    assert all(torch.equal(vq.codebook.weight, weight) for vq, weight in zip(rvq.quantizers, weights))
    after = rvq(z)
    assert torch.equal(after[1], before[1])
    torch.testing.assert_close(after, before)
    model.train()["rvq"](z)[4].backward()  # the codebook loss moves codes again
    assert theirs.codebook.weight.grad is not None


def test_it_runs_without_topovq(tmp_path, monkeypatch):
    source = Path(__file__).read_text()
    source = source[source.index("class VectorQuantize") : source.index("class ResidualVectorQuantize")]
    imports = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n\n\n"
    (tmp_path / "quantize.py").write_text(imports + source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "quantize", raising=False)
    model = nn.ModuleList([importlib.import_module("quantize").VectorQuantize(CHANNELS, SIZE, DIM)])
    replace_quantizers(model)
    with torch.no_grad():
        for _ in range(10):
            model[0](torch.randn(2, CHANNELS, 40))
        x = torch.randn(2, CHANNELS, 40)
        tokens = model.eval()[0](x)[3]
    export_quantizers(model)
    assert_runs_without_topovq(model, x, tokens, "model[0](x)[3]", [str(tmp_path)], tmp_path)


def test_half_precision_and_frozen_codes(model):
    model.bfloat16().requires_grad_(False)
    replace_quantizers(model)
    rvq, z = model.train()["rvq"], torch.randn(2, CHANNELS, 40).bfloat16()
    codes = rvq.quantizers[0].codebook.weight.clone()
    total, tokens = rvq(z)[:2]
    assert (
        total.dtype == rvq.from_codes(tokens)[0].dtype == rvq.quantizers[0].embed_code(tokens).dtype == torch.bfloat16
    )
    assert codes.dtype == torch.float32
    assert torch.equal(rvq.quantizers[0].codebook.weight, codes)
    export_quantizers(model)
    assert {value.dtype for value in model.state_dict().values()} == {torch.bfloat16}


def test_codes_without_a_direction_are_refused(model):
    model["rvq"].quantizers[1].codebook.weight.data[[3, 7]] = 0
    with pytest.raises(ValueError, match=r"codes \[3, 7\] are all zeros") as caught:
        replace_quantizers(model)
    assert "'rvq.quantizers.1'" in caught.value.__notes__[0]
    assert not hasattr(model["rvq"].quantizers[0], "original")


@pytest.mark.parametrize("weight_norm", [False, True])
def test_a_whole_model_of_transformers(weight_norm):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config = transformers.DacConfig(
        encoder_hidden_size=4,
        downsampling_ratios=[2, 4],
        decoder_hidden_size=16,
        n_codebooks=LAYERS,
        codebook_size=SIZE,
        codebook_dim=DIM,
        quantizer_dropout=0.5,
    )
    model = transformers.DacModel(config).eval()
    if weight_norm:
        model.apply_weight_norm()
    x = torch.randn(2, 1, 320)
    keys, kind = list(model.state_dict()), type(model.quantizer.quantizers[0])
    before, few = model(x), model.encode(x, n_quantizers=2)
    latents = model.quantizer.from_latents(before.projected_latents)
    decoded = model.decode(audio_codes=before.audio_codes[:, :2])
    assert replace_quantizers(model) == [f"quantizer.quantizers.{i}" for i in range(LAYERS)]
    after = model(x)
    assert torch.equal(after.audio_codes, before.audio_codes)
    torch.testing.assert_close(tuple(after.values()), tuple(before.values()))
    torch.testing.assert_close(tuple(model.encode(x, n_quantizers=2).values()), tuple(few.values()))
    torch.testing.assert_close(model.quantizer.from_latents(before.projected_latents), latents)
    assert torch.equal(model.decode(audio_codes=before.audio_codes[:, :2]).audio_values, decoded.audio_values)

    weights = model.quantizer.quantizers[0].codebook.weight.clone()
    model.train()
    for _ in range(3):
        output = model(torch.randn(2, 1, 320))
        (output.audio_values.square().mean() + output.loss.mean()).backward()
    assert model.encoder.conv1.bias.grad.abs().sum() > 0
    assert not torch.equal(model.quantizer.quantizers[0].codebook.weight, weights)
    before = model.eval()(x)
    assert_exported(model, keys)
    assert type(model.quantizer.quantizers[0]) is kind
    after = model(x)
    assert torch.equal(after.audio_codes, before.audio_codes)
    torch.testing.assert_close(tuple(after.values()), tuple(before.values()))
