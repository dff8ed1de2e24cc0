"""A short, seeded slice of the campaign, and that it sees what it is there to see."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from campaign.apart import MEMORY, Ended, apart
from campaign.files import classify
from campaign.outcomes import OUTCOMES, Row, write_table
from campaign.targets import Attack, Target

ROOT = Path(__file__).parents[1]


def test_a_slice_of_it_ends_well(tmp_path: Path) -> None:
    """In a process that has computed nothing yet, since it forks."""
    table = tmp_path / "campaign.csv"
    command = [sys.executable, "-m", "campaign", "--cases", "17", "--seed", "7", "--out", str(table)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    with open(table, newline="") as file:
        rows = {(row["part"], row["format"]): row for row in csv.DictReader(file)}
    assert Counter(part for part, _ in rows) == {"files": 17, "kills": 4, "ranks": 2, "requests": 3}
    for row in rows.values():
        assert int(row["right"]) + int(row["refused"]) == int(row["cases"]) > 0
    assert rows["requests", "normal clients"]["refused"] == "0"
    assert rows["ranks", "4 ranks"]["right"] == "2"


# What it sees


def boom() -> None:
    raise KeyError("shapes")


def exits(text: str) -> None:
    print(text, file=sys.stderr)
    sys.exit(2)


ENDS: dict[str, Any] = {
    "right": lambda: "sound",
    "silent": lambda: "another",
    "refused": lambda: exits("topovq: a/t.npz is damaged"),
    "unclear": lambda: exits("topovq: it is damaged"),
    "traceback": boom,
    "crash": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hang": lambda: time.sleep(60),
    "memory": lambda: bytearray(2 * MEMORY),
}


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_each_outcome_is_seen(outcome: str, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    attack = Attack(Target("npz", ("a/t.npz",), ()), "a/t.npz", "flip_bit", ENDS[outcome], False, b"")
    ended = apart(ENDS[outcome], seconds=0.5 if outcome == "hang" else 10)
    assert classify(ended, attack, "sound", tmp_path) == outcome


def test_a_refusal_is_one_sentence_without_torchs_advice(tmp_path: Path) -> None:
    attack = Attack(Target("npz", ("t.npz",), ()), "t.npz", "flip_bit", boom, False, b"")

    def seen(text: str) -> str:
        return classify(Ended("exit", code=2, text=text), attack, None, tmp_path)

    assert seen("note: older\ntopovq: t.npz is damaged\n") == "refused"
    assert seen("topovq: t.npz is damaged\nmore of it\n") == "unclear"
    assert seen("topovq: t.npz: try weights_only=False\n") == "unclear"
    assert seen("Traceback (most recent call last):\n  t.npz\n") == "traceback"


def test_the_table_has_counts_seed_commit_and_versions(tmp_path: Path) -> None:
    row = Row("files", "npz", Counter(right=3), {"p99_ms": 12.5})
    row.add("silent", "case 4")
    assert row.faults == ["silent: files npz: case 4"]
    write_table([row], tmp_path / "campaign.csv", seed=5)
    head, values = (line.split(",") for line in (tmp_path / "campaign.csv").read_text().splitlines())
    told = dict(zip(head, values))
    assert (told["cases"], told["right"], told["silent"], told["crash"], told["seed"]) == ("4", "3", "1", "0", "5")
    assert told["p99_ms"] == "12.5"
    assert told["commit"]
    assert told["version_torch"].startswith("2.")
