"""A stop that does not wait for a slow step or validation, and that changes nothing of the run."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny import TinySource, tiny_config
from torch import Tensor

from topovq.tokenizer.models import Tokenizer
from topovq.tokenizer.training import Interrupted, read_record, train
from topovq.tokenizer.training.interrupt import StopRequest

AGES = 30.0  # seconds that a slow thing takes, which no test waits for


def press() -> None:
    """Ctrl-C, a moment from now."""
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()


def record(run: Path) -> list[dict[str, Any]]:
    told = ("step", "loss", "usage", "tokens", "train_usage", "train_tokens", "dead_codes")
    lines = [line for line in read_record(run / "record.jsonl") if line["event"] == "validation"]
    return [{name: line[name] for name in told} for line in lines]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train(tiny_config(out), source=TinySource(), quiet=True)
    return out


def assert_goes_on_as(whole: Path, out: Path) -> None:
    train(tiny_config(out, resume=True), source=TinySource(), quiet=True)
    ours, theirs = (load_file(run / "model.safetensors") for run in (out, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert record(out) == record(whole)


def test_a_slow_step_is_dropped_and_done_again(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the forward pass, which moves the codes: they go back to where they were."""
    losses, calls = Tokenizer.losses, []

    def slow(self: Tokenizer, x: Tensor) -> tuple[Tensor, Tensor]:
        found = losses(self, x)
        calls.append(1)
        if len(calls) == 6:
            torch.rand(3)  # as if the step had drawn random numbers
            press()
            time.sleep(AGES)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "losses", slow)
        began = time.monotonic()
        with pytest.raises(Interrupted, match="stopped at step 5 of 12") as stopped:
            train(tiny_config(tmp_path / "run"), source=TinySource(), quiet=True)
    assert stopped.value.exit_code == 130
    assert time.monotonic() - began < 10
    assert_goes_on_as(whole, tmp_path / "run")


class SlowBatch(TinySource):
    def _train(self, batch_size: int, rows: range, seed: int, start: int) -> Generator[Tensor, None, None]:
        for i, batch in enumerate(super()._train(batch_size, rows, seed, start), start):
            if i == 3:
                press()
                time.sleep(AGES)
            yield batch


def test_waiting_for_a_batch_is_ended(whole: Path, tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(Interrupted, match="stopped at step 3 of 12"):
        train(tiny_config(tmp_path / "run"), source=SlowBatch(), quiet=True)
    assert time.monotonic() - began < 10
    assert_goes_on_as(whole, tmp_path / "run")


class SlowValidation(TinySource):
    """Slow at the validation `which`."""

    def __init__(self, which: int) -> None:
        super().__init__()
        self.left = which

    def _validation(self, indices: np.ndarray, batch_size: int) -> Generator[Tensor, None, None]:
        self.left -= 1
        if not self.left:
            press()
            time.sleep(AGES)
        yield from super()._validation(indices, batch_size)


@pytest.mark.parametrize(("which", "step"), [(2, 8), (3, 12)])
def test_a_slow_validation_is_made_up_for(which: int, step: int, whole: Path, tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(Interrupted, match=f"stopped at step {step} of 12"):
        train(tiny_config(tmp_path / "run"), source=SlowValidation(which), quiet=True)
    assert time.monotonic() - began < 10
    assert [line["step"] for line in record(tmp_path / "run")] == list(range(4, step, 4))
    assert_goes_on_as(whole, tmp_path / "run")


def test_the_answer_comes_at_once_and_a_second_press_quits(capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)

    def twice() -> Iterator[float]:
        with StopRequest() as stop:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
                yield float(stop.signum)
            time.sleep(AGES)

    presses = twice()
    assert next(presses) == signal.SIGINT
    assert "finishing this step, then saving; press again to quit without saving" in capfd.readouterr().err
    with pytest.raises(KeyboardInterrupt):
        list(presses)
    assert signal.getsignal(signal.SIGINT) is before


def test_nothing_comes_late_once_the_run_is_over() -> None:
    with StopRequest():
        os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.5)  # longer than anybody is given to end by himself
