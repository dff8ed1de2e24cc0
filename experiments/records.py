"""Records: what runs wrote about themselves, and how one is found again.

The trainer's runs have a file each, of many lines (`Record`): they are found by what was run, never by a name. The runs
of studies with loops of their own (clients, prior) are cells: a line each, found by the cell's id. Needs torch and the
standard library until a trainer's record is asked for, as the machines that train have little more.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import platform
import statistics
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import torch

if TYPE_CHECKING:
    from topovq.tokenizer.training import TrainConfig

RECORDS = Path(__file__).parents[1] / "records"
REPLACED = "replaced"
NAMED = 6  # problems that a message names before it only counts
# Two runs that differ in one of these are different cells; in anything else, one cell run in two ways.
CELL = ("data", "model", "codebook_size", "quantizer", "quantizer_options", "seed")
# What a validation tells of the time since the last look, which a stop cuts short, and not of the model.
PASSING = ("seconds", "images_per_second", "drift", "drift_steps", "ms_per_step", "peak_mib", "train_loss")
ADDED = ("tokens", "tokens_0", "tokens_1", "train_tokens")  # which older records do not tell
VERSIONS_OF = ("topovq", "torch", "numpy", "vector-quantize-pytorch")
Facts = dict[str, Any]


def files_of(folders: Iterable[Path]) -> Iterator[tuple[Path, Facts]]:
    """The files of JSON lines in some folders, at any depth, each once, and their first lines.

    Those of runs that were done again, in a folder `replaced` of these, are left out.
    """
    every = ((folder, path) for folder in folders for path in sorted(folder.rglob("*.jsonl")))
    paths = {path.resolve(): path for folder, path in every if REPLACED not in path.relative_to(folder).parts}
    for path in paths.values():
        with open(path, "rb") as file:
            first = file.readline()
        told: object = None
        with contextlib.suppress(ValueError):
            told = json.loads(first)
        if isinstance(told, dict):
            yield path, told


def digest(values: Mapping[str, Any]) -> str:
    """The hash of values that identify a run."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def some(problems: Sequence[str]) -> str:
    """The first few of them, and how many more there are."""
    more = len(problems) - NAMED
    return "; ".join(problems[:NAMED]) + (f"; and {more} more" if more > 0 else "")


# Of the trainer's runs


def identity(config: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a configuration (resolved, or a record's first line) that identify the run.

    Where the data lay does not: what was found there is in the record's `source_` fields. A value that a record does
    not have is of a time when there was no choice: it is the default.
    """
    from topovq.tokenizer.training.config import IDENTITY, TrainConfig, told_options

    values = {}
    for field in fields(TrainConfig):
        if field.name in IDENTITY and field.name != "data_path":
            default = field.default_factory() if field.default_factory is not MISSING else field.default
            values[field.name] = config.get(field.name, default)
    return {**values, "quantizer_options": told_options(config)}


def resolved(config: TrainConfig) -> TrainConfig:
    """With everything filled in; specs name the precision, so that no device has a say in it."""
    return config.resolve("cuda" if config.precision == "bf16" else "cpu")


@dataclass(frozen=True)
class Record:
    """The record of one run: its configuration, then what happened."""

    path: Path
    lines: list[dict[str, Any]]

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
        return [{name: value for name, value in line.items() if name not in (*PASSING, *ADDED)} for line in seen]

    def traces(self) -> list[dict[str, Any]]:
        """What it tells of single training batches, where that was asked for."""
        return [line for line in self.lines if line["event"] == "trace"]

    @property
    def losses(self) -> dict[int, float]:
        """Validated step -> loss; one that was not finite (null in the record) is infinite."""
        seen = self.validations()
        losses = {line["step"]: math.inf if line["loss"] is None else float(line["loss"]) for line in seen}
        if not any(map(math.isfinite, losses.values())):
            raise ValueError(f"{self.path}: none of the {len(seen)} validations has a finite loss")
        return losses

    @property
    def best(self) -> float:
        """The lowest loss."""
        return min(self.losses.values())

    def steps_to(self, ratio: float) -> int:
        """The first validated step whose loss is at most `ratio` times the best one (1.1: within 10%)."""
        return next(step for step, loss in self.losses.items() if loss <= ratio * self.best)


class Records:
    """All records in some folders (`files_of`): `record.jsonl` of a run's folder, or `NAME.jsonl`."""

    def __init__(self, folders: Iterable[Path]) -> None:
        from topovq.tokenizer.training import read_record

        self.found: dict[str, list[Record]] = {}
        for path, first in files_of(folders):
            if first.get("event") == "config" and "steps" in first:
                record = Record(path, [_over_parts(line) for line in read_record(path)])
                self.found.setdefault(digest(identity(record.config)), []).append(record)

    def __iter__(self) -> Iterator[Record]:
        return (record for same in self.found.values() for record in same)

    def finished(self, config: TrainConfig) -> Record | None:
        """The finished record of this run; two that disagree are refused."""
        done = [record for record in self._same(config) if record.finished]
        for other in done[1:]:
            if other.validations() != done[0].validations():
                raise ValueError(
                    f"{done[0].path} and {other.path} are records of one run ({resolved(config).run_id}) "
                    "but tell of different validations: move one of them away"
                )
        return done[0] if done else None

    def all_finished(self, configs: Iterable[TrainConfig]) -> list[Record]:
        """Of these runs the records that there are."""
        return [run for run in map(self.finished, configs) if run is not None]

    def instead(self, config: TrainConfig) -> str | None:
        """For a run that is not there: what is there of it or nearly is it, in words."""
        cut_off = max(self._same(config), key=lambda record: record.reached, default=None)
        if cut_off is not None:
            return f"{cut_off.path} was cut off at step {cut_off.reached:,}"
        wanted = identity(resolved(config).as_dict())
        best: tuple[int, str] | None = None
        for record in self:
            theirs = identity(record.config)
            other = [name for name in wanted if theirs[name] != wanted[name]]
            if record.finished and not set(other) & set(CELL) and (best is None or len(other) < best[0]):
                values = ", ".join(f"{name}={theirs[name]!r} instead of {wanted[name]!r}" for name in other)
                best = len(other), f"{record.path} has {values}"
        return best[1] if best else None

    def _same(self, config: TrainConfig) -> list[Record]:
        return self.found.get(digest(identity(resolved(config).as_dict())), [])


def _over_parts(line: dict[str, Any]) -> dict[str, Any]:
    """A line whose loss is the mean of those of the validation sets, where there are several, as the paper's is.

    The loss over the images of all sets together is `loss_pooled`.
    """
    parts = [value for name, value in line.items() if name.startswith("loss_") and value is not None]
    if line["event"] != "validation" or len(parts) < 2:
        return line
    return {**line, "loss": statistics.fmean(parts), "loss_pooled": line["loss"]}


def check_alike(runs: Iterable[Record]) -> None:
    """Refuse runs whose data sets were not the same: no configuration speaks of what lay in a folder."""
    mixed = mixtures(runs)
    if mixed:
        raise ValueError(f"these runs are not one experiment: {some(mixed)}")


def mixtures(runs: Iterable[Record]) -> list[str]:
    """What the runs' data sets, which no id speaks of, have different values of: images, normalization, size."""
    values: dict[str, dict[str, list[str]]] = {}
    for run in runs:
        for name, value in run.config.items():
            if name.startswith("source_") and name not in ("source_path", "source_skipped"):
                values.setdefault(name, {}).setdefault(str(value), []).append(run.path.as_posix())
    return [
        f"{name} is " + " and ".join(f"{value} in {len(paths)} ({paths[0]})" for value, paths in found.items())
        for name, found in values.items()
        if len(found) > 1
    ]


# Of runs that are cells


class Cell(Protocol):
    """What a study calls one of its runs: a dataclass that also has a seed."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

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
    for path, first in files_of(folders):
        if first.get("study") == study:
            yield from ((path, record) for record in read(path))


def finished(study: str, folders: Iterable[Path], cell_of: Callable[[Facts], Cell]) -> dict[str, Facts]:
    """The records of finished runs by id; two of one run that disagree are refused."""
    found: dict[str, Facts] = {}
    for path, record in of_study(study, folders):
        if "rows" in record:
            run = cell_of(record["cell"])
            if found.setdefault(run.id, record)["rows"] != record["rows"]:
                raise ValueError(f"{path}: there are two records of {run.name!r}, which disagree")
    return found


def by_seeds(wanted: Iterable[AnyCell], found: dict[str, Facts]) -> tuple[dict[AnyCell, list[Facts]], list[AnyCell]]:
    """Each cell, as of seed 0, with the records of its seeds; and the cells that have none."""
    of_seeds: dict[AnyCell, list[Facts]] = {}
    lacking = []
    for cell in wanted:
        records = of_seeds.setdefault(replace(cell, seed=0), [])
        if cell.id in found:
            records.append(found[cell.id])
        else:
            lacking.append(cell)
    return of_seeds, lacking
