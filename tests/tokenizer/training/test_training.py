"""Runs as a whole: what they leave behind, and that stopping them changes nothing."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import TinySource, tiny_config
from torch import Tensor
from warm import python

from topovq.tokenizer.training import Interrupted, load_run, read_record, result_of, train
from topovq.tokenizer.training.checkpoint import checkpoints, step_of

TINY = Path(__file__).with_name("tiny.py")


def losses(run: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in read_record(run / "record.jsonl") if line["event"] == "validation"}


def weights(run: Path) -> dict[str, Tensor]:
    return load_file(run / "model.safetensors")


def start(out: Path, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, str(TINY), str(out), *arguments]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)


def wait_for_checkpoint(run: Path, process: subprocess.Popen[str]) -> None:
    while not checkpoints(run):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train(tiny_config(out), source=TinySource(), quiet=True)
    return out


def test_a_run_leaves_its_record_checkpoints_and_model(whole: Path) -> None:
    lines = read_record(whole / "record.jsonl")
    assert [line["event"] for line in lines] == ["config", "validation", "validation", "validation", "final"]
    assert {"id", "seed", "steps", "source_name", "version_torch", "hardware", "parameters"} <= lines[0].keys()
    assert {"step", "loss", "perplexity", "usage", "psnr", "skipped", "images"} <= lines[1].keys()
    assert lines[1]["images"] == 10
    assert lines[-1]["steps"] == 12
    assert lines[-1]["best_loss"] == min(losses(whole).values())
    assert [step_of(folder) for folder in checkpoints(whole)] == [8, 12]
    model = load_run(whole)
    pixels = TinySource().held_out
    error = (model.normalize(model.decode(model.encode(pixels))) - model.normalize(pixels)).square().mean()
    assert float(error) == pytest.approx(losses(whole)[12], rel=0.01)  # pixels are rounded
    assert result_of(whole).best_loss == lines[-1]["best_loss"]


def test_training_learns(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "run", steps=200, validate_every=40, learning_rate=5e-3, codebook_size=64)
    result = train(config, source=TinySource(), quiet=True)
    curve = losses(tmp_path / "run")
    assert curve[200] < 0.7 * curve[40]
    assert result.validation["loss"] == curve[200]


def test_a_compiled_run_learns_the_same(whole: Path, tmp_path: Path) -> None:
    train(tiny_config(tmp_path / "run", compile=True), source=TinySource(), quiet=True)
    assert list(losses(tmp_path / "run").values()) == pytest.approx(list(losses(whole).values()), rel=1e-3)


def test_the_seed_decides_the_run(whole: Path, tmp_path: Path) -> None:
    train(tiny_config(tmp_path / "same"), source=TinySource(), quiet=True)
    assert losses(tmp_path / "same") == losses(whole)
    train(tiny_config(tmp_path / "other", seed=4), source=TinySource(), quiet=True)
    assert losses(tmp_path / "other") != losses(whole)


def test_the_training_loss_is_recorded_as_the_mean_since_the_last_validation(tmp_path: Path) -> None:
    every, each = (
        [line["train_loss"] for line in read_record(run / "record.jsonl") if line["event"] == "validation"]
        for run in (
            train(tiny_config(tmp_path / f"{often}", validate_every=often), source=TinySource(), quiet=True).folder
            for often in (4, 1)
        )
    )
    assert every == pytest.approx([sum(each[i : i + 4]) / 4 for i in (0, 4, 8)], rel=1e-5)


class Stopping(TinySource):
    """Asks for the run to stop while batch `at` is made."""

    def __init__(self, at: int = 6) -> None:
        super().__init__()
        self.at = at

    def train(self, *arguments: Any, start: int = 0, **options: Any) -> Iterator[Tensor]:
        for i, batch in enumerate(super().train(*arguments, start=start, **options), start):
            if i == self.at:
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch


def test_a_stopped_run_continues_to_the_same_end(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted, match=r"stopped at step 7 of 12.*--resume") as stopped:
        train(tiny_config(out), source=Stopping(), quiet=True)
    assert stopped.value.exit_code == 143
    assert signal.getsignal(signal.SIGTERM) is handler
    assert step_of(checkpoints(out)[-1]) == 7
    train(tiny_config(out, resume=True), source=TinySource(), quiet=True)
    assert losses(out) == losses(whole)
    ours, theirs = weights(out), weights(whole)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert [line["step"] for line in read_record(out / "record.jsonl") if line["event"] == "resumed"] == [7]


def test_kill_9_then_resume_equals_the_uninterrupted_run(tmp_path: Path) -> None:
    fields = {"steps": 160, "validate_every": 10, "checkpoint_every": 10}
    long = [f"{name}={value}" for name, value in fields.items()]
    killed = start(tmp_path / "killed", *long)
    wait_for_checkpoint(tmp_path / "killed", killed)
    time.sleep(random.uniform(0, 0.3))
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    reached = step_of(checkpoints(tmp_path / "killed")[-1])
    assert killed.returncode == -signal.SIGKILL, "the run was over before it could be killed"
    with open(tmp_path / "killed" / "record.jsonl", "a") as file:
        file.write('{"event": "validation", "step": 159, "lo')  # the worst place to die
    again = start(tmp_path / "killed", *long, "resume=true")
    train(tiny_config(tmp_path / "whole", **fields), source=TinySource(), quiet=True)
    output, _ = again.communicate(timeout=120)
    assert again.returncode == 0, output
    assert 10 <= reached < 160
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    assert not list((tmp_path / "killed" / "checkpoints").glob(".*"))


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_a_process_cleanly(signum: int, code: int, tmp_path: Path) -> None:
    process = start(tmp_path / "run", "steps=100000", "checkpoint_every=100000", "validate_every=5")
    while not (tmp_path / "run" / "record.jsonl").exists() or len(read_record(tmp_path / "run" / "record.jsonl")) < 3:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    process.send_signal(signum)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == code, output
    assert "--resume continues" in output.replace("\n", " ")
    assert "Traceback" not in output
    (checkpoint,) = checkpoints(tmp_path / "run")
    state = torch.load(checkpoint / "state.pt", weights_only=True)
    assert state["step"] == step_of(checkpoint)


def test_a_closed_terminal_leaves_a_checkpoint(tmp_path: Path) -> None:
    terminal, end = os.openpty()
    script = "import fcntl, runpy, sys, termios; fcntl.ioctl(1, termios.TIOCSCTTY, 0); sys.argv = sys.argv[1:]; "
    script += "runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [
        sys.executable,
        "-c",
        script,
        str(TINY),
        str(tmp_path / "run"),
        "steps=100000",
        "checkpoint_every=100000",
    ]
    process = subprocess.Popen(command, stdin=end, stdout=end, stderr=end, start_new_session=True)
    os.close(end)
    shown = b""
    while b"validation at" not in shown:  # as a narrow terminal has it
        shown += os.read(terminal, 1000)
    os.close(terminal)
    assert process.wait(timeout=60) == 128 + signal.SIGHUP
    (checkpoint,) = checkpoints(tmp_path / "run")
    assert torch.load(checkpoint / "state.pt", weights_only=True)["step"] == step_of(checkpoint)


def test_two_processes_do_what_one_does(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(TINY)]
    done = subprocess.run([*command, str(tmp_path / "two")], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    train(tiny_config(tmp_path / "one"), source=TinySource(), quiet=True)
    two, one = losses(tmp_path / "two"), losses(tmp_path / "one")
    assert two.keys() == one.keys()
    assert list(two.values()) == pytest.approx(list(one.values()), rel=1e-4)
    for name, ours in weights(tmp_path / "two").items():
        if ours.is_floating_point():
            torch.testing.assert_close(ours, weights(tmp_path / "one")[name], rtol=1e-3, atol=1e-4)
    assert read_record(tmp_path / "two" / "record.jsonl")[0]["world_size"] == 2


def test_a_finished_run_is_not_repeated(whole: Path) -> None:
    class Untouched:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"{name} was asked of the data")

    before = (whole / "record.jsonl").read_bytes()
    result = train(tiny_config(whole, resume=True), source=Untouched(), quiet=True)
    assert result.validation["loss"] == losses(whole)[12]
    assert (whole / "record.jsonl").read_bytes() == before


def test_a_run_can_be_made_longer(tmp_path: Path) -> None:
    # With a neighborhood that knows no end, a run made longer is the longer run.
    whole, out = tmp_path / "whole", tmp_path / "run"
    paper = {"quantizer_options": {"neighborhood": "hard"}}
    train(tiny_config(whole, **paper), source=TinySource(), quiet=True)
    train(tiny_config(out, steps=8, **paper), source=TinySource(), quiet=True)
    train(tiny_config(out, resume=True, **paper), source=TinySource(), quiet=True)
    assert losses(out) == losses(whole)
    assert read_record(out / "record.jsonl")[0]["id"] == read_record(whole / "record.jsonl")[0]["id"]


def test_a_run_made_longer_keeps_its_schedule(tmp_path: Path) -> None:
    out, whole = tmp_path / "run", tmp_path / "whole"
    large = {"codebook_size": 1024}  # wide enough a map for its neighborhood to fall
    falls = {"neighborhood": "narrowing"}
    train(tiny_config(out, steps=8, quantizer_options=falls, **large), source=TinySource(), quiet=True)
    widths = [load_run(out).quantizers[0].neighborhood.width(torch.tensor(t)).item() for t in range(12)]
    train(tiny_config(out, resume=True, **large), source=TinySource(), quiet=True)
    vq = load_run(out).quantizers[0]
    assert (vq.step.item(), read_record(out / "record.jsonl")[0]["steps"]) == (12, 12)
    assert [vq.neighborhood.width(torch.tensor(t)).item() for t in range(12)] == widths
    assert widths[0] > widths[1] > widths[8] == widths[11]
    # ... as if it had been a run of 12 steps with a schedule for 8; the schedule for 12 is another run.
    train(tiny_config(whole, quantizer_options={**falls, "steps": 8}, **large), source=TinySource(), quiet=True)
    assert losses(out) == losses(whole)
    other = tiny_config(out, resume=True, quantizer_options={**falls, "steps": 12}, **large)
    with pytest.raises(ValueError, match=r"started with quantizer_options=.* but is resumed with quantizer_options="):
        train(other, source=TinySource(), quiet=True)


def test_a_folder_with_a_run_is_not_overwritten(whole: Path) -> None:
    with pytest.raises(FileExistsError, match="already holds a run; add --resume"):
        train(tiny_config(whole), source=TinySource(), quiet=True)
    with pytest.raises(ValueError, match=r"started with seed=3 but is resumed with seed=9"):
        train(tiny_config(whole, resume=True, seed=9), source=TinySource(), quiet=True)


def test_an_unwritable_folder_is_said_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot make the run's folder .*file/run: Not a directory"):
        train(tiny_config(tmp_path / "file" / "run"), source=TinySource(), quiet=True)


FULL_DISK = """
import resource, runpy, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit then fails, as on a full disk
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_full_disk_is_said_and_leaves_the_last_checkpoint_whole(tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(tiny_config(out, steps=8), source=TinySource(), quiet=True)
    room = (checkpoints(out)[-1] / "state.pt").stat().st_size - 1
    done = python("-c", FULL_DISK, str(room), TINY, out, "resume=true")
    assert done.returncode == 1
    assert "could not write the checkpoint of step 12" in done.stderr
    assert "the last whole one is" in done.stderr
    assert [step_of(folder) for folder in checkpoints(out)] == [4, 8]
    assert not list((out / "checkpoints").glob(".*"))
    result = train(tiny_config(out, resume=True), source=TinySource(), quiet=True)
    assert result.steps == 12


def test_a_nan_loss_and_skipped_vectors_are_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = TinySource()
    source.mean = (float("nan"), 127.5, 127.5)
    monkeypatch.setattr(source, "describe", dict)  # JSON has no NaN
    monkeypatch.setattr("topovq.tokenizer.training.loop.is_finite", lambda model: True)  # else it would stop
    train(tiny_config(tmp_path / "run"), source=source)
    output = capsys.readouterr().out
    assert output.count("the loss is nan at step 2") == 1
    assert "vectors left out of the codebook: NaN, infinity" in output
    lines = [json.loads(line) for line in (tmp_path / "run" / "record.jsonl").read_text().splitlines()]
    assert lines[1]["loss"] is None
    assert lines[1]["skipped"] == 4 * 8 * 16  # steps x images x tokens


def test_progress_without_a_terminal_is_a_line_per_validation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tiny_config(tmp_path / "run"), source=TinySource())
    what, how, estimate, *lines = capsys.readouterr().out.splitlines()
    assert what == "24 training and 10 validation images of 16x16 pixels"
    assert how == "vqvae, kohonen: 16 codes, 12 steps on the CPU, 1 thread"
    assert re.fullmatch(r"about \d+ s for 12 steps \(.* s a step\)", estimate)
    assert [line.split()[1] for line in lines] == ["4", "8", "12"]
    assert all(word in lines[0] for word in ("validation loss", "perplexity", "of 160 tokens", "images/s"))


def test_tensorboard_files_hold_both_curves(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(tiny_config(tmp_path / "run", tensorboard=True), source=TinySource(), quiet=True)
    events = EventAccumulator(str(tmp_path / "run")).Reload()
    values = {event.step: event.value for event in events.Scalars("validation/loss")}
    assert values == pytest.approx(losses(tmp_path / "run"))
    assert [event.step for event in events.Scalars("train/loss")] == [2, 4, 6, 8, 10, 12]


def test_a_missing_logger_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"pip install 'topovq\[log\]'"):
        train(tiny_config(tmp_path / "run", wandb="project"), source=TinySource(), quiet=True)
