"""The model card of a run: what the record knows is on it, nothing is left to fill in, it travels with the model."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from small_runs import make_run

from topovq import KohonenVQ
from topovq.pretrained import CARD
from topovq.tokenizer.training import load_run, read_record
from topovq.tokenizer.training.card import DATA, MARK, write_card


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("card") / "mine", model="vqvae2")


def test_it_says_what_the_record_knows(run: Path) -> None:
    text = (run / CARD).read_text()
    record = read_record(run / "record.jsonl")
    config, last = record[0], [line for line in record if line["event"] == "validation"][-1]
    for known in (
        "# mine\n",
        "A VQ-VAE-2 that turns images of 32 x 32 pixels",
        "4 x 4 tokens of 12 codes, on a map of 3 x 4, and 8 x 8 tokens of 12 codes",
        DATA["photos"][0] + ": 512 for validation",
        DATA["photos"][1],
        f"| validation loss | {last['loss']:.5f} |",
        f"| PSNR in dB | {last['psnr']:.2f} |",
        f"| codes in use | {last['usage']:.1%} |" if isinstance(last["usage"], float) else "codes in use",
        "4 of 8 images, seed 1",
        config["hardware"],
        config["id"],
    ):
        assert known in text
    front = text.split("---\n")[1]
    assert "library_name: topovq" in front
    assert "license:" not in front  # it is not ours to choose
    assert not re.search(r"More Information Needed|None\b|\{|\?", text)


def test_its_snippet_runs(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", (run / CARD).read_text(), re.DOTALL)
    file = tmp_path / "snippet.py"
    file.write_text(snippet)
    monkeypatch.chdir(run.parent)
    made = runpy.run_path(str(file), {"images": torch.zeros(2, 3, 32, 32, dtype=torch.uint8)})
    assert made["images"].shape == (2, 3, 32, 32)


def test_images_of_ones_own_are_named_without_their_place(tmp_path: Path) -> None:
    folder = tmp_path / "secret" / "holidays"
    folder.mkdir(parents=True)
    for number in range(8):
        Image.fromarray(np.full((32, 32, 3), number * 30, np.uint8)).save(folder / f"{number}.png")
    text = (make_run(tmp_path / "run", data=str(folder), workers=0, image_size=32) / CARD).read_text()
    assert "Images of `holidays`: " in text
    assert "to train on" in text
    assert "names no license of the images" in text
    assert "secret" not in text


def test_a_card_of_ones_own_stays(run: Path, tmp_path: Path) -> None:
    model, record = load_run(run), read_record(run / "record.jsonl")
    write_card(tmp_path, model, record)
    assert MARK in (tmp_path / CARD).read_text()
    (tmp_path / CARD).write_text("mine")
    write_card(tmp_path, model, record)
    assert (tmp_path / CARD).read_text() == "mine"


def test_a_record_that_knows_little_has_a_card(run: Path, tmp_path: Path) -> None:
    """That of a source of somebody's own, outside of a repository, with a loss that is not finite."""
    first, *lines = read_record(run / "record.jsonl")
    bare = {name: value for name, value in first.items() if not name.startswith(("source_", "version_", "commit"))}
    write_card(tmp_path, load_run(run), [bare, *({**line, "loss": None} for line in lines)])
    text = (tmp_path / CARD).read_text()
    assert "Images of `a source without a name`." in text
    assert "validation loss" not in text


def test_it_travels_with_the_model(run: Path, tmp_path: Path) -> None:
    load_run(run).save_pretrained(tmp_path)
    assert (tmp_path / CARD).read_text() == (run / CARD).read_text()


def test_a_quantizer_has_a_plain_one(tmp_path: Path) -> None:
    KohonenVQ(4, 16).save_pretrained(tmp_path)
    text = (tmp_path / CARD).read_text()
    assert "topovq.KohonenVQ.from_pretrained" in text
    assert "More Information Needed" not in text
