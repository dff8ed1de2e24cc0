"""The report: its numbers by hand, and the page of real runs: whole, alone, and within its size."""

from __future__ import annotations

import base64
import io
import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from small_runs import make_run

from topovq.cli import main
from topovq.metrics import psnr, ssim
from topovq.tokenizer.training import load_run, open_data, read_record
from topovq.view.report import study, write_report
from topovq.view.report.curves import curves
from topovq.view.report.images import colored, data_uri, sheet


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("runs")
    return {
        "plain": make_run(root / "plain"),
        "hexagons": make_run(
            root / "hexagons", model="vqvae2", quantizer_options={"grid": [3, 4], "topology": "hexagonal"}
        ),
        "eleven": make_run(root / "eleven", codebook_size=11),
    }


def test_psnr_and_ssim_by_hand() -> None:
    black, gray = torch.zeros(3, 8, 8, dtype=torch.uint8), torch.full((3, 8, 8), 51, dtype=torch.uint8)
    assert psnr(gray, black) == pytest.approx(20 * math.log10(5))
    assert psnr(gray, gray) == math.inf
    assert float(ssim(gray[None], gray[None])) == pytest.approx(1)
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    assert float(ssim(gray[None], black[None])) == pytest.approx(c1 * c2 / ((51**2 + c1) * c2))
    assert float(ssim(gray[None, :, :4, :4], black[None, :, :4, :4])) == pytest.approx(c1 / (51**2 + c1))


def test_a_curve_goes_through_its_points_and_survives_nan() -> None:
    drawn = curves("loss", [("a<b", [(0, 2.0), (10, 1.0), (20, math.nan), (30, None)]), ("never finite", [(0, None)])])
    assert re.findall("<title>(.*)</title>", drawn) == ["a&lt;b, step 0: 2", "a&lt;b, step 10: 1"]
    (line,) = re.findall(r'd="M ([^"]*)" clip-path[^>]*stroke: var\(--run0\)', drawn)
    (left, top), (right, middle) = (map(float, point.split()) for point in line.split("L"))
    assert left < right
    assert top < middle  # SVG counts rows from the top
    assert "no finite value" in curves("loss", [("a", [(1, math.inf)])])


def test_curves_have_labelled_axes_and_only_colors_of_the_page() -> None:
    drawn = curves("codes in use", [("a", [(0, 0.0), (600, 0.5)])], percent=True)
    texts = re.findall("<text[^>]*>([^<]*)</text>", drawn)
    assert {"codes in use", "step", "0", "600", "0%", "100%"} <= set(texts)
    assert not re.search("(?:fill|stroke): #", drawn)  # which would not change by night


def test_pictures_keep_to_their_bytes() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (256, 256, 4), dtype=np.uint8)
    whole, kind, small = data_uri(noise), "data:image/jpeg;base64,", data_uri(noise, 20_000)
    assert whole.startswith("data:image/png")
    assert small.startswith(kind)
    assert len(base64.b64decode(small.removeprefix(kind))) <= 20_000
    page = sheet([[torch.full((3, 2, 2), 9, dtype=torch.uint8)] * 2])
    assert page[0, :, 3].tolist() == [255, 255, 0, 255, 255]
    assert colored(np.array([1.0, 1.0]), "magma").shape == (2, 3, 1, 1)


def test_the_page_stands_alone_and_shows_everything(runs: dict[str, Path], tmp_path: Path) -> None:
    page = write_report(list(runs.values()), tmp_path / "deep" / "report.html")
    text = page.read_text()
    assert page.stat().st_size < 5_000_000
    assert [path.name for path in page.parent.iterdir()] == ["report.html"]
    assert "<script" not in text
    assert not re.findall(r'src="(?!data:)|<link [^>]*href="(?!data:)|url\((?!#)|@import', text)
    for word in (
        "validation loss",
        "perplexity",
        "usage",
        "training loss",
        "U-matrix",
        "Hits",
        "SSIM",
        "version_torch",
        "hardware",
    ):
        assert word in text
    assert "tokens of top alone" in text
    assert "3 x 4 hexagonal map" in text
    assert re.search(r"usage [\d.]+%, \d+ of 11 codes in 16,384 tokens", text)
    for data in re.findall(r'src="data:image/png;base64,([^"]+)"', text):
        with Image.open(io.BytesIO(base64.b64decode(data))) as image:
            image.verify()
    strokes = re.findall(r"stroke: var\(--run(\d)\); stroke-(?:width|dasharray)", text)
    assert sorted(strokes) == sorted("012" * 4)  # four charts of three runs
    ids = re.findall(r' id="([^"]*)"', text)
    assert len(set(ids)) == len(ids)


def test_the_training_loss_is_drawn_where_the_record_has_it(runs: dict[str, Path], tmp_path: Path) -> None:
    run = shutil.copytree(runs["plain"], tmp_path / "run")
    lines = read_record(run / "record.jsonl")
    for line in lines:
        for name in ("train_loss", "crc32"):
            line.pop(name, None)
    (run / "record.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "training loss" not in write_report([run], tmp_path / "before.html").read_text()
    lines = [{**line, "train_loss": 1 / line["step"]} if line["event"] == "validation" else line for line in lines]
    (run / "record.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = write_report([run], tmp_path / "after.html").read_text()
    (chart,) = re.findall(r'<svg class="chart" role="img" aria-label="training loss".*?</svg>', text, re.DOTALL)
    assert re.findall("<title>(.*)</title>", chart) == ["run, step 2: 0.5", "run, step 4: 0.25"]


def test_hits_are_the_tokens_of_the_images(runs: dict[str, Path]) -> None:
    look = study(runs["plain"], limit=5)
    assert look.images_BCHW.shape == (5, 3, 32, 32)
    tokens = look.model.encode(look.images_BCHW)
    assert isinstance(tokens, torch.Tensor)
    assert look.hits[0].tolist() == [int((tokens == code).sum()) for code in range(12)]


def test_a_model_without_its_record_or_data_is_still_shown(runs: dict[str, Path], tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(runs["plain"] / name, bare)
    text = write_report([bare], tmp_path / "bare.html").read_text()
    assert "no record of validations" in text
    assert "photographs that come with the package" in text
    moved = shutil.copytree(runs["plain"], tmp_path / "moved")
    record = moved / "record.jsonl"
    edited = record.read_text().replace('"data": "photos"', '"data": "gone/away"')
    record.write_text(re.sub(r', "crc32": "\w+"', "", edited))
    assert "could not be opened" in study(moved).source


def test_the_command_line_writes_it_and_training_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    small = ["--steps", "2", "--batch-size", "4", "--codebook-size", "12", "--device", "cpu"]
    main(["train", "photos", "--out", "a", *small, "--model-options", "hidden=16"])
    assert "its report: a/report.html" in capsys.readouterr().out
    assert Path("a/report.html").read_text().endswith("</html>\n")
    main(["report", "a", "a", "-o", "both.html"])
    assert "both.html" in capsys.readouterr().out
    assert Path("both.html").is_file()
    with pytest.raises(SystemExit) as stopped:
        main(["report", "missing"])
    assert stopped.value.code == 2
    assert "there is no run at missing" in capsys.readouterr().err


def test_tensorboard_shows_the_maps_and_the_reconstructions(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    make_run(tmp_path / "run", model="vqvae2", tensorboard=True)
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    assert set(events.Tags()["images"]) == {"validation/top", "validation/bottom", "validation/reconstructions"}
    shown = events.Images("validation/reconstructions")
    assert [event.step for event in shown] == [2, 4]
    picture = Image.open(io.BytesIO(shown[-1].encoded_image_string))
    assert picture.size == (8 * 32, 2 * 32)
    with open_data("photos", size=32) as source:
        images = next(iter(source.validation(8)))
    assert np.array_equal(np.asarray(picture)[:32, 32:64], images[1].permute(1, 2, 0).numpy())
    ours = load_run(tmp_path / "run")
    assert np.array_equal(
        np.asarray(picture)[32:, :32], ours.decode(ours.encode(images[:1]))[0].permute(1, 2, 0).numpy()
    )
