"""EnCodec's codebooks, in facebook's quantizer and in transformers' model, replaced by ours and restored."""

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

SIZE, DIM, LAYERS = 16, 6, 4


class EuclideanCodebook(nn.Module):
    """The attributes, state and results of facebook's class, for where encodec is not installed."""

    def __init__(
        self, dim, codebook_size, kmeans_init, kmeans_iters=10, decay=0.99, epsilon=1e-5, threshold_ema_dead_code=2
    ):
        super().__init__()
        self.decay, self.codebook_size, self.kmeans_iters = decay, codebook_size, kmeans_iters
        self.epsilon, self.threshold_ema_dead_code = epsilon, threshold_ema_dead_code
        codes = torch.zeros(codebook_size, dim) if kmeans_init else torch.randn(codebook_size, dim)
        self.register_buffer("inited", torch.tensor([float(not kmeans_init)]))
        self.register_buffer("cluster_size", torch.zeros(codebook_size))
        self.register_buffer("embed", codes)
        self.register_buffer("embed_avg", codes.clone())

    def encode(self, x):
        return (x[..., None, :] - self.embed).square().sum(-1).argmin(-1)

    def decode(self, embed_ind):
        return F.embedding(embed_ind, self.embed)

    def forward(self, x):
        if not self.inited:
            self.embed.copy_(x.detach().flatten(0, -2)[: self.codebook_size])
            self.embed_avg.copy_(self.embed)
            self.inited.fill_(1)
        tokens = self.encode(x)
        quantized = self.decode(tokens)
        if self.training:
            chosen = F.one_hot(tokens.flatten(), self.codebook_size).to(x.dtype)
            self.cluster_size.lerp_(chosen.sum(0), 1 - self.decay)
            self.embed_avg.lerp_(chosen.T @ x.detach().flatten(0, -2), 1 - self.decay)
            total = self.cluster_size.sum()
            counts = (self.cluster_size + self.epsilon) / (total + self.codebook_size * self.epsilon) * total
            self.embed.copy_(self.embed_avg / counts[:, None])
        return quantized, tokens


class VectorQuantization(nn.Module):
    def __init__(self, dim, codebook_dim=None, commitment_weight=1.0, **options):
        super().__init__()
        projects = codebook_dim not in (None, dim)
        self.project_in = nn.Linear(dim, codebook_dim) if projects else nn.Identity()
        self.project_out = nn.Linear(codebook_dim, dim) if projects else nn.Identity()
        self.commitment_weight = commitment_weight
        self._codebook = EuclideanCodebook(codebook_dim if projects else dim, **options)

    @property
    def codebook(self):
        return self._codebook.embed

    def encode(self, x):
        return self._codebook.encode(self.project_in(x.mT))

    def decode(self, embed_ind):
        return self.project_out(self._codebook.decode(embed_ind)).mT

    def forward(self, x):
        x = self.project_in(x.mT)
        quantized, tokens = self._codebook(x)
        loss = torch.zeros(1)
        if self.training:
            quantized = x + (quantized - x).detach()
            loss = loss + F.mse_loss(quantized.detach(), x) * self.commitment_weight
        return self.project_out(quantized).mT, tokens, loss


class ResidualVectorQuantization(nn.Module):
    def __init__(self, *, num_quantizers, **options):
        super().__init__()
        self.layers = nn.ModuleList(VectorQuantization(**options) for _ in range(num_quantizers))

    def forward(self, x, n_q=None):
        total, parts = 0, []
        for layer in self.layers[:n_q]:
            quantized, tokens, loss = layer(x)
            x, total = x - quantized, total + quantized
            parts.append((tokens, loss))
        tokens, losses = map(torch.stack, zip(*parts))
        return total, tokens, losses

    def encode(self, x, n_q=None):
        tokens = []
        for layer in self.layers[:n_q]:
            tokens.append(layer.encode(x))
            x = x - layer.decode(tokens[-1])
        return torch.stack(tokens)

    def decode(self, q_indices):
        return sum(layer.decode(tokens) for layer, tokens in zip(self.layers, q_indices))


def quantization_of_encodec(monkeypatch):
    """The real file, without the package around it, which needs torchaudio."""
    found = importlib.util.find_spec("encodec")
    if found is None:
        pytest.skip("encodec is not installed")
    package = types.ModuleType("encodec")
    package.__path__ = list(found.submodule_search_locations)
    monkeypatch.setitem(sys.modules, "encodec", package)
    return importlib.import_module("encodec.quantization.core_vq")


@pytest.fixture(params=["stand-in", "encodec"])
def make(request, monkeypatch):
    """Makes a trained ResidualVectorQuantization, facebook's or the one above."""
    kind = ResidualVectorQuantization
    if request.param == "encodec":
        kind = quantization_of_encodec(monkeypatch).ResidualVectorQuantization

    def make(threshold_ema_dead_code=0, kmeans_init=False, **options):
        torch.manual_seed(0)
        vq = kind(
            num_quantizers=LAYERS,
            **{"dim": DIM, "codebook_size": SIZE, "decay": 0.9, **options},
            kmeans_init=kmeans_init,
            threshold_ema_dead_code=threshold_ema_dead_code,
        )
        for layer in vq.layers if not kmeans_init else ():  # as trained codes are: none far away, all different
            layer._codebook.embed.normal_()
            layer._codebook.cluster_size.uniform_(1, 9)
            layer._codebook.embed_avg.copy_(layer._codebook.embed * layer._codebook.cluster_size[:, None])
        return nn.ModuleDict({"vq": vq}).eval()

    return make


@pytest.mark.parametrize("options", [{}, {"codebook_dim": 3}], ids=["plain", "projected"])
def test_a_replaced_quantizer_does_the_same(make, options):
    model = make(**options)
    vq, x = model["vq"], torch.randn(2, DIM, 30)
    quantized, tokens, losses = vq(x)
    codebook, few = vq.layers[1].codebook.clone(), vq.decode(tokens[:2])
    assert replace_quantizers(model) == [f"vq.layers.{i}._codebook" for i in range(LAYERS)]
    book = vq.layers[0]._codebook
    assert isinstance(book.vq, KohonenVQ)
    assert (book.vq.codebook_of(0).decay, book.vq.codebook_of(0).eps, book.codebook_size) == (0.9, 1e-5, SIZE)
    assert not book.training
    ours = vq(x)
    assert torch.equal(ours[1], tokens)
    torch.testing.assert_close((ours[0], ours[2]), (quantized, losses))
    assert torch.equal(vq.encode(x), tokens)
    assert torch.equal(vq.encode(x, n_q=2), tokens[:2])
    assert torch.equal(vq(x, n_q=2)[1], tokens[:2])
    torch.testing.assert_close(vq.decode(tokens), quantized)
    torch.testing.assert_close(vq.decode(tokens[:2]), few)
    assert torch.equal(vq.layers[1].codebook, codebook)


def test_the_encoder_learns_as_it_did_and_the_codes_by_the_rule(make):
    results = []
    for replaced in (False, True):
        model = make()
        if replaced:
            replace_quantizers(model)
        x = torch.linspace(-2, 2, 2 * DIM * 30).reshape(2, DIM, 30).sin().requires_grad_()
        quantized, _, losses = model.train()["vq"](x)
        (quantized.square().sum() + 10 * losses.mean()).backward()
        results.append((quantized.detach(), losses.detach(), x.grad))
    torch.testing.assert_close(results[1], results[0])
    before = [layer.codebook.clone() for layer in model["vq"].layers]
    model["vq"](torch.randn(2, DIM, 30), n_q=2)
    moved = [not torch.equal(layer.codebook, codes) for layer, codes in zip(model["vq"].layers, before)]
    assert moved == [True, True, False, False]  # those that were used
    before = [layer.codebook.clone() for layer in model["vq"].layers]
    model["vq"].encode(torch.randn(2, DIM, 30))
    assert all(torch.equal(layer.codebook, codes) for layer, codes in zip(model["vq"].layers, before))


def test_with_no_neighborhood_it_learns_as_theirs_does(make):
    batches, learned = torch.randn(20, 2, DIM, 40), []
    for replaced in (False, True):
        model = make().train()
        if replaced:
            replace_quantizers(model, neighborhood="none", count_smoothing="copy")
        for x in batches:
            model["vq"](x, n_q=1)
        learned.append(model["vq"].layers[0].codebook)
    torch.testing.assert_close(learned[1], learned[0])


def test_codes_that_are_not_there_yet_start_from_the_first_batch(make):
    model = make(kmeans_init=True).train()
    replace_quantizers(model)
    book = model["vq"].layers[0]._codebook
    assert book.inited.tolist() == [0]
    model["vq"](torch.randn(2, DIM, 30) + 50)
    assert book.inited.tolist() == [1]
    assert book.embed.mean() > 40

    model = make(kmeans_init=True).train()  # and there and back without a batch it still does
    replace_quantizers(model)
    export_quantizers(model)
    model["vq"](torch.randn(2, DIM, 30) + 50)
    assert model["vq"].layers[0].codebook.mean() > 10  # its first update pulls codes to the origin


def test_the_dead_code_threshold_stays_a_count(make):
    model = make(threshold_ema_dead_code=2)
    replace_quantizers(model)
    assert model["vq"].layers[0]._codebook.vq.codebook_of(0).dead_threshold == 2


def test_the_way_back(make):
    model = make()
    vq, x, kind = model["vq"], torch.randn(2, DIM, 30), type(model["vq"].layers[0]._codebook)
    keys = list(model.state_dict())
    replace_quantizers(model)
    for _ in range(10):
        model.train()["vq"](torch.randn(2, DIM, 30))
    model.eval()
    quantized, tokens, _ = vq(x)
    book = vq.layers[0]._codebook
    statistics = book.embed.clone(), book.embed_avg.clone(), book.cluster_size.clone()
    assert_exported(model, keys)
    theirs = vq.layers[0]._codebook
    assert type(theirs) is kind
    assert not theirs.training
    assert (theirs.decay, theirs.epsilon, theirs.threshold_ema_dead_code) == (0.9, 1e-5, 0)
    torch.testing.assert_close((theirs.embed, theirs.embed_avg, theirs.cluster_size), statistics)
    assert torch.equal(vq(x)[1], tokens)
    torch.testing.assert_close(vq(x)[0], quantized)
    before = theirs.embed.clone()
    model.train()["vq"](x)
    assert 0 < (theirs.embed - before).abs().max() < 1  # it learns on from there


def test_it_runs_without_topovq(tmp_path, monkeypatch):
    source = Path(__file__).read_text()
    source = source[source.index("class EuclideanCodebook") : source.index("def quantization_of_encodec")]
    imports = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n\n\n"
    (tmp_path / "core_vq.py").write_text(imports + source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "core_vq", raising=False)
    kind = importlib.import_module("core_vq").ResidualVectorQuantization
    model = kind(num_quantizers=2, dim=DIM, codebook_size=SIZE, kmeans_init=False, threshold_ema_dead_code=0)
    replace_quantizers(model, decay=0.5)
    x = torch.randn(2, DIM, 30)
    for _ in range(10):
        model(torch.randn(2, DIM, 30))
    tokens = model.eval().encode(x)
    export_quantizers(model)
    assert_runs_without_topovq(model, x, tokens, "model.encode(x)", [str(tmp_path)], tmp_path)


def test_half_precision(make):
    model = make().bfloat16()
    replace_quantizers(model)
    x = torch.randn(2, DIM, 30).bfloat16()
    tokens = model["vq"].encode(x)
    assert model["vq"].decode(tokens).dtype == model["vq"](x)[0].dtype == torch.bfloat16
    assert model["vq"].layers[0].codebook.dtype == torch.float32
    export_quantizers(model)
    assert {value.dtype for value in model.state_dict().values()} == {torch.bfloat16}


# transformers


@pytest.fixture
def encodec_model():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config = transformers.EncodecConfig(
        sampling_rate=1000,
        target_bandwidths=[0.5, 1.0, 2.0],
        num_filters=2,
        hidden_size=8,
        codebook_dim=8,
        codebook_size=SIZE,
        upsampling_ratios=[4, 2],
        num_lstm_layers=1,
    )
    model = transformers.EncodecModel(config).eval()
    for layer in model.quantizer.layers:
        layer.codebook.embed.normal_(std=0.3)
    return model


def test_a_whole_model_of_transformers(encodec_model):
    model, x = encodec_model, torch.randn(2, 1, 400)
    before = {rate: model(x, bandwidth=rate) for rate in (0.5, 1.0, 2.0)}
    assert len({tuple(output.audio_codes.shape) for output in before.values()}) == 3
    embed = model.quantizer.layers[0].codebook.embed.clone()
    names = replace_quantizers(model)
    assert names == [f"quantizer.layers.{i}.codebook" for i in range(model.quantizer.num_quantizers)]
    for rate, output in before.items():
        encoded = model.encode(x, bandwidth=rate)
        assert torch.equal(encoded.audio_codes, output.audio_codes)
        decoded = model.decode(encoded.audio_codes, encoded.audio_scales)
        torch.testing.assert_close(decoded.audio_values, model(x, bandwidth=rate).audio_values)
        torch.testing.assert_close(decoded.audio_values, output.audio_values)
    few = before[2.0].audio_codes[:, :, :2]
    assert model.decode(few, [None]).audio_values.shape == output.audio_values.shape
    assert torch.equal(model.quantizer.layers[0].codebook.embed, embed)
    assert model.quantizer.layers[0].codebook.inited


def test_transformers_codes_learn_in_training_mode_and_go_back(encodec_model):
    model, x = encodec_model, torch.randn(2, 1, 400)
    keys, kind = list(model.state_dict()), type(model.quantizer.layers[0].codebook)
    replace_quantizers(model)
    layer = model.quantizer.layers[0].codebook
    before = layer.embed.clone()
    model(x, bandwidth=2.0)
    assert torch.equal(layer.embed, before)
    for _ in range(10):
        model.train()(torch.randn(2, 1, 400), bandwidth=2.0)
    assert layer.vq.step == 10
    assert not torch.equal(layer.embed, before)
    output = model.eval()(x, bandwidth=2.0)
    assert_exported(model, keys)
    assert type(model.quantizer.layers[0].codebook) is kind
    after = model(x, bandwidth=2.0)
    assert torch.equal(after.audio_codes, output.audio_codes)
    torch.testing.assert_close(after.audio_values, output.audio_values)


def test_transformers_codes_can_be_frozen(encodec_model):
    replace_quantizers(encodec_model, freeze_codebook=True)
    before = encodec_model.quantizer.layers[0].codebook.embed.clone()
    encodec_model.train()(torch.randn(2, 1, 400), bandwidth=2.0)
    assert torch.equal(encodec_model.quantizer.layers[0].codebook.embed, before)
