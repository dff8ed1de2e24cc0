"""The study `prior`: its runs on the CPU in seconds, and its table and figure from records made by hand."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from experiments.__main__ import main
from experiments.prior import run as prior_run
from experiments.prior.books import cached, load, seen_by_priors
from experiments.prior.cells import Book, Cell, cells, digits, quick_cells
from experiments.prior.pace import Pace
from experiments.prior.run import run_cells
from experiments.prior.table import COLUMNS, asked, draw_prior, make_prior_table, sizes_of, write_extras
from experiments.prior.tokens import sizes
from experiments.specs import Options
from experiments.tables import IncompleteTable, as_csv, markdown

ASKED = "data,codebook,K,head,smoothing,n,bits_per_token,head_parameters,ms,memory_gib"


def record(cell: Cell, bits: float, **changes: Any) -> dict[str, Any]:
    rows = [{"step": 100, "bits": bits + 1}, {"step": 200, "bits": bits}, {"step": 300, "bits": bits + 0.1}]
    facts = {"head_parameters": 7, "ms": 5.0, "memory_gib": 1.5, "psnr": 24.0, "used": 0.9, "train_images": 9}
    facts |= {"val_images": 2, "codes": cell.book.K, "graph": True, "hardware": "a GPU", "commit": "c" * 40}
    return {"study": "prior", "cell": asdict(cell), "rows": rows, **facts, **changes}


def write(folder: Path, records: list[dict[str, Any]]) -> Options:
    (folder / "some.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    return Options(runs=folder, records=(), out=folder / "out")


def test_the_table_has_the_means_over_seeds(tmp_path: Path) -> None:
    made = [record(Cell(Book(), seed=seed), 14.0 + seed) for seed in range(3)]
    made += [record(Cell(Book(), "flat"), 14.7), record(Cell(Book(), smoothing=True), 15.5)]
    made += [{"study": "prior", "cell": asdict(Cell(Book(), "bits")), "failed": "no memory", "graph": True}]
    table = make_prior_table(write(tmp_path, made))
    text = as_csv(table)
    assert text.startswith(ASKED)
    assert text.splitlines()[0] == ",".join(COLUMNS)
    ours, flat, smoothed = csv.DictReader(io.StringIO(text))
    assert [ours[name] for name in ASKED.split(",")] == (
        ["cifar10", "KSOM", "262144", "row/column", "no", "3", "15", "7", "5", "1.5"]
    )
    assert (ours["bits_per_token_std"], ours["bits_per_image"], ours["commit"]) == ("1", "960", "ccccccc")
    assert (ours["best_step"], flat["steps_to_loss"], smoothed["smoothing"]) == ("200", "200", "yes")
    assert smoothed["steps_to_loss"] == ""  # which does not come within 2% of 15
    told = markdown(table)
    assert "needs fewer bits than row/column (or own), of 1 codebooks: cifar10 KSOM K=262144 by 2.0%" in told
    assert "Not measured yet: cifar10 KSOM K=262144 bits 3000 steps" in told
    assert smoothed["curve"] == "100:16.5000 200:15.5000 300:15.6000"


def test_what_is_printed_has_a_row_for_each_head_and_no_short_runs(tmp_path: Path) -> None:
    made = [record(Cell(Book(), smoothing=on, steps=steps), 14.0) for on in (False, True) for steps in (3_000, 1_800)]
    printed = list(csv.reader(io.StringIO(as_csv(asked(make_prior_table(write(tmp_path, made)))))))
    assert [row[3:6] for row in printed] == [
        ["head", "smoothing", "n"],
        *(["row/column", on, "1"] for on in ("no", "yes")),
    ]
    assert ",".join(printed[0]) == ASKED


def test_tokenizers_that_were_trained_twice_are_named(tmp_path: Path) -> None:
    made = [record(Cell(Book()), 14.0, tokens_id="a"), record(Cell(Book(), "flat"), 14.0, tokens_id="b", psnr=25.0)]
    told = markdown(make_prior_table(write(tmp_path, made)))
    assert "cifar10 KSOM K=262144 was trained 2 times, to 24.00 and 25.00 dB: not all of its rows have" in told


def test_the_pace_is_that_of_runs_alike_and_else_scaled() -> None:
    cell, flat = Cell(Book(K=16_384)), Cell(Book(K=65_536), "flat")
    assert Pace([]).seconds(cell) == pytest.approx(3_000 * 0.0155)
    assert Pace([]).seconds(flat) == pytest.approx(3_000 * (0.0155 + 65_536 * 8e-8))
    pace = Pace([record(cell, 9.0, seconds=3_000 * 0.031), {"cell": asdict(flat), "failed": "no memory"}])
    assert pace.seconds(replace(cell, head="row/column shuffled", steps=1_000)) == pytest.approx(31)
    assert pace.seconds(flat) == pytest.approx(2 * Pace([]).seconds(flat))  # this machine takes twice as long
    assert pace.all_seconds([cell, replace(cell, seed=1)]) == pytest.approx(2 * 93 + 30)


def test_the_runs_need_no_extras() -> None:
    """A machine with a GPU may have PyTorch and little else."""
    absent = ("tyro", "rich", "pyarrow", "matplotlib", "skimage", "sklearn", "huggingface_hub")
    code = f"import sys\nsys.modules.update(dict.fromkeys({absent}))\nimport experiments.prior.run"
    code += "\nfrom experiments.prior.tokens import _zstd\nprint(_zstd(b'tokens', 6))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (found.stdout, found.stderr) == ("None\n", "")


def test_the_figure_has_sizes_and_curves(tmp_path: Path) -> None:
    made = [record(Cell(Book(K=size)), bits, psnr=20 + bits) for size, bits in ((512, 7.0), (16_384, 10.0))]
    made.append(record(Cell(Book(K=512), "flat"), 6.0, psnr=27.0))
    assert draw_prior(make_prior_table(write(tmp_path, made))) is None  # nothing was smoothed
    made.append(record(Cell(Book(K=16_384), smoothing=True), 10.5, psnr=30.0))
    left, right = draw_prior(make_prior_table(write(tmp_path, made))).axes
    (line,) = left.lines
    assert list(line.get_xdata()) == [64 * 6.0, 64 * 10.0]  # by the head with the fewest bits
    assert list(line.get_ydata()) == [27.0, 30.0]
    curves = {each.get_label(): list(each.get_ydata()) for each in right.lines}
    assert curves == {"one-hot, 3,000 steps": [11.0, 10.0, 10.1], "smoothed, 3,000 steps": [11.5, 10.5, 10.6]}


def test_what_does_not_go_together_is_refused(tmp_path: Path) -> None:
    two = [record(Cell(Book()), 14.0), record(Cell(Book(), "flat"), 14.0, train_images=8)]
    with pytest.raises(IncompleteTable, match=r"mixed: cifar10 KSOM K=262144 has 8 .* and 9 "):
        make_prior_table(write(tmp_path, two))
    with pytest.raises(ValueError, match=r"two records of .*, which disagree"):
        make_prior_table(write(tmp_path, [record(Cell(Book()), 14.0), record(Cell(Book()), 14.5)]))
    with pytest.raises(IncompleteTable, match="no finished run of prior"):
        make_prior_table(write(tmp_path, []))


def test_the_study_names_every_cell_once_and_the_targets_first() -> None:
    found = cells()
    assert len({cell.id for cell in found}) == len(found)
    assert [cell.head for cell in found[:3]] == ["row/column", "bits", "flat"]
    assert {cell.book.K for cell in found} == {512, 16_384, 65_536, 262_144}
    assert {cell.book.codebook for cell in found} == {"KSOM", "EMA-VQ", "vqp", "FSQ", "LFQ"}
    assert Cell.of(json.loads(json.dumps(asdict(found[5])))) == found[5]
    books = [cell.book for cell in found]
    assert [cell.seed for cell in found if cell == replace(Cell(Book(), "bits"), seed=cell.seed)] == [0, 1, 2]
    assert books.index(Book(K=16_384)) == books.count(Book())  # one after the other, with the same tokens
    assert digits(Book(), "bits") == [64, 4096]
    assert np.prod(digits(Book(codebook="FSQ", K=16_384), "own")) == 15_360


def test_every_head_runs_and_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = quick_cells()
    shown = [quick[2], quick[-5], quick[-2]]  # row/column, smoothed, FSQ by its own factors
    monkeypatch.setattr(prior_run, "SAMPLED", (shown[0],))
    said: list[str] = []
    run_cells([*shown, replace(shown[0], dim=33)], tmp_path, None, cache=tmp_path / "kept", say=said.append)
    records = [json.loads(line) for line in (tmp_path / "prior.jsonl").read_text().splitlines()]
    assert [next(iter({"rows", "sampled", "failed"} & each.keys())) for each in records] == (
        ["rows", "sampled", "rows", "rows", "failed"]
    )
    assert records[0]["factors"] == [8, 8]
    assert records[1]["sampled"]["images"] == 32
    assert records[1]["sampled"]["sizes"]["raw"] == 6 / 16
    assert (tmp_path / "samples-KSOM-64.webp").exists()
    assert records[3]["factors"] == digits(shown[2].book, "own") == [8, 8]
    assert all(0 < row["bits"] < 8 for row in records[0]["rows"])
    again: list[str] = []
    run_cells(shown, tmp_path, None, say=again.append)
    assert again == []
    late = replace(shown[0], seed=1)
    run_cells([late], tmp_path, None, until=0.0, say=again.append)
    assert again == [f"left out, there is no time: {late.name}", "1 runs are left; the same command goes on with them"]
    assert said[-1] == f"FAILED {replace(shown[0], dim=33).name}: dim=33 must be a multiple of 4 * heads, which is 4"
    with open(tmp_path / "prior.jsonl", "a") as file:
        file.write('{"study": "prior", "ce')  # by a process that was killed
    next_one = replace(shown[0], steps=2)
    run_cells([next_one], tmp_path, None, cache=tmp_path / "kept", say=said.append)
    run_cells([next_one], tmp_path, None, say=again.append)
    assert len(again) == 2  # of `late`: nothing is run twice
    errors, small = write_extras(tmp_path, tmp_path / "tables")
    assert (errors.name, small.name) == ("token-errors-photos.csv", "compression-photos.csv")
    told = list(csv.DictReader(errors.read_text().splitlines()))
    assert (told[0]["codebook"], told[0]["errors"], told[0]["tokens"], len(told)) == ("KSOM", "none", "1024", 11)
    forms = {row["form"]: float(row["bits_per_pixel"]) for row in csv.DictReader(small.read_text().splitlines())}
    assert forms["prior"] == pytest.approx(min(row["bits"] for row in records[0]["rows"]) / 16, rel=1e-4)
    monkeypatch.chdir(tmp_path)
    main(["prior", "--quick", "--render-only", "--records", str(tmp_path), "--out", "made", "--format", "csv"])
    assert capsys.readouterr().out.splitlines()[0] == ASKED
    rows = list(csv.DictReader((tmp_path / "made" / "prior-photos.csv").read_text().splitlines()))
    assert [bool(row["images_per_second"]) for row in rows] == [True, False, False]
    assert "32 samples of photos KSOM K=64 row/column took" in (tmp_path / "made" / "prior-photos.md").read_text()


def test_a_cell_counts_as_done_when_its_samples_were_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object) -> dict[str, Any]:
        raise KeyboardInterrupt

    cell = replace(quick_cells()[2], steps=2)
    monkeypatch.setattr(prior_run, "SAMPLED", (cell,))
    monkeypatch.setattr(prior_run, "look_at", killed)
    with pytest.raises(KeyboardInterrupt):
        run_cells([cell], tmp_path, None, cache=tmp_path / "kept")
    assert not (tmp_path / "prior.jsonl").exists()


def test_every_form_has_its_own_psnr() -> None:
    """WebP at its worst is better than asked for; a record of before does not say so."""
    told = {"psnr": 22.0, "images": 4, "tokens_per_pixel": 0.1, "raw": 1.0, "zstd": 0.9, "frequencies": 0.8}
    told |= {"jpeg": 0.2, "jpeg_psnr": 22.0, "webp": 0.3, "webp_psnr": 24.5}
    made = record(Cell(Book(K=64)), 6.0) | {"sampled": {"sizes": told, "bits_per_token": 6.0, "error_images": 4}}
    rows = {row["form"]: row for row in sizes_of(made)}
    assert {form: row["psnr"] for form, row in rows.items()} == dict.fromkeys(rows, 22.0) | {"webp": 24.5}
    assert rows["prior"]["bits_per_pixel"] == pytest.approx(0.6)
    del told["webp_psnr"]
    assert {row["psnr"] for row in sizes_of(made)} == {22.0}


def test_cifar10_comes_back_from_its_sheets(tmp_path: Path) -> None:
    sheet = np.random.default_rng(0).integers(0, 256, (3_200, 3_200, 3), dtype=np.uint8)
    Image.fromarray(sheet).save(tmp_path / "cifar10-0.webp", lossless=True, quality=0, method=0)
    train, val = images = load(tmp_path, "cifar10", torch.device("cpu"))
    assert (len(train), len(val)) == (10_000 - 4_096, 4_096)
    assert np.array_equal(train[101], sheet[32:64, 32:64])
    seen, _ = seen_by_priors("cifar10", images)
    assert torch.equal(seen[len(train)], seen[0].flip(2))


def test_tokens_are_kept(tmp_path: Path) -> None:
    book = quick_cells()[0].book
    images = load(None, "photos", torch.device("cpu"))
    made = cached(book, images, tmp_path)
    again = cached(book, images, tmp_path)
    assert again.figures == made.figures
    assert torch.equal(again.train_NT, made.train_NT)
    assert torch.equal(again.val_images, made.val_images)


def test_bits_a_pixel_by_hand() -> None:
    images = torch.zeros(4, 3, 8, 8, dtype=torch.uint8)
    images[..., ::2] = torch.arange(8, dtype=torch.uint8)[:, None] * 30
    tokens = torch.tensor([[0, 1], [0, 1], [0, 1], [0, 1]])
    found = sizes(images, tokens, 1_000, 22.0)
    assert found["raw"] == 8 * 10 / 256
    assert found["frequencies"] == pytest.approx(8 * 1 / 256)
    assert found["tokens_per_pixel"] == 8 / 256
    assert found["jpeg"] > 0
    assert sizes(images, tokens, 1_000, 200.0)["webp"] is None
    worst, good = sizes(images, tokens, 1_000, 1.0), sizes(images, tokens, 1_000, 40.0)
    assert 0 < worst["webp"] <= good["webp"]
    assert worst["webp_psnr"] > 1.0  # no file is that bad: the figures are those of the worst there is
    assert good["webp_psnr"] == 40.0
