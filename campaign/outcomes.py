"""What may become of a case, and the table of how often each did."""

from __future__ import annotations

import csv
import platform
import subprocess
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

OUTCOMES = {
    "right": "the result is that of the sound input",
    "refused": "one sentence that names the file, and an exit code that is not 0",
    "unclear": "refused, but without the file's name, or in more than a sentence",
    "silent": "accepted, and the result is another one",
    "traceback": "an error that nobody had foreseen",
    "crash": "the process died of a signal",
    "hang": "more than 10 seconds",
    "memory": "more than 1 GiB beyond what the sound input needs",
}
GOOD = ("right", "refused")
VERSIONS_OF = ("torch", "numpy", "safetensors", "pyarrow", "pillow", "fastapi", "uvicorn", "hypothesis", "schemathesis")


@dataclass
class Row:
    """A line of the table: how the cases of one kind ended, and what else was measured."""

    part: str
    format: str
    counts: Counter[str] = field(default_factory=Counter)
    figures: dict[str, float] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def add(self, outcome: str, case: str) -> None:
        assert outcome in OUTCOMES, outcome
        self.counts[outcome] += 1
        if outcome not in GOOD:
            self.faults.append(f"{outcome}: {self.part} {self.format}: {case}")


def write_table(rows: Iterable[Row], path: Path, seed: int) -> None:
    """The rows as CSV, each with seed, commit, hardware and versions."""
    rows = list(rows)
    figures = list(dict.fromkeys(name for row in rows for name in row.figures))
    facts = {"seed": seed, "commit": commit(), "hardware": hardware(), "python": platform.python_version()}
    facts |= {f"version_{name}": metadata.version(name) for name in VERSIONS_OF}
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["part", "format", "cases", *OUTCOMES, *figures, *facts])
        for row in rows:
            counts = [row.counts[outcome] for outcome in OUTCOMES]
            measured = [row.figures.get(name, "") for name in figures]
            writer.writerow([row.part, row.format, sum(counts), *counts, *measured, *facts.values()])


def commit() -> str:
    """The commit of the code that was attacked, with a + where it has changes."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=here, capture_output=True, text=True).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + "+" * bool(git("status", "--porcelain"))


def hardware() -> str:
    names: list[Any] = []
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            names.append(line.split(":", 1)[1].strip())
    return f"{len(names)} cores of {names[0]}" if names else platform.machine()
