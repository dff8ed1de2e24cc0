"""`topovq.load`, and what `encode` takes: whatever was saved, whatever an image is."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from small_runs import make_run

import topovq
from topovq import GradientVQ, GroupedResidualVQ, KohonenVQ, NeuralGas, ResidualVQ, SelfOrganizingMap, SoftKohonenVQ
from topovq.tokenizer.models import VQVAE, Tokenizer
from topovq.tokenizer.training import load_run
from topovq.tokenizer.training.checkpoint import checkpoints


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "mine")


def test_a_run_a_checkpoint_and_a_saved_model(run: Path, tmp_path: Path) -> None:
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    tokens = load_run(run).encode(images)
    load_run(run).save_pretrained(tmp_path / "saved")
    for path in (run, str(run), checkpoints(run)[-1], run / "model.safetensors", tmp_path / "saved"):
        model = topovq.load(path)
        assert isinstance(model, VQVAE)
        assert not model.training
        assert torch.equal(model.encode(images), tokens)


@pytest.mark.parametrize(
    "layer",
    [
        KohonenVQ(4, 16),
        GradientVQ(4, 16),
        SoftKohonenVQ(4, 16),
        ResidualVQ(4, 16, 2),
        GroupedResidualVQ(4, 16, 2, groups=2),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_a_saved_quantizer_is_of_its_class(layer: torch.nn.Module, tmp_path: Path) -> None:
    layer.save_pretrained(tmp_path)  # type: ignore[operator]
    loaded = topovq.load(tmp_path)
    assert type(loaded) is type(layer)
    x = torch.randn(8, 4)
    assert torch.equal(loaded(x)[1], layer.eval()(x)[1])


def test_a_map(tmp_path: Path) -> None:
    table = np.random.default_rng(0).normal(size=(30, 3))
    for estimator in (SelfOrganizingMap((3, 4), random_state=0), NeuralGas(6, random_state=0)):
        estimator.fit(table).save(tmp_path / "map")
        loaded = topovq.load(tmp_path / "map")
        assert type(loaded) is type(estimator)
        assert (loaded.predict(table) == estimator.predict(table)).all()


def test_what_cannot_be_loaded_is_said(run: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is nothing at '.*nowhere'"):
        topovq.load(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"holds neither a model \(config.json\) nor a checkpoint"):
        topovq.load(tmp_path)
    (tmp_path / "notes.txt").write_text("no map")
    with pytest.raises(ValueError, match=r"notes.txt is no file that topovq saved"):
        topovq.load(tmp_path / "notes.txt")
    with pytest.raises(ValueError, match=r"is the model of a run \(vqvae\), not a saved KohonenVQ: topovq.load\('"):
        KohonenVQ.from_pretrained(run)
    (tmp_path / "record.jsonl").write_text("{}\n")
    with pytest.raises(FileNotFoundError, match=r"no config.json in .*: it is a run, whose model topovq.load\('"):
        KohonenVQ.from_pretrained(tmp_path)


@pytest.fixture(scope="module", params=[1, 3], ids=["gray", "color"])
def model(request: pytest.FixtureRequest) -> Tokenizer:
    torch.manual_seed(0)
    channels = request.param
    sizes = {"hidden": 8, "residual_hidden": 4, "codebook_size": 64, "code_dim": 4}
    spread = {"quantizer": "ema", "quantizer_options": {"kmeans_init": True}}
    made = VQVAE(16, channels, **sizes, **spread, mean=[120.0] * channels, std=[60.0] * channels)
    made(torch.randint(0, 256, (8, channels, 16, 16), dtype=torch.uint8))  # its codes go to what it sees
    return made.eval()


def test_encode_takes_pixels_of_every_kind(model: Tokenizer) -> None:
    pixels = torch.randint(0, 256, (3, model.channels, 16, 16), dtype=torch.uint8)
    tokens = model.encode(pixels)
    assert len(tokens.unique()) > 10
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(model.encode(pixels.double() / 255), tokens)
        assert torch.equal(model.encode(model.normalize(pixels)), tokens)
    pixels[0], pixels[1] = 0, 255
    with pytest.warns(UserWarning, match=r"floats from 0 to 255 are neither in \[0, 1\] nor normalized, .* is -2 to"):
        model.encode(pixels.float())


def test_encode_takes_pictures_and_paths(model: Tokenizer, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    picture = Image.fromarray(pixels)
    picture.save(tmp_path / "a.png")
    batch = torch.from_numpy(pixels).permute(2, 0, 1)[None]
    if model.channels == 1:
        batch = batch.float().mean(1, keepdim=True).round().to(torch.uint8)
    tokens = model.encode(batch)
    for given in (picture, [picture], str(tmp_path / "a.png"), tmp_path / "a.png"):
        assert torch.equal(model.encode(given), tokens)
    assert model.encode([picture, tmp_path / "a.png"]).shape == (2, 4, 4)
    assert model.encode(picture.resize((80, 40))).shape == (1, 4, 4)
    with pytest.raises(TypeError, match="an image of type int is no tensor, no PIL image and no path"):
        model.encode([3])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="the list of images is empty"):
        model.encode([])
