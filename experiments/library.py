"""Finished runs by what was run: records in folders, found by their configuration and never by their name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from topovq.tokenizer.training import TrainConfig, read_record
from topovq.tokenizer.training.config import NOT_IN_ID, NOT_IN_RECORD, told_options

# What decides a result. Where the data lies does not: what was found there is in the record's `source_` fields.
NOT_DECISIVE = (*NOT_IN_ID, *NOT_IN_RECORD, "data_path")
DECISIVE = [field for field in fields(TrainConfig) if field.name not in NOT_DECISIVE]
# Two runs that differ in one of these are different cells; in anything else, one cell run in two ways.
CELL = ("data", "model", "codebook_size", "quantizer", "quantizer_options", "seed")
# What a validation tells of the time since the last look, which a stop cuts short, and not of the model.
PASSING = ("seconds", "images_per_second", "drift", "drift_steps", "ms_per_step", "peak_mib")


def decisive(config: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a configuration (resolved, or a record's first line) that decide its result.

    A value that a record does not have is of a time when there was no choice: it is the default.
    """
    values = {}
    for field in DECISIVE:
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        values[field.name] = config.get(field.name, default)
    return {**values, "quantizer_options": told_options(config)}


def resolved(config: TrainConfig) -> TrainConfig:
    """With everything filled in; studies name the precision, so that no device has a say in it."""
    return config.resolve("cuda" if config.precision == "bf16" else "cpu")


def _hash(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Found:
    """A record on the disk."""

    path: Path

    @cached_property
    def lines(self) -> list[dict[str, Any]]:
        return read_record(self.path)

    @property
    def config(self) -> dict[str, Any]:
        return self.lines[0]

    @property
    def finished(self) -> bool:
        return self.lines[-1]["event"] == "final" and self.lines[-1]["steps"] == self.config["steps"]

    @property
    def reached(self) -> int:
        """The last step the record tells of."""
        return max((line["step"] for line in self.lines[1:]), default=0)

    def validations(self) -> list[dict[str, Any]]:
        """Its validations without what differs from one time to the next."""
        seen = [line for line in self.lines if line["event"] == "validation"]
        return [{name: value for name, value in line.items() if name not in PASSING} for line in seen]


class Library:
    """All records in some folders, at any depth (`record.jsonl` of a run's folder, or `NAME.jsonl`)."""

    def __init__(self, folders: Iterable[Path]) -> None:
        self.found: dict[str, list[Found]] = {}
        paths = {path.resolve(): path for folder in folders for path in sorted(folder.rglob("*.jsonl"))}
        for path in paths.values():
            if _is_record(path):
                found = Found(path)
                self.found.setdefault(_hash(decisive(found.config)), []).append(found)

    def all(self) -> Iterable[Found]:
        return (found for same in self.found.values() for found in same)

    def finished(self, config: TrainConfig) -> Found | None:
        """The finished record of this run; two that disagree are refused."""
        done = [found for found in self._same(config) if found.finished]
        for other in done[1:]:
            if other.validations() != done[0].validations():
                raise ValueError(
                    f"{done[0].path} and {other.path} are records of one run ({resolved(config).run_id}) "
                    "but tell of different validations: move one of them away"
                )
        return done[0] if done else None

    def instead(self, config: TrainConfig) -> str | None:
        """For a run that is not there: what is there of it or nearly is it, in words."""
        cut_off = max((found for found in self._same(config)), key=lambda found: found.reached, default=None)
        if cut_off is not None:
            return f"{cut_off.path} was cut off at step {cut_off.reached:,}"
        wanted = decisive(resolved(config).as_dict())
        best: tuple[int, str] | None = None
        for found in self.all():
            theirs = decisive(found.config)
            other = [name for name in wanted if theirs[name] != wanted[name]]
            if found.finished and not set(other) & set(CELL) and (best is None or len(other) < best[0]):
                values = ", ".join(f"{name}={theirs[name]!r} instead of {wanted[name]!r}" for name in other)
                best = len(other), f"{found.path} has {values}"
        return best[1] if best else None

    def _same(self, config: TrainConfig) -> list[Found]:
        return self.found.get(_hash(decisive(resolved(config).as_dict())), [])


def _is_record(path: Path) -> bool:
    """Whether the first line is a run's configuration; other files of JSON lines may lie about."""
    try:
        with open(path, "rb") as file:
            first = json.loads(file.readline())
    except ValueError:
        return False
    return isinstance(first, dict) and first.get("event") == "config" and "steps" in first
