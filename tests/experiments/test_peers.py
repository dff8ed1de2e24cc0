"""Quantizers of vector-quantize-pytorch behind our interface: tokens, losses, figures, training, and what they lack."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Generator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from experiments.peers import FSQ_LEVELS, MissingPackage, Peer, fsq_levels
from topovq.cli import main
from topovq.tokenizer.atlas import charts, map_picture
from topovq.tokenizer.data import Source
from topovq.tokenizer.models import VQVAE, VQVAE2, build_quantizer, check_options, load_pretrained
from topovq.tokenizer.tokens import decode, encode
from topovq.tokenizer.training import TrainConfig, info, read_record, train
from topovq.tokenizer.training.evaluate import count_tokens
from topovq.view.report import write_report

PEERS = ["vqp", "vqp-rotation", "simvq", "fsq", "lfq"]


def peer(kind: str, dim: int = 8, codebook_size: int = 64, **options: Any) -> Any:
    torch.manual_seed(0)
    return build_quantizer(kind, dim, codebook_size, options)


def features(batch: int = 8, dim: int = 8, seed: int = 1) -> Tensor:
    return torch.randn(batch, dim, 4, 4, generator=torch.Generator().manual_seed(seed))


# What they are


@pytest.mark.parametrize("kind", PEERS)
def test_tokens_decode_to_what_forward_gave(kind: str) -> None:
    vq = peer(kind)
    x_BCHW = features().requires_grad_()
    quantized, indices, loss = vq(x_BCHW)
    assert quantized.shape == x_BCHW.shape
    assert indices.shape == (8, 4, 4)
    assert indices.dtype == torch.int64
    assert loss.shape == ()
    (quantized.square().sum() + loss).backward()
    assert x_BCHW.grad is not None
    assert x_BCHW.grad.abs().sum() > 0
    vq.eval()
    quantized, indices, _ = vq(x_BCHW)
    assert torch.equal(vq.get_output_from_indices(indices), quantized)
    # What theirs returns for these vectors is the same, up to the rounding of their straight-through sum.
    theirs = vq.inner(x_BCHW)
    assert torch.equal(theirs[1].long(), indices)
    torch.testing.assert_close(theirs[0], quantized, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["vqp", "vqp-rotation", "simvq"])
def test_tokens_are_the_closest_codes(kind: str) -> None:
    vq = peer(kind)
    vq(features())
    vq.eval()
    x_BCHW = features(seed=2)
    flat_ND = x_BCHW.movedim(1, -1).reshape(-1, 8)
    closest_N = torch.cdist(flat_ND, vq.codebook.detach()).argmin(1)
    assert torch.equal(vq(x_BCHW).indices.reshape(-1), closest_N)


@pytest.mark.parametrize(("kind", "weight"), [("vqp", 0.25), ("vqp-rotation", 0.25), ("simvq", 1.25)])
def test_the_commitment_weighs_a_quarter(kind: str, weight: float) -> None:
    """SimVQ adds the term that moves its codes, which has the same value and weight 1."""
    vq = peer(kind)
    vq(features())  # k-means starts the codes here
    codes_KD = vq.codebook.detach().clone()
    x_BCHW = features(seed=2)
    _, indices, loss = vq(x_BCHW)
    error = (codes_KD[indices].movedim(-1, 1) - x_BCHW).square().mean()
    assert loss.item() == pytest.approx(weight * error.item(), rel=1e-5)


def test_the_gradient_is_straight_through_or_rotated() -> None:
    for kind, straight in (("vqp", True), ("vqp-rotation", False), ("simvq", True)):
        vq = peer(kind)
        vq(features())
        x_BCHW = features(seed=2).requires_grad_()
        vq(x_BCHW).quantized.sum().backward()
        assert x_BCHW.grad is not None
        assert torch.allclose(x_BCHW.grad, torch.ones_like(x_BCHW)) == straight


def test_codes_that_expire_start_anew_and_those_of_the_defaults_do_not() -> None:
    far = features() + 100
    for kind, alive in (("vqp", True), ("vqp-rotation", False)):
        vq = peer(kind, codebook_size=16)
        vq(features(64))
        for _ in range(400):  # long enough for a running count of dozens to fall below 2
            vq(far)
        assert bool((vq.codebook.mean(1) > 50).all()) == alive


def test_evaluation_before_training_does_not_start_the_codes() -> None:
    vq = peer("vqp").eval()
    assert vq(features()).indices.unique().tolist() == [0]
    vq.train()(features() + 10)
    assert vq.codebook.mean() > 5  # from the first training batch, not from what evaluation saw


def test_a_code_of_fsq_and_of_lfq_by_hand() -> None:
    fsq = peer("fsq", dim=2, codebook_size=9).eval()  # levels 3 and 3, no projection
    assert fsq.codebook_size == 9
    out = fsq(torch.tensor([-9.0, 9.0]).view(1, 2, 1, 1))
    assert out.quantized.flatten().tolist() == [-1, 1]
    assert out.indices.item() == 0 + 2 * 3
    lfq = peer("lfq", dim=3, codebook_size=8).eval()
    out = lfq(torch.tensor([0.5, -2.0, 0.1]).view(1, 3, 1, 1))
    assert out.quantized.flatten().tolist() == [1, -1, 1]
    assert out.indices.item() == 0b101


def test_levels_of_fsq() -> None:
    for size, levels in FSQ_LEVELS.items():
        assert fsq_levels(size) == levels
        assert abs(math.log2(math.prod(levels) / size)) < 0.1
    assert [math.prod(FSQ_LEVELS[size]) for size in (1_024, 4_096, 16_384, 65_536)] == [1_000, 4_375, 15_360, 64_000]
    assert math.prod(fsq_levels(16)) == 16
    assert math.prod(fsq_levels(2_048)) == 2_048
    with pytest.raises(ValueError, match="codebook_size=2 must be at least 3"):
        fsq_levels(2)


# Figures


@pytest.mark.parametrize("kind", PEERS)
def test_figures_by_hand(kind: str) -> None:
    vq = peer(kind)
    seen = [vq(features(seed=seed)).indices for seed in (1, 2)]
    first_K, second_K = (torch.bincount(indices.flatten(), minlength=vq.codebook_size).double() for indices in seen)
    share_K = (0.99 * first_K + second_K) / (0.99 * first_K + second_K).sum()
    perplexity = math.exp(-sum(p * math.log(p) for p in share_K.tolist() if p))
    used = int(((first_K + second_K) > 0).sum())
    health = vq.health()
    assert health.usage == pytest.approx(used / vq.codebook_size) == vq.usage.item()
    assert health.perplexity == pytest.approx(perplexity, rel=1e-5) == vq.perplexity.item()
    assert health.dead_codes == vq.codebook_size - used
    assert health.tokens == round(128 * 1.99)
    assert math.isnan(health.drift)
    assert vq.skipped.item() == 0
    hits = vq.hits.clone()
    vq.eval()(features(seed=3))
    assert torch.equal(vq.hits, hits)


def test_drift_is_that_of_the_codes() -> None:
    moving, fixed = peer("vqp-rotation"), peer("lfq")
    for vq in (moving, fixed):
        vq.health()
        vq(features())
    assert moving.health().drift > 0
    assert fixed.health().drift == 0


class Operations(TorchDispatchMode):
    """The names of all operations within."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2"}  # whose results only the device knows


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a")  # of theirs, that is cached
@pytest.mark.parametrize("kind", ["simvq", "fsq", "lfq"])
def test_those_that_say_so_wait_for_no_device_and_compile(kind: str) -> None:
    vq = peer(kind)
    assert vq.graphable
    x_BCHW = features().requires_grad_()
    with Operations() as done:
        quantized, _, loss = vq(x_BCHW)
        (quantized.sum() + loss).backward()
        vq.read_health()
    assert not done.names & WAITING
    torch._dynamo.reset()
    eager, other = peer(kind), peer(kind)
    compiled = torch.compile(other, backend="aot_eager")
    for seed in (1, 2):
        ours, theirs = eager(features(seed=seed)), compiled(features(seed=seed))
        assert torch.equal(ours.indices, theirs.indices)
        torch.testing.assert_close(ours.quantized, theirs.quantized)
    assert torch.equal(eager.hits, other.hits)


def test_those_that_wait_say_so() -> None:
    vq = peer("vqp")
    assert not vq.graphable
    with Operations() as done:
        vq(features())
    assert done.names & WAITING
    assert not peer("vqp-rotation").graphable


@pytest.mark.parametrize("kind", PEERS)
def test_autocast_does_not_make_them_coarser(kind: str) -> None:
    vq, other = peer(kind), peer(kind)
    x_BCHW = features()
    with torch.autocast("cpu", torch.bfloat16):
        torch.manual_seed(1)  # k-means draws vectors
        low = vq(x_BCHW)
    torch.manual_seed(1)
    assert torch.equal(low.indices, other(x_BCHW).indices)
    assert torch.equal(vq.codebook, other.codebook)


# In a model and a run


class Waves(Source):
    """16 smooth 8x8 images for training and 8 for validation."""

    def __init__(self) -> None:
        super().__init__("waves", 8, ((127.5,) * 3, (64.0,) * 3), np.arange(8), train_images=16)
        coarse = torch.rand(24, 3, 2, 2, generator=torch.Generator().manual_seed(0)) * 255
        images = torch.nn.functional.interpolate(coarse, size=(8, 8), mode="bilinear").to(torch.uint8)
        self.images, self.held_out = images[:16], images[16:]

    def resident(self) -> Tensor | None:
        return self.images

    def _train(self, batch_size: int, rows: range, seed: int, start: int) -> Generator[Tensor, None, None]:
        for i in itertools.count(start):
            yield self.images[self.indices(i, batch_size, seed)[rows.start : rows.stop]]

    def _validation(self, indices: np.ndarray, batch_size: int) -> Generator[Tensor, None, None]:
        yield from self.held_out[indices].split(batch_size)


def config(out: Path, kind: str, **changes: Any) -> TrainConfig:
    fields: dict[str, Any] = {
        "out": out,
        "quantizer": kind,
        "model_options": {"hidden": 8, "residual_hidden": 4, "residual_layers": 1},
        "codebook_size": 32,
        "code_dim": 4,
        "steps": 3,
        "batch_size": 8,
        "validate_every": 2,
        "checkpoint_every": 2,
        "device": "cpu",
    }
    return TrainConfig(**{**fields, **changes})


@pytest.mark.parametrize("kind", PEERS)
def test_each_trains_and_is_loaded_again(kind: str, tmp_path: Path) -> None:
    result = train(config(tmp_path, kind), source=Waves(), quiet=True)
    first, *rest = read_record(tmp_path / "record.jsonl")
    assert first["version_vector-quantize-pytorch"] == version("vector-quantize-pytorch")
    lines = [line for line in rest if line["event"] == "validation"]
    assert [line["step"] for line in lines] == [2, 3]
    vq: Any = load_pretrained(tmp_path).quantizers[0]
    assert isinstance(vq, Peer)
    last = lines[-1]
    assert last["train_usage"] == pytest.approx(vq.health().usage)
    assert last["dead_codes"] == pytest.approx((1 - last["train_usage"]) * vq.codebook_size)
    assert 0 < last["usage"] <= 1
    assert math.isfinite(result.best_loss)
    # The model and its statistics as they were: its figures on the validation images are those of the record.
    again = _validation_loss(load_pretrained(tmp_path))
    assert again == pytest.approx(last["loss"], rel=1e-5)


def _validation_loss(model: Any) -> float:
    with torch.no_grad():
        return model(Waves().held_out).reconstruction_loss.item()


@pytest.mark.parametrize("kind", ["vqp", "lfq"])
def test_a_run_is_resumed(kind: str, tmp_path: Path) -> None:
    train(config(tmp_path, kind, steps=2), source=Waves(), quiet=True)
    hits = load_pretrained(tmp_path).quantizers[0].hits.sum().item()
    train(config(tmp_path, kind, steps=3, resume=True), source=Waves(), quiet=True)
    now = load_pretrained(tmp_path).quantizers[0].hits.sum().item()
    assert now == pytest.approx(0.99 * hits + 0.01 * 8 * 4)  # 8 images of 4 tokens


def test_validation_counts_over_the_codes_that_there_are(tmp_path: Path) -> None:
    """Asked for 1,024 codes FSQ has 1,000; asked for 4,096 it has 4,375, of which the last must have a place."""
    train(config(tmp_path, "fsq", codebook_size=1_024, steps=1), source=Waves(), quiet=True)
    model = load_pretrained(tmp_path)
    tokens = model.encode(Waves().held_out)
    line = read_record(tmp_path / "record.jsonl")[-2]
    assert line["usage"] == pytest.approx(tokens.unique().numel() / 1_000)
    large: Any = VQVAE(image_size=8, hidden=8, codebook_size=4_096, code_dim=4, quantizer="fsq").quantizers[0]
    assert large.codebook_size == 4_375
    counts_LK = count_tokens(torch.full((1, 2, 2), 4_374), large.codebook_size)
    assert counts_LK[0, 4_374] == 4


def test_all_tokens_of_a_larger_fsq_are_written_and_read(tmp_path: Path) -> None:
    model = VQVAE(image_size=8, hidden=8, codebook_size=4_096, code_dim=4, quantizer="fsq").eval()
    vq: Any = model.quantizers[0]
    with torch.no_grad():
        vq.inner.project_in.weight.zero_()
        vq.inner.project_in.bias.fill_(9.0)  # every level at its highest: the last code
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "images").mkdir()
    from PIL import Image

    Image.new("RGB", (8, 8)).save(tmp_path / "images" / "black.png")
    encode(tmp_path / "model", tmp_path / "images", tmp_path / "tokens.npz", device="cpu", workers=0)
    assert decode(tmp_path / "model", tmp_path / "tokens.npz", tmp_path / "decoded", device="cpu") == 1
    assert model.encode(torch.zeros(1, 3, 8, 8, dtype=torch.uint8)).unique().tolist() == [4_374]


def test_there_is_no_map_and_everything_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = VQVAE2(image_size=16, hidden=8, codebook_size=32, code_dim=4, strides=(4, 2), quantizer="simvq")
    assert charts(model) == []
    with pytest.raises(ValueError, match="'simvq' have no places, so there is no map"):
        map_picture(model, charts(model), 0)
    with pytest.raises(AttributeError, match="no places on a map"):
        _ = model.quantizers[0].grid
    train(config(tmp_path / "run", "fsq", steps=1, tensorboard=True), source=Waves(), quiet=True)
    page = write_report([tmp_path / "run"], tmp_path / "report.html").read_text()
    assert "The codes of quantizer fsq have no places, so there is no map." in page
    assert "originals and reconstructions" in page
    assert "tokens moved" not in page
    assert info(tmp_path / "run")["model"]["quantizer"] == "fsq"
    with pytest.raises(SystemExit) as stopped:
        main(["explore", str(tmp_path / "run"), "--port", "0"])
    assert stopped.value.code == 2
    assert "have no places" in capsys.readouterr().err


# What they are not


def test_options_are_theirs() -> None:
    check_options("vqp", {"use_cosine_sim": True, "codebook_dim": 4})
    with pytest.raises(ValueError, match="unknown option of quantizer 'fsq': 'tau'"):
        check_options("fsq", {"tau": 0.1})
    with pytest.raises(ValueError, match="codebook_size=48 must be a power of 2"):
        peer("lfq", codebook_size=48)
    with pytest.raises(ValueError, match=r"\[B, C, h, w\] with C = dim = 8"):
        peer("fsq")(torch.randn(2, 3, 4, 4))
    with pytest.raises(ValueError, match="token 64 is out of range"):
        peer("simvq").get_output_from_indices(torch.full((1, 2, 2), 64))


def test_without_the_package_they_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "vector_quantize_pytorch", None)
    for kind in PEERS:
        with pytest.raises(MissingPackage, match="pip install vector-quantize-pytorch"):
            peer(kind)
    assert peer("ema").codebook_size == 64
    with pytest.raises(SystemExit) as stopped:
        main(["train", "photos", "--quantizer", "fsq", "--out", str(tmp_path / "run"), "--device", "cpu"])
    assert stopped.value.code == 2
    assert "pip install vector-quantize-pytorch" in capsys.readouterr().err
