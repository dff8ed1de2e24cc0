"""The study `clients`: its runs on the CPU in seconds, and its table and figure from records made by hand."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
import tarfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from experiments import pages
from experiments.__main__ import main
from experiments.clients import images as clients_images
from experiments.clients import run as clients_run
from experiments.clients.images import Crops, load_images, pack
from experiments.clients.methods import METHODS, QUICK_CELL, Cell, cells
from experiments.clients.run import run_cells
from experiments.clients.table import COLUMNS, LABELS, draw_clients, make_clients
from experiments.records import read
from experiments.specs import Options
from experiments.tables import IncompleteTable, as_csv, markdown

ROOT = Path(__file__).parents[2]
ASKED = "data,K,d,metric,method,steps,n,psnr,ssim,used,tokens_per_code,perplexity,topographic_error,ms"


def record(cell: Cell, psnr: float, **changes: Any) -> dict[str, Any]:
    rows = [
        {"step": step, "psnr": psnr - 2 + step, "ssim": 0.5, "used": 0.9, "codes": cell.K, "tokens": 20 * cell.K}
        | {"tokens_per_code": 20.0, "perplexity": 7.0, "topographic_error": None if cell.method == "fsq" else 0.25}
        for step in range(3)
    ]
    facts = {"ms": 8.0, "graph": True, "train_images": 10, "val_images": 2, "hardware": "a GPU", "commit": "c" * 40}
    return {"study": "clients", "cell": asdict(cell), "rows": rows, **facts, **changes}


def write(folder: Path, records: list[dict[str, Any]]) -> Options:
    (folder / "some.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    return Options(runs=folder, records=(), out=folder / "out")


def main_cell(method: str, seed: int = 0, d: int = 8) -> Cell:
    return Cell(d=d, method=method, steps=5_000, seed=seed)


def test_the_table_has_the_means_over_seeds(tmp_path: Path) -> None:
    made = [record(main_cell("recommended", seed), 20.0 + seed) for seed in range(3)]
    made += [record(main_cell("vqp-rewritten", seed), 21.5) for seed in range(3)]
    made += [record(Cell(method="fsq"), 19.0)]
    table = make_clients(write(tmp_path, made))
    text = as_csv(table)
    assert text.startswith(ASKED)
    ours, theirs, fsq = csv.DictReader(io.StringIO(text))
    assert [ours[name] for name in ASKED.split(",")] == (
        [
            "imagenet160",
            "16384",
            "8",
            "euclidean",
            "recommended",
            "5000",
            "3",
            "21",
            "0.5",
            "0.9",
            "20",
            "7",
            "0.25",
            "8",
        ]
    )
    assert (ours["psnr_std"], ours["psnr_third"], ours["commit"]) == ("1", "19", "ccccccc")
    assert (fsq["n"], fsq["topographic_error"], theirs["psnr"]) == ("1", "", "21.5")
    told = markdown(table)
    assert "21.00 ± 1.00" in told
    assert "vector-quantize-pytorch, rewritten by 0.50 dB at the end" in told  # where a peer wins
    assert "Not measured yet: imagenet160 K=16384 d=8 euclidean ema 5000 steps" in told


def test_too_few_seeds_and_mixed_images_are_refused(tmp_path: Path) -> None:
    options = write(tmp_path, [record(main_cell("ema"), 20.0)])
    with pytest.raises(IncompleteTable, match=r"ema 5000 steps \(2 seeds\)"):
        make_clients(options)
    assert len(make_clients(replace(options, partial=True)).rows) == 1
    options = write(tmp_path, [record(Cell(), 20.0), record(Cell(method="fsq"), 20.0, train_images=9)])
    with pytest.raises(IncompleteTable, match=r"imagenet160 was 10 \+ 2 and 9 \+ 2 images"):
        make_clients(options)
    with pytest.raises(IncompleteTable, match=r"there is no finished run of clients$"):
        make_clients(write(tmp_path, []))
    options = write(tmp_path, [record(Cell(), 20.0), record(Cell(), 21.0)])
    with pytest.raises(ValueError, match="which disagree"):
        make_clients(options)


def test_every_method_and_size_has_a_place_in_the_figure_and_a_name(tmp_path: Path) -> None:
    sizes = [record(cell, 20.0 + cell.K / 1e6) for cell in cells() if cell.steps == 1_500 and cell.d == 8]
    table = make_clients(write(tmp_path, sizes))
    uses, _ = draw_clients(table).axes
    assert len(uses.get_lines()) == 4
    assert all(list(line.get_xdata()) == [1_024, 16_384, 65_536, 262_144] for line in uses.get_lines())
    assert draw_clients(make_clients(write(tmp_path, [record(Cell(d=32), 20.0)]))) is None
    assert set(LABELS) == set(METHODS)
    assert set(ASKED.split(",")) < set(COLUMNS)


def test_the_quick_study_runs_resumes_and_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out"), "--records"]
    main(["clients", "--quick", "--steps", "3", *where, "--format", "csv"])
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["method"] for row in rows] == list(METHODS)
    assert all(float(row["tokens_per_code"]) >= 20 for row in rows)
    assert (tmp_path / "out" / "clients-photos.png").exists()
    before = (tmp_path / "runs" / "clients.jsonl").read_text()
    main(["clients", "--quick", "--steps", "3", *where])
    assert "11 of them are done already" in capsys.readouterr().err
    assert (tmp_path / "runs" / "clients.jsonl").read_text() == before
    first = json.loads(before.splitlines()[0])
    assert [row["step"] for row in first["rows"]] == [1, 2, 3]
    assert {"hardware", "version_torch", "commit", "ms"} <= set(first)


def test_a_run_that_fails_or_has_no_time_does_not_stop_the_others(tmp_path: Path) -> None:
    out, said = tmp_path / "out.jsonl", []
    broken = replace(QUICK_CELL, metric="sine", steps=3)
    run_cells([broken, replace(QUICK_CELL, steps=3, method="ema")], out, None, say=said.append)
    assert said[0].startswith("FAILED photos K=64")
    assert "sine" in said[0]
    assert ["failed" in each for each in read(out)] == [True, False]
    with open(out, "a") as file:  # as a run leaves it whose step could not be captured
        file.write(json.dumps({"cell": asdict(replace(QUICK_CELL, steps=2)), "failed": "CUDA", "graph": True}) + "\n")
    run_cells([replace(QUICK_CELL, steps=2)], out, None, say=said.append)
    assert "failed" not in read(out)[-1]
    assert not read(out)[-1]["graph"]
    del said[2:]
    run_cells([broken, replace(QUICK_CELL, steps=4)], out, None, until=0.0, say=said.append)
    assert said[2:] == [f"left out, there is no time: {replace(QUICK_CELL, steps=4).name}"]


def test_a_run_is_the_same_twice() -> None:
    images = [load_images(None, "photos", split) for split in ("train", "val")]
    cell = replace(QUICK_CELL, method="vqp-rewritten", steps=3)
    once, again = (clients_run.run([cell], *images)[0] for _ in range(2))
    other = clients_run.run([replace(cell, seed=1)], *images)[0]
    assert once["rows"] == again["rows"] != other["rows"]


def test_crops_are_parts_of_their_images() -> None:
    images = torch.arange(2 * 6 * 6 * 3).remainder(251).to(torch.uint8).view(2, 6, 6, 3)
    crops = Crops.drawn(images, torch.tensor([[0, 1], [1, 0]]), 4, torch.Generator().manual_seed(0))
    for t in range(2):
        batch = (crops.batch(torch.tensor([t])) + 1) * 127.5
        for number, x in enumerate(batch):
            which, top, left = (int(v[t, number]) for v in (crops.which, crops.top, crops.left))
            part = images[which, top : top + 4, left : left + 4].permute(2, 0, 1).float()
            part = part.flip(-1) if crops.flip[t, number] else part
            torch.testing.assert_close(x, part, atol=1e-3, rtol=0)


def test_shards_and_their_pack_hold_the_same_images(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    for split, colors in (("train", [(200, 30, 30), (30, 200, 30)]), ("val", [(30, 30, 200)])):
        with tarfile.open(tmp_path / "set" / f"{split}-000.tar", "w") as file:
            for number, color in enumerate(colors):
                buffer = io.BytesIO()
                Image.new("RGB", (200, 180), color).save(buffer, "jpeg", quality=95)
                info = tarfile.TarInfo(f"{number}.jpg")
                info.size = buffer.tell()
                buffer.seek(0)
                file.addfile(info, buffer)
    whole = load_images(tmp_path, "set", "train")
    assert whole.shape == (2, clients_images.SIDE, clients_images.SIDE, 3)
    pack(tmp_path / "set", tmp_path / "set", 1)
    packed = load_images(tmp_path, "set", "train")
    assert len(packed) == 1
    assert (packed[0].int() - whole[0].int()).abs().max() <= 3
    with pytest.raises(FileNotFoundError, match="there are no shards"):
        load_images(tmp_path, "other", "train")


def test_the_runs_need_few_packages() -> None:
    """The machine that they are for may not have what the package's extras bring."""
    absent = ("tyro", "rich", "fastapi", "huggingface_hub", "matplotlib", "sklearn", "pyarrow")
    code = f"import sys\nsys.modules.update(dict.fromkeys({absent}))\nimport experiments.clients.run"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_pages_show_it_once_there_are_records(tmp_path: Path) -> None:
    assert pages.studies(tmp_path) == {}
    (tmp_path / "clients").mkdir()
    write(tmp_path / "clients", [record(Cell(method="ema"), 20.0)])
    found = pages.studies(tmp_path)
    assert [row[4] for row in found["clients"].values] == ["ema"]
