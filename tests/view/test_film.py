"""The film of a training: its frames, from snapshots or checkpoints, the animation, and the JSON of its page."""

from __future__ import annotations

import base64
import io
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from PIL import Image, ImageSequence
from small_runs import make_run

from topovq.cli import main
from topovq.tokenizer.atlas import charts, neighbor_distances, tiles
from topovq.tokenizer.training import load_run
from topovq.view.explorer.app import create_follow_app
from topovq.view.film import Film, write_film

pytestmark = pytest.mark.xdist_group("film")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    hexagons = {"grid": [3, 4], "topology": "hexagonal"}
    folder = tmp_path_factory.mktemp("films") / "run"
    return make_run(folder, steps=16, snapshots=4, quantizer_options=hexagons, checkpoint_every=8)


def test_frames_are_the_snapshots(run: Path) -> None:
    film = Film(run)
    assert film.steps() == [0, 1, 4, 9, 16]
    model = load_run(run)
    [last] = film.frame(16).maps
    [chart] = charts(model)
    assert last.grid == chart.grid
    assert np.array_equal(last.tiles_KCss, tiles(model, [chart], 0).numpy())
    assert film.frame(0).strip_HWC.shape == (64, 4 * 32, 3)
    with pytest.raises(LookupError, match="no frame of step 5"):
        film.frame(5)
    with pytest.raises(FileNotFoundError, match="there is no run at"):
        Film(run / "nowhere")


def test_checkpoints_serve_where_there_are_no_snapshots_and_stay_when_they_are_gone(run: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("snapshots"))
    film = Film(copied)
    assert film.steps() == [8, 16]
    kept = Film(run).frame(16)
    assert np.array_equal(film.frame(16).maps[0].tiles_KCss, kept.maps[0].tiles_KCss)
    assert np.array_equal(film.frame(16).strip_HWC, kept.strip_HWC)
    shutil.rmtree(copied / "checkpoints")
    assert film.steps() == [16]  # 8 went unseen
    assert np.array_equal(film.frame(16).strip_HWC, kept.strip_HWC)


@pytest.mark.parametrize("ending", ["webp", "gif"])
def test_the_animation(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], ending: str) -> None:
    out = tmp_path / f"film.{ending}"
    main(["film", str(run), "-o", str(out)])
    assert f"The film: {out}" in capsys.readouterr().out
    with Image.open(out) as film:
        frames = [frame.convert("RGB") for frame in ImageSequence.Iterator(film)]
    assert len(frames) == 5
    assert all(frame.width == 480 for frame in frames)
    first, last = (np.asarray(frame, dtype=float) for frame in (frames[0], frames[-1]))
    assert np.abs(first - last).mean() > 2
    assert out.stat().st_size < 600_000
    with pytest.raises(SystemExit):
        main(["film", str(run), "-o", str(out)])
    assert f"{out} is there already; --force" in capsys.readouterr().err


def test_what_cannot_be_filmed_is_said(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"'film\.mp4' must end in \.webp or \.gif"):
        write_film(run, "film.mp4")
    with pytest.raises(ValueError, match="no map 3; it has 1"):
        write_film(run, tmp_path / "film.webp", which=3)
    with pytest.raises(ValueError, match="no map -1; it has 1"):
        write_film(run, tmp_path / "film.webp", which=-1)
    lone = make_run(tmp_path / "lone", checkpoint_every=9)
    with pytest.raises(SystemExit):
        main(["film", str(lone), "-o", str(tmp_path / "film.webp")])
    assert "has 1 snapshot, and a film needs two; train with --snapshots 60" in capsys.readouterr().err


def test_the_json_of_a_film(run: Path) -> None:
    client = TestClient(create_follow_app("run", Film(run)))
    info = client.get("/api/film").json()
    assert (info["name"], info["steps"], info["total"], info["finished"]) == ("run", [0, 1, 4, 9, 16], 16, True)
    assert [each["step"] for each in info["validations"]] == list(range(2, 17, 2))
    frame = client.get("/api/frame", params={"step": 9}).json()
    assert (frame["maps"], frame["grid"]["shape"], len(frame["places"])) == (["map"], [3, 4], 12)
    shown = Film(run).frame(9).maps[0]
    expected = neighbor_distances(torch.from_numpy(shown.codes_KD), shown.grid).tolist()
    assert frame["distances"] == pytest.approx(expected)
    sheet = np.asarray(Image.open(io.BytesIO(base64.b64decode(frame["sheet"]["image"].split(",")[1]))))
    side, columns = frame["sheet"]["side"], frame["sheet"]["columns"]
    assert np.array_equal(sheet[side : 2 * side, :side], shown.tiles_KCss[columns].transpose(1, 2, 0))
    assert client.get("/api/animation").content[8:12] == b"WEBP"
    for path, words in {
        "/api/frame?step=5": "no frame of step 5",
        "/api/frame?step=9&map=1": "no map 1",
        "/api/frame?step=9&run=1": "no film of run 1",
        "/api/film?run=1": "no film of run 1",
        "/api/animation?map=7": "no map 7",
    }.items():
        answer = client.get(path)
        assert answer.status_code == 404
        assert words in answer.json()["detail"]
    (run / "snapshots" / "step-00000003.npz").write_bytes(b"no archive")
    answer = client.get("/api/frame?step=3")
    (run / "snapshots" / "step-00000003.npz").unlink()
    assert (answer.status_code, answer.json()["detail"]) == (404, "the snapshot of step 3 is gone or damaged")
