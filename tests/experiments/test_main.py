"""`python -m experiments` from the command line to the table, in seconds."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from made_records import lines_of, write_record

from experiments.__main__ import main
from experiments.records import Record
from experiments.specs import TABLES, cells
from topovq.cli import main as topovq
from topovq.tokenizer.training import read_record

pytestmark = pytest.mark.xdist_group("sweep")

ROOT = Path(__file__).parents[2]
QUICK = ["sensitivity", "--quick", "--seeds", "1", "--steps", "40", "--jobs", "1"]


def experiments(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command run in this process."""
    code = 0
    try:
        main(arguments)
    except SystemExit as exit:
        code = int(exit.code or 0)
    output = capsys.readouterr()
    return code, output.out, output.err


def curves(runs: Path) -> dict[str, list[dict]]:
    """The validations of every finished run by its id, without timing."""
    found = [Record(path, read_record(path)) for path in sorted(runs.glob("*/record.jsonl"))]
    assert all(record.finished for record in found)
    return {record.config["id"]: record.validations() for record in found}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted sweep."""
    folder = tmp_path_factory.mktemp("whole")
    main([*QUICK, "--runs", str(folder / "runs"), "--out", str(folder / "out")])
    return folder


def test_quick_end_to_end(whole: Path) -> None:
    found = curves(whole / "runs")
    assert len(found) == 4
    assert all([line["step"] for line in validations] == [20, 40] for validations in found.values())
    with open(whole / "out" / "sensitivity-photos.csv") as file:
        rows = list(csv.DictReader(file))
    assert [(row["count_init"], row["update_empty"]) for row in rows] == [
        ("0", "no"),
        ("1", "no"),
        ("0", "yes"),
        ("1", "yes"),
    ]
    assert {(row["dataset"], row["n"], row["steps"], row["paper_loss_mean"]) for row in rows} == {
        ("photos", "1", "40", "")
    }
    best = {1e3 * min(line["loss"] for line in validations) for validations in found.values()}
    assert sorted(float(row["ours_loss_mean"]) for row in rows) == pytest.approx(sorted(best), rel=1e-5)
    page = (whole / "out" / "sensitivity-photos.md").read_text()
    assert "This is the quick version" in page
    assert "Fewer steps than the paper: 40, 30,000 there." in page


def test_records_say_what_they_rest_on(whole: Path) -> None:
    for path in (whole / "runs").glob("*/record.jsonl"):
        first = read_record(path)[0]
        assert path.parent.name == first["id"]
        assert {"version_topovq", "version_torch", "hardware", "seed"} <= first.keys()


def test_what_is_done_is_not_done_again(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A finished run in RUNS, and a record of one in RECORDS."""
    runs, records = tmp_path / "runs", tmp_path / "records"
    shutil.copytree(whole / "runs", runs)
    moved = sorted(runs.iterdir())[0]
    records.mkdir()
    shutil.move(moved / "record.jsonl", records / "whatever.jsonl")
    shutil.rmtree(moved)
    before = {path: path.read_bytes() for path in runs.glob("*/record.jsonl")}
    where = ["--runs", str(runs), "--records", str(records), "--out", str(tmp_path / "out")]
    code, out, err = experiments(capsys, *QUICK, *where, "--format", "csv")
    assert code == 0
    assert "4 runs are needed; 4 of them are done already" in err
    assert {path: path.read_bytes() for path in runs.glob("*/record.jsonl")} == before
    assert out == (whole / "out" / "sensitivity-photos.csv").read_text()


def test_render_only_runs_nothing(tmp_path: Path, whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--out", str(tmp_path / "out"), "--render-only"]
    code, out, err = experiments(capsys, *QUICK, *where, "--runs", str(tmp_path / "runs"))
    assert (code, out) == (2, "")
    assert (
        err.startswith("python -m experiments: there is no finished run")
        or "missing: ema count_init=0 update_empty=no (seed 0)" in err
    )
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
    code, out, _ = experiments(capsys, *QUICK, *where, "--runs", str(whole / "runs"), "--format", "markdown")
    assert code == 0
    assert out == (whole / "out" / "sensitivity-photos.md").read_text()


def test_an_interrupted_and_resumed_sweep_gives_the_same_records(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    where = ["--runs", str(runs), "--out", str(tmp_path / "out")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "experiments", *QUICK, *where]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    while not any(len(read_record(path)) > 1 for path in runs.glob("*/record.jsonl")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 143, err
    assert "the same command continues" in err
    records = [Record(path, read_record(path)) for path in runs.glob("*/record.jsonl")]
    assert not all(record.finished for record in records) or len(records) < 4, "all was over before the signal"
    code, _, _ = experiments(capsys, *QUICK, *where)
    assert code == 0
    assert curves(runs) == curves(whole / "runs")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mian"], "did you mean 'main'?"),
        (["main", "--seeds", "0"], "seeds=0 must be at least 1"),
        (["main", "--batch-size", "0"], "batch_size=0 must be at least 1"),
        (["main", "--codebooks", "512"], "codebooks=[512] goes with 'scale'; the table 'main' has one size"),
        (["map", "--codebooks", "512"], "codebooks=[512] goes with 'scale', not with 'map'"),
        (["sensitivity", "--dataset", "imagenet"], "it has them for cifar10"),
        (["main", "--records", "nowhere"], "there is no folder of records at nowhere"),
    ],
)
def test_a_mistake_is_one_line(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = experiments(capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_partial_table_of_a_data_set_from_committed_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One seed of two cells, 2,000 steps: all that was run says so."""
    for cell in cells("main", "faces")[:2]:
        lines = lines_of(cell.config(0, 2_000, Path("/somewhere"), 16), [2.0, 1.9])
        write_record(tmp_path / "records" / f"{cell.method}.jsonl", lines)
    where = ["--runs", str(tmp_path / "runs"), "--records", str(tmp_path / "records"), "--out", str(tmp_path / "out")]
    options = ["--dataset", "faces", "--steps", "2000", "--seeds", "1", "--render-only"]
    code, _, err = experiments(capsys, "main", *options, *where, "--partial")
    assert (code, "batch_size=16 instead of 128" in err) == (2, True)
    options += ["--batch-size", "16"]
    assert experiments(capsys, "main", *options, *where)[0] == 2
    code, out, _ = experiments(capsys, "main", *options, *where, "--partial", "--format", "csv")
    assert code == 0
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [(row["n"], row["ours_loss_mean"], row["paper_loss_mean"]) for row in rows] == [
        ("1", "1.9", "1.86"),
        ("1", "1.9", "1.73"),
        ("0", "", "1.75"),
        ("0", "", ""),
    ]
    page = (tmp_path / "out" / "main-faces.md").read_text()
    assert "PARTIAL: missing: ksom gaussian" in page
    assert "Smaller batches than the paper's: 16, 128 there." in page
    assert json.loads((tmp_path / "records" / "ema.jsonl").read_text().splitlines()[0])["data_path"] == "/somewhere"


def test_a_clone_draws_all_that_its_records_tell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--runs", str(tmp_path / "runs"), "--records", str(ROOT / "records"), "--out", str(tmp_path)]
    code, out, err = experiments(capsys, "all", "--render-only", *where)
    assert code == 0
    assert {path.stem for path in tmp_path.glob("*.csv")} == {f"{name}-cifar10" for name in TABLES}
    assert out.count("residual blocks") >= len(TABLES)  # whose they are, in every title
    assert f"not drawn, since their models or runs are not in {tmp_path / 'runs'}: " in err
    assert "map, shifts" in err
    drawn = {path.stem for path in tmp_path.glob("*.png")}
    assert {"initialization-cifar10", "perplexity-cifar10", "neighborhoods"} <= drawn


def test_a_study_of_a_clone_is_drawn_from_its_own_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """records/ride has runs of the same cells, of an earlier rule."""
    places = ["--records", str(ROOT / "records"), "--runs", str(tmp_path), "--out", str(tmp_path)]
    code, _, said = experiments(capsys, "clients", "--render-only", "--partial", *places)
    assert code == 0, said
    assert (tmp_path / "clients.csv").read_text() == (ROOT / "docs" / "results" / "clients.csv").read_text()


def test_a_figure_is_written_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
    code, _, err = experiments(capsys, "neighborhoods", *where)
    assert code == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"neighborhoods.png", "neighborhoods.svg"}
    assert "neighborhoods.svg" in err


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = experiments(capsys, "--help")
    assert code == 0
    assert "python -m experiments main --quick" in out
    assert "shift-psnr      measured: PSNR" in out
    for name in (
        "--dataset",
        "--seeds",
        "--steps",
        "--batch-size",
        "--jobs",
        "--render-only",
        "--partial",
        "--format",
        "--records",
    ):
        assert name in out


def test_the_old_command_names_the_new_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        topovq(["reproduce", "main", "--quick"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith("topovq: reproduce is now `python -m experiments NAME`")
