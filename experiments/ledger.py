"""The records of studies whose runs are cells (clients, prior): lines of JSON files, found again by a cell's id.

Needs torch and the standard library alone, as the machines that train have little more.
"""

from __future__ import annotations

import contextlib
import json
import platform
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

VERSIONS_OF = ("topovq", "torch", "numpy", "vector-quantize-pytorch")
Facts = dict[str, Any]


class Cell(Protocol):
    """What a study calls one of its runs."""

    @property
    def id(self) -> str: ...

    @property
    def name(self) -> str: ...


AnyCell = TypeVar("AnyCell", bound=Cell)


def environment(device: torch.device, commit: str | None) -> Facts:
    """What every record says of the machine and the code."""
    if commit is None:
        here = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
        with contextlib.suppress(OSError):
            commit = subprocess.run(here, capture_output=True, text=True, check=False).stdout.strip() or None
    facts: Facts = {"commit": commit, "version_python": platform.python_version()}
    for name in VERSIONS_OF:
        with contextlib.suppress(metadata.PackageNotFoundError):
            facts[f"version_{name}"] = metadata.version(name)
    facts["version_torch"] = torch.__version__
    hardware = platform.processor() or platform.machine()
    facts["hardware"] = torch.cuda.get_device_name() if device.type == "cuda" else hardware
    return facts


def write(path: Path, record: Facts) -> None:
    """Add a line. One that a killed process left unfinished is ended first, or it would swallow this one."""
    cut_off = path.exists() and not path.read_bytes().endswith(b"\n")
    with open(path, "a") as file:
        file.write("\n" * cut_off + json.dumps(record) + "\n")


def read(path: Path) -> list[Facts]:
    """The records in a file, also of runs that failed; a line that was cut off is none."""
    records = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            records.append(json.loads(line))
    return records


def of_study(study: str, folders: Iterable[Path]) -> Iterator[tuple[Path, Facts]]:
    """The records of a study below some folders, and where they are."""
    for folder in folders:
        for path in sorted(folder.rglob("*.jsonl")):
            if _study_of(path) == study:
                yield from ((path, record) for record in read(path))


def _study_of(path: Path) -> object:
    with open(path, "rb") as file:
        try:
            first = json.loads(file.readline())
        except ValueError:
            return None
    return first.get("study") if isinstance(first, dict) else None


def finished(study: str, folders: Iterable[Path], cell_of: Callable[[Facts], Cell]) -> dict[str, Facts]:
    """The records of finished runs by id; two of one run that disagree are refused."""
    found: dict[str, Facts] = {}
    for path, record in of_study(study, folders):
        if "rows" in record:
            run = cell_of(record["cell"])
            if found.setdefault(run.id, record)["rows"] != record["rows"]:
                raise ValueError(f"{path}: there are two records of {run.name!r}, which disagree")
    return found


def left_to_run(
    needed: Sequence[AnyCell], found: dict[str, Facts], quick: bool, say: Callable[[str], object]
) -> list[AnyCell]:
    """The cells that no record tells of, and a word on how many they are."""
    todo = [cell for cell in needed if cell.id not in found]
    say(f"{len(needed)} runs are needed; {len(needed) - len(todo)} of them are done already")
    if todo and not quick and not torch.cuda.is_available():
        say("there is no GPU here: this takes hours a run (--quick makes a small version in a minute)")
    return todo
