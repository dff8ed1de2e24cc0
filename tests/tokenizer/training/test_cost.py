"""What a step costs: measured over the first steps, and only over steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import TinySource, tiny_config

from topovq.tokenizer.training import many as module
from topovq.tokenizer.training import read_record, train
from topovq.tokenizer.training.cost import FIRST, LAST, Cost

SELDOM = {"validate_every": 1_000, "checkpoint_every": 1_000, "log_every": 1_000}


def measured(steps: int, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.002) -> Cost:
    """A cost after so many steps, each of which takes `seconds`."""
    now = [5.0]
    monkeypatch.setattr("topovq.tokenizer.training.cost.time.monotonic", lambda: now[0])
    cost = Cost(torch.device("cpu"))
    for _ in range(steps):
        now[0] += seconds
        cost.step()
    return cost


def test_milliseconds_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    for steps in (LAST, LAST + 5):
        cost = measured(steps, monkeypatch)
        assert not cost.measuring
        assert cost.figures() == {"ms_per_step": 2.0, "peak_mib": None}


@pytest.mark.parametrize("steps", [FIRST - 1, FIRST, LAST - 1])
def test_a_run_that_is_over_too_soon_measures_nothing(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cost = measured(steps, monkeypatch)
    assert cost.measuring
    assert cost.figures() == {"ms_per_step": None, "peak_mib": None}


def test_nothing_is_measured_where_something_else_was_done(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = measured(FIRST + 1, monkeypatch)
    cost.give_up()
    assert not cost.measuring
    for _ in range(LAST):
        cost.step()
    assert cost.figures()["ms_per_step"] is None


def test_memory_of_other_runs_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    mib = 2**20
    held, peak = [100 * mib], [0]  # others hold 100 MiB
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: held[0])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak[0])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    cost = Cost(torch.device("cuda", 0))
    held[0] += 20 * mib
    cost.made()
    held[0] += 500 * mib  # other runs take their first steps
    cost.begin()
    held[0] += 3 * mib
    cost.start()
    peak[0] = held[0] + 7 * mib
    for _ in range(LAST):
        cost.step()
    assert cost.figures()["peak_mib"] == 20 + 3 + 7


def test_the_record_says_it(tmp_path: Path) -> None:
    train(tiny_config(tmp_path / "long", steps=LAST + 1, **SELDOM), source=TinySource(), quiet=True)
    assert read_record(tmp_path / "long" / "record.jsonl")[-1]["ms_per_step"] > 0
    train(tiny_config(tmp_path / "busy", steps=LAST + 1), source=TinySource(), quiet=True)
    assert read_record(tmp_path / "busy" / "record.jsonl")[-1]["ms_per_step"] is None


def test_a_run_takes_no_turns_while_it_is_measured(tmp_path: Path) -> None:
    configs = [tiny_config(tmp_path / str(seed), seed=seed, steps=LAST + 3, **SELDOM).resolve("cpu") for seed in (0, 1)]
    progress = module._Progress(configs, 2, quiet=True)
    told: list[int] = []
    progress.stepped = told.append  # type: ignore[method-assign]
    module._in_turns(configs, 2, TinySource(), progress)
    assert told == [LAST, LAST, 1, 1, 1, 1, 1, 1, 0, 0]
    assert all(read_record(tmp_path / name / "record.jsonl")[-1]["ms_per_step"] > 0 for name in ("0", "1"))
