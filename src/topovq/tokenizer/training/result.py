"""What a run came to, and whether the folder that it is to go to holds it already."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from topovq.tokenizer.training.checkpoint import checkpoints, identity_of, newest_whole
from topovq.tokenizer.training.config import TrainConfig, told_options
from topovq.tokenizer.training.record import RECORD_FILE, read_record


@dataclass(frozen=True)
class RunResult:
    """A finished run: its folder, its id, and the figures of its `final` line and last validation."""

    folder: Path
    run_id: str
    steps: int
    best_loss: float
    seconds: float
    validation: dict[str, float]


def check_folder(config: TrainConfig) -> RunResult | None:
    """Check that the run in the folder, if there is one, is this one; its result where it is finished."""
    folder = config.out
    assert folder is not None
    started = (folder / RECORD_FILE).exists()
    if not config.resume and (started or checkpoints(folder)):
        raise FileExistsError(f"{folder} already holds a run; add --resume to continue it, or choose another --out")
    lines = read_record(folder / RECORD_FILE) if started else []
    newest = newest_whole(folder) if not started else None
    told = lines[0] if started else identity_of(newest) if newest is not None else {}
    if told:
        missing = dict.fromkeys(config.identifying) if started else {}  # a checkpoint may tell of fewer
        config.check_same(f"the run in {folder}", {**missing, **told, "quantizer_options": told_options(told)})
    if lines and lines[-1]["event"] == "final" and lines[-1]["steps"] == config.steps:
        return result_of(folder)
    return None


def result_of(folder: Path) -> RunResult:
    """The result of the finished run in `folder`, from its record."""
    lines = read_record(folder / RECORD_FILE)
    if lines[-1]["event"] != "final":
        raise ValueError(f"the run in {folder} is not finished")
    validation = [line for line in lines if line["event"] == "validation"][-1]
    final = lines[-1]
    return RunResult(folder, lines[0]["id"], final["steps"], final["best_loss"], final["seconds"], validation)
