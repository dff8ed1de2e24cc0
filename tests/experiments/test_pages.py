"""What the pages show of the experiments is what the records say."""

from __future__ import annotations

import csv
import io
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from experiments import pages
from experiments.records import Records
from experiments.scale import tried

ROOT = Path(__file__).parents[2]


def test_the_files_are_those_of_the_records(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    for path in pages.write_tables(docs=tmp_path):
        committed = ROOT / "docs" / "results" / path.name
        assert path.read_text() == committed.read_text(), f"{path.name}: run python -m experiments.pages"


def test_only_what_was_run_is_in_the_file(tmp_path: Path) -> None:
    shutil.copy(ROOT / "records" / "schedule" / "f9387dd26a23.jsonl", tmp_path)
    (line,) = tried.schedules(Records([tmp_path]))
    assert (line["neighborhood"], line["codebook_size"]) == ("side / 16 to 0.3 over 0.5 of the steps", 65_536)
    assert (line["loss"], line["used_percent"]) == (pytest.approx(29.9, abs=0.05), pytest.approx(98.0, abs=0.05))


def test_late_losses_are_those_of_the_last_third() -> None:
    class Run:
        config = {"steps": 30}  # noqa: RUF012

        def validations(self) -> list[dict[str, float]]:
            return [{"step": 10, "loss": 3.0}, {"step": 20, "loss": 2.0}, {"step": 30, "loss": 1.0}]

    assert tried.late_losses(Run()) == [1.0]  # type: ignore[arg-type]


def test_a_smaller_picture_takes_the_place_of_a_larger(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (700, 700, 3), dtype=np.uint8)
    large, small = tmp_path / "large.png", tmp_path / "small.png"
    Image.fromarray(noise).save(large)
    Image.fromarray(noise[:8, :8]).save(small)
    assert pages.put(large, tmp_path, "shifts", "imagenet") == tmp_path / "results_shifts_imagenet.webp"
    assert pages.put(small, tmp_path, "shifts", "imagenet") == tmp_path / "results_shifts_imagenet.png"
    assert not (tmp_path / "results_shifts_imagenet.webp").exists()


def test_figures_are_taken_from_a_folder(tmp_path: Path) -> None:
    made, docs = tmp_path / "reproduced", tmp_path / "docs"
    made.mkdir()
    (docs / "results").mkdir(parents=True)
    Image.new("RGB", (4, 4)).save(made / "shift-psnr-cifar10.png")
    text = io.StringIO()
    csv.writer(text).writerows([["offset"], [1]])
    (made / "shift-psnr-cifar10.csv").write_text(text.getvalue())
    written = pages.take_figures(made, docs)
    assert [path.relative_to(docs).as_posix() for path in written] == [
        "results_shift_psnr.png",
        "results/shift-psnr-cifar10.csv",
    ]
