"""The demo, a few steps of it: both runs, the page and the numbers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from PIL import Image

from topovq import KohonenVQ
from topovq.demo import demo, demo_config
from topovq.demo_generate import demo_generate
from topovq.tokenizer.models import VQVAE
from topovq.view.pictures import codebook_map, film, pixel_error, shifted

SMALL = {"image_size": 16, "hidden": 16, "residual_hidden": 8, "codebook_size": 8, "code_dim": 8}


def test_the_page_stands_alone_and_the_numbers_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "demo" / "kohonen").mkdir(parents=True)
    (tmp_path / "demo" / "kohonen" / "record.jsonl").write_text('{"event": "config"}\n')  # an earlier demo's
    page = demo(tmp_path / "demo", steps=2)
    text = page.read_text()
    assert "<h1>A codebook with a map</h1>" in text
    assert re.search(r"by \d+ gray levels with KSOM and by \d+ with EMA-VQ", text)
    for heading in ("KSOM: the map", "EMA-VQ: the map", "KSOM: tokens moved on the map", "EMA-VQ: tokens moved"):
        assert f"<h2>{heading}" in text
    assert not re.findall(r'src="(?!data:)', text)
    with Image.open(tmp_path / "demo" / "demo.png") as image:
        assert min(image.size) > 1000
    output = capsys.readouterr().out
    for line in ("validation loss:", "usage of the codes:", "error after a shift of one:"):
        assert re.search(rf"{line} +KSOM \S+.*EMA-VQ \S+", output)
    assert str(page.resolve()) in output.replace("\n", "")


def test_the_twins_differ_in_their_learning_rule_alone() -> None:
    ours, theirs = (demo_config(kind, Path("x"), 600).as_dict() for kind in ("kohonen", "ema"))
    assert {name for name in ours if ours[name] != theirs[name]} == {"quantizer"}


def test_the_quantizer_is_as_a_user_gets_it() -> None:
    config = demo_config("kohonen", Path("x"), 600).resolve("cpu")
    (trained,) = config.build_model(32, [0.0] * 3, [1.0] * 3).quantizers
    plain = KohonenVQ(config.code_dim, config.codebook_size, steps=600, accept_image_fmap=True)
    plain.load_state_dict(trained.state_dict())
    assert repr(plain.neighborhood) == repr(trained.neighborhood)
    for _ in range(3):
        features = torch.randn(2, config.code_dim, 8, 8)
        plain(features)
        trained(features)
    assert torch.equal(plain.codebook, trained.codebook)


def test_the_map_shows_every_code_at_its_place() -> None:
    torch.manual_seed(0)
    model = VQVAE(**SMALL, quantizer_options={"grid": [2, 4]}).eval()
    picture = codebook_map(model)
    assert picture.shape == (8, 16, 3)
    field = model.decode(torch.full((1, 3, 3), 6))  # code 6 lies in row 1, column 2
    assert torch.equal(torch.from_numpy(picture[4:8, 8:12]), field[0, :, 4:8, 4:8].permute(1, 2, 0))


def test_the_map_is_white_where_there_is_no_code() -> None:
    torch.manual_seed(0)
    picture = codebook_map(VQVAE(**{**SMALL, "codebook_size": 7}).eval())  # 3 x 3
    assert picture.shape == (12, 12, 3)
    assert (picture[8:, 4:] == 255).all()
    assert (picture[:8] != 255).any()


def test_shifting_moves_tokens_on_the_map() -> None:
    torch.manual_seed(0)
    model = VQVAE(**SMALL, quantizer_options={"grid": [2, 4]}).eval()
    images = (torch.rand(2, 3, 16, 16) * 255).to(torch.uint8)
    tokens = model.encode(images)
    assert isinstance(tokens, torch.Tensor)
    rows, columns = tokens // 4, tokens % 4
    moved = rows * 4 + (columns + 1).clamp(max=3)
    assert torch.equal(shifted(model, images, (0, 1)), model.decode(moved))
    assert torch.equal(shifted(model, images, (0, 0)), model.decode(tokens))


def test_films_and_errors_by_hand() -> None:
    black, white = torch.zeros(1, 3, 2, 2, dtype=torch.uint8), torch.full((1, 3, 2, 2), 255, dtype=torch.uint8)
    assert pixel_error(black, white) == 255
    strip = film(torch.cat([black, white]))
    assert strip.shape == (2, 4, 3)
    assert strip[0, :, 0].tolist() == [0, 0, 255, 255]


def test_the_demo_that_generates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prior").mkdir()
    (tmp_path / "prior" / "record.jsonl").write_text('{"event": "config"}\n')  # an earlier demo's
    picture = demo_generate(tmp_path, steps=3)
    with Image.open(picture) as image:
        assert min(image.size) > 400
    with Image.open(tmp_path / "samples.png") as image:
        assert image.size == (10 * 66 + 2, 8 * 66 + 2)
    assert len(list((tmp_path / "digits").rglob("*.png"))) == 1_797
    assert len(list((tmp_path / "digits" / "val").iterdir())) == 10
    said = capsys.readouterr().out
    assert re.search(r"bits of an image: \d+ with the prior, 112 as plain tokens", said)
    assert f"explore {tmp_path / 'tokenizer'} --prior {tmp_path / 'prior'}" in said.replace("\n", "")
