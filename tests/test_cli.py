"""The command line as a user meets it: real processes, in a temporary folder, offline."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from warm import python

import topovq as topovq_package
from topovq.cli import main, parse_options
from topovq.tokenizer.models import VQVAE


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "100"}


def start_topovq(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """The command as a process group of its own."""
    command = [sys.executable, "-m", "topovq", *arguments]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=folder, env=environment(), start_new_session=True, **output)


def topovq(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "topovq", *arguments, cwd=folder, env=environment())


TRAIN = shlex.split(
    "train photos --out runs/a --steps 6 --batch-size 8 --seed 5 --device cpu --validate-every 3 --checkpoint-every 3 "
    "--model-options hidden=16 --codebook-size 64 --code-dim 8 --quantizer-options neighborhood=gaussian tau=0.2"
)


def test_train_info_encode_decode_evaluate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What trains and what encodes are processes; what only looks is the same command in this one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")

    def look(*arguments: str) -> str:
        code, out, err = run_main(capsys, *arguments)
        assert code == 0, err
        return out

    trained = topovq(tmp_path, *TRAIN)
    assert trained.returncode == 0, trained.stderr
    assert "best validation loss" in trained.stdout

    shown = topovq(tmp_path, "info", "runs/a", "--json")
    assert shown.returncode == 0, shown.stderr
    facts = json.loads(shown.stdout)
    assert look("info", "runs/a", "--json") == shown.stdout
    assert (facts["finished"], facts["step"], facts["tokens_per_image"]) == (True, 6, [[8, 8]])
    assert facts["config"]["quantizer_options"] == {"neighborhood": "gaussian", "tau": 0.2}

    summary = look("info", "runs/a").splitlines()
    assert len(summary) == 10
    assert max(map(len, summary)) <= 80
    usage = f"{facts['validation']['usage']:.1%} of the codes in the 32,768 tokens of these images"  # 512 crops of 8x8
    assert summary[-1].split(maxsplit=1) == ["usage", usage]

    listed = look("runs").splitlines()
    assert listed[0].split() == ["run", "data", "quantizer", "codes", "step", "loss", "psnr", "usage"]
    assert listed[1].split()[:5] == ["a", "photos", "kohonen", "64", "6"]
    assert listed[1].split()[-1] == f"{facts['validation']['usage']:.1%}"
    stopped = tmp_path / "stopped"
    (stopped / "checkpoints" / "step-00000004").mkdir(parents=True)  # before its first validation
    record = (tmp_path / "runs" / "a" / "record.jsonl").read_bytes().splitlines(keepends=True)
    (stopped / "record.jsonl").write_bytes(record[0])
    assert look("runs", "stopped").splitlines()[1].split()[4] == "4/6"

    (tmp_path / "pictures").mkdir()
    for i in range(3):
        pixels = np.random.default_rng(i).integers(0, 256, (40, 50, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "pictures" / f"{i}.png")
    encoded = topovq(tmp_path, "encode", "runs/a", "pictures", "-o", "tokens.parquet", "--device", "cpu")
    assert encoded.returncode == 0, encoded.stderr
    assert "3 images encoded to tokens.parquet" in encoded.stdout

    look("decode", "runs/a", "tokens.parquet", "-o", "decoded", "--device", "cpu")
    assert sorted(path.name for path in (tmp_path / "decoded").iterdir()) == ["0.png", "1.png", "2.png"]
    assert Image.open(tmp_path / "decoded" / "0.png").size == (32, 32)

    evaluated = look("evaluate", "runs/a", "--device", "cpu")
    assert json.loads(evaluated)["loss"] == pytest.approx(facts["validation"]["loss"], rel=1e-5)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_encode_that_is_stopped_leaves_nothing_behind(tmp_path: Path, signum: int, code: int) -> None:
    VQVAE(image_size=32, hidden=16, codebook_size=16, code_dim=8).save_pretrained(tmp_path / "run")
    (tmp_path / "pictures").mkdir()
    Image.new("RGB", (32, 32)).save(tmp_path / "pictures" / "0.png")
    for i in range(1, 8_000):
        (tmp_path / "pictures" / f"{i}.png").symlink_to("0.png")
    (tmp_path / "out").mkdir()
    arguments = ["encode", "run", "pictures", "-o", "out/tokens.parquet", "--device", "cpu", "--batch-size", "8"]
    with start_topovq(tmp_path, *arguments) as process:
        while not os.listdir(tmp_path / "out"):
            assert process.poll() is None
            time.sleep(0.05)
        os.killpg(process.pid, signum)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (code, "topovq: stopped by Ctrl-C\n" * (signum == signal.SIGINT))
    assert os.listdir(tmp_path / "out") == []


def run_main(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command, in this process."""
    code = 0
    try:
        main(arguments)
    except SystemExit as exit:
        code = int(exit.code or 0)
    output = capsys.readouterr()
    return code, output.out, output.err


@pytest.mark.parametrize(
    "command",
    [
        "train",
        "evaluate",
        "encode",
        "decode",
        "prior",
        "sample",
        "complete",
        "info",
        "runs",
        "data",
        "demo",
        "report",
        "explore",
    ],
)
def test_help_is_there(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run_main(capsys, command, "--help")
    assert code == 0
    assert f"topovq {command}" in out
    assert max(map(len, out.splitlines())) <= 80


def test_the_help_says_what_the_bar_means_and_how_to_complete(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = run_main(capsys, "train", "--help")
    for word in ("use ", "perp ", "dead ", "drift ", "validation images, which are never trained on"):
        assert f"  {word}" in out or word in out
    _, out, _ = run_main(capsys, "--help")
    assert max(map(len, out.splitlines())) <= 80
    assert "--tyro-print-completion bash" in out
    code, out, _ = run_main(capsys, "--tyro-print-completion", "bash")
    assert code == 0
    assert "--codebook-size" in out


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main(capsys, "--version") == (0, f"topovq {topovq_package.__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "unknown command 'trian' (did you mean 'train'?)"),
        (["train", "fotos"], "did you mean 'photos'?"),
        (["train", "no/such/folder"], "there is no folder 'no/such/folder'"),
        (["train", "photos", "--wandb", "project"], "wandb is not installed; install it with: pip install"),
        (["train", "photos", "--image-size", "30"], "image_size=30 must be a multiple of the model's total stride"),
        (["runs", "nowhere"], "there is no folder nowhere"),
        (["runs", "."], "there is no run in ."),
        (["train", "photos", "--model", "vqvea"], "did you mean 'vqvae'?"),
        (["train", "photos", "--quantizer", "kohonnen"], "valid: kohonen, ema, gradient"),
        (["train", "photos", "--quantizer-options", "tua=1"], "did you mean 'tau'?"),
        (["train", "photos", "--device", "tpu"], "use auto, cpu, cuda or cuda:N"),
        (["train", "photos", "--steps", "0"], "steps=0 must be a whole number of at least 1"),
        (["info", "missing"], "there is no run at missing"),
        (["data", "cifar"], "did you mean 'cifar10'?"),
        (["data", "folder"], "the data set 'folder' needs the path of its images: --data-path PATH"),
        (["train", "imagenet"], "--data-path PATH"),
        (["train", "photos", "--data-path", "x"], "photos takes no path ('x' was given)"),
        (["train", "photos", "--image-size", "-4"], "images of size -4 cannot be"),
        (["train", ".", "--data-path", "x"], "'.' is a path already; --data-path (here 'x') goes with a name: photos"),
        (["train", "train-{000..003}.tar"], "names no shard: 'train-000.tar' was looked for and is not there"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_would_be_right(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)
    code, out, err = run_main(capsys, *arguments)
    assert code == 2
    assert message in err
    assert err.startswith("topovq: ")
    assert err.count("\n") == 1
    assert out == ""
    assert list(tmp_path.iterdir()) == []


def test_the_same_command_again_is_refused_and_with_resume_does_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_main(capsys, *TRAIN)[0] == 0
    record = Path("runs/a/record.jsonl").read_bytes()
    code, _, err = run_main(capsys, *TRAIN)
    assert code == 2
    assert "already holds a run; add --resume" in err
    code, out, _ = run_main(capsys, *TRAIN, "--resume")
    assert code == 0
    assert "best validation loss" in out
    assert Path("runs/a/record.jsonl").read_bytes() == record


def test_an_unknown_option_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run_main(capsys, "train", "--stepz", "3")
    assert code == 2
    assert "--steps" in out + err


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    process = start_topovq(tmp_path, "train", "--help")
    assert process.stdout is not None
    process.stdout.close()
    _, err = process.communicate()
    assert (process.returncode, err) == (141, "")


def test_data_lists_the_names_and_describes_one(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_main(capsys, "data")
    assert code == 0
    listed = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert list(listed) == ["photos", "cifar10", "folder", "shards", "imagenet", "faces"]
    assert {name for name, about in listed.items() if "--data-path" in about} == set(listed) - {"photos"}
    code, out, _ = run_main(capsys, "data", "photos")
    assert code == 0
    assert json.loads(out)["name"] == "photos"


def test_data_reads_every_file_of_a_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for i in range(5):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{i}.png")
    code, out, _ = run_main(capsys, "data", str(tmp_path))
    assert (code, json.loads(out)["checked"], json.loads(out)["unreadable"]) == (0, 5, {})
    whole = (tmp_path / "3.png").read_bytes()
    (tmp_path / "3.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "5.jpg").write_text("no image")
    code, out, _ = run_main(capsys, "data", str(tmp_path))
    facts = json.loads(out)
    assert (code, facts["checked"], facts["skipped"]) == (1, 4, 2)
    assert facts["unreadable"][str(tmp_path / "5.jpg")] == "not an image of a known format"
    assert str(tmp_path / "3.png") in facts["unreadable"]


def test_a_report_is_not_overwritten(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "report.html").write_text("mine")
    code, _, err = run_main(capsys, "report", "no run", "-o", str(tmp_path / "report.html"))
    assert code == 2
    assert "report.html is there already; --force" in err
    code, _, err = run_main(capsys, "report", "no run", "--force", "-o", str(tmp_path / "report.html"))
    assert "there is no run at no run" in err
    assert (tmp_path / "report.html").read_text() == "mine"


def test_options_are_json_where_they_can_be() -> None:
    words = ["tau=0.01", "grid=[4, 8]", "neighborhood=hard", "rotation_trick=true", "name=a=b"]
    assert parse_options(words) == {
        "tau": 0.01,
        "grid": [4, 8],
        "neighborhood": "hard",
        "rotation_trick": True,
        "name": "a=b",
    }
    with pytest.raises(ValueError, match="'tau' is not of the form KEY=VALUE"):
        parse_options(["tau"])
