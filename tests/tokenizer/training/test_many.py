"""Several runs at once are the runs they would have been alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from tiny import TinySource, tiny_config

from topovq.tokenizer.training import TrainConfig, read_record, train, train_all
from topovq.tokenizer.training import many as module

MOMENT = (
    "train_loss",
    "seconds",
    "images_per_second",
    "drift",
    "drift_steps",
    "ms_per_step",
    "peak_mib",
)  # they depend on when one looks


def lines(folder: Path) -> list[dict[str, Any]]:
    """What happened in a run, without how long it took."""
    record = read_record(folder / "record.jsonl")[1:]
    kept = [line for line in record if line["event"] != "resumed"]
    return [{name: value for name, value in line.items() if name not in MOMENT} for line in kept]


def configs(folder: Path, **changes: Any) -> list[TrainConfig]:
    kinds = [("kohonen", 0), ("ema", 0), ("gradient", 1)]
    return [tiny_config(folder / f"{kind}-{seed}", quantizer=kind, seed=seed, **changes) for kind, seed in kinds]


@pytest.mark.parametrize("at_once", [2, 3])
def test_runs_in_turns_are_those_done_alone(at_once: int, tmp_path: Path) -> None:
    alone, together = configs(tmp_path / "alone"), configs(tmp_path / "together")
    for config in alone:
        train(config, source=TinySource(), quiet=True)
    progress = module._Progress(together, 3, quiet=True)
    module._in_turns([c.resolve("cpu") for c in together], at_once, TinySource(), progress)
    for one, other in zip(alone, together):
        assert one.out is not None
        assert other.out is not None
        assert lines(one.out) == lines(other.out)
        assert read_record(other.out / "record.jsonl")[0]["at_once"] == at_once
    assert progress.left == 0


def test_what_is_finished_is_skipped_and_results_come_in_order(tmp_path: Path) -> None:
    made = configs(tmp_path)
    first = train(made[1], source=TinySource(), quiet=True)
    results = train_all(made, source=TinySource(), quiet=True)
    assert [result.folder for result in results] == [config.out for config in made]
    assert results[1].best_loss == first.best_loss
    assert len(lines(first.folder)) == 4  # three validations and the end: nothing was done twice


def photos(folder: Path, steps: int = 2) -> list[TrainConfig]:
    options = {"hidden": 8, "residual_hidden": 4}
    small = {"data": "photos", "image_size": 32, "steps": steps, "validate_every": 2, "model_options": options}
    return configs(folder, **small)[:2]


def test_processes_give_the_same_and_share_nothing(tmp_path: Path) -> None:
    alone = [train(config, quiet=True) for config in photos(tmp_path / "alone")]
    together = train_all(photos(tmp_path / "together"), jobs=2, quiet=True)
    for one, other in zip(alone, together):
        assert lines(one.folder) == lines(other.folder)


SCRIPT = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[1])
from test_many import configs
from tiny import TinySource
from topovq.tokenizer.training import Interrupted, many
try:
    every = {"validate_every": 40, "checkpoint_every": 40}
    made = configs(Path(sys.argv[2]), steps=int(sys.argv[3]), resume=True, **every)
    made = [c.resolve("cpu") for c in made]
    many._in_turns(made, 3, TinySource(), many._Progress(made, 3, quiet=True))
except Interrupted as stopped:
    sys.exit(stopped.exit_code)
"""


def test_a_stopped_sweep_goes_on_where_it_was(tmp_path: Path) -> None:
    steps = 120
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", SCRIPT, here, str(tmp_path / "cut"), str(steps)]
    process = subprocess.Popen(command)
    while not all((c.out / "record.jsonl").exists() for c in configs(tmp_path / "cut") if c.out):
        assert process.poll() is None
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    assert any(read_record(c.out / "record.jsonl")[-1]["event"] != "final" for c in configs(tmp_path / "cut") if c.out)
    subprocess.run(command, check=True)
    whole = configs(tmp_path / "whole", steps=steps, validate_every=40, checkpoint_every=40)
    train_all(whole, source=TinySource(), quiet=True)
    for one, other in zip(whole, configs(tmp_path / "cut")):
        assert one.out is not None
        assert other.out is not None
        assert lines(one.out) == lines(other.out)


IN_PROCESSES = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_many import photos
from topovq.tokenizer.training import train_all
if __name__ == "__main__":
    train_all(photos(Path(sys.argv[2]), steps=10**6), jobs=2, quiet=True)
"""


def test_a_killed_sweep_takes_its_processes_along(tmp_path: Path) -> None:
    """They would train on unseen, and keep the next sweep from their runs."""
    (tmp_path / "sweep.py").write_text(IN_PROCESSES)
    command = [sys.executable, str(tmp_path / "sweep.py"), str(Path(__file__).parent), str(tmp_path / "runs")]
    process = subprocess.Popen(command, start_new_session=True)
    folders = [config.out for config in photos(tmp_path / "runs") if config.out is not None]
    while not all((folder / "record.jsonl").exists() for folder in folders):
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()  # it alone, and not its process group
    process.wait()
    for _ in range(600):
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            break
        time.sleep(0.05)
    else:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail("processes of the sweep outlived it by 30 s")
    for folder in folders:
        FileLock(folder / ".lock", timeout=0).acquire().lock.release()


def test_two_never_write_one_record(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "run")
    (tmp_path / "run").mkdir()
    with (
        FileLock(tmp_path / "run" / ".lock"),
        pytest.raises(OSError, match="another process is training"),
    ):
        train(config, source=TinySource(), quiet=True)
    assert not (tmp_path / "run" / "record.jsonl").exists()
    train(config, source=TinySource(), quiet=True)


def test_a_number_of_jobs_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="jobs=0"):
        train_all(configs(tmp_path), jobs=0)
