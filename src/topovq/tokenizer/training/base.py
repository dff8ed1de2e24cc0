"""What the trainings of tokenizers and priors share: when they look, how they are kept, stopped and resumed."""

from __future__ import annotations

import contextlib
import math
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
from filelock import FileLock, Timeout
from torch import nn

from topovq.distributed import World
from topovq.tokenizer.training.checkpoint import (
    checkpoints,
    identity_of,
    load_checkpoint,
    load_newest,
    newest_whole,
    save_checkpoint,
)
from topovq.tokenizer.training.config import Configuration, TrainConfig, told_options
from topovq.tokenizer.training.interrupt import Interrupted, StopRequest
from topovq.tokenizer.training.record import RECORD_FILE, Record, environment, read_record

LOCK = ".lock"


class Due(NamedTuple):
    """What happens after a step; `logging` where any of it does, and in between."""

    last: bool
    validating: bool
    saving: bool
    logging: bool


class Training:
    """The state of one training, of which a subclass makes the model and the optimizer, and takes the steps."""

    what: ClassVar[str]
    """How messages call it: a run, a prior."""
    model: nn.Module
    """With `files()`, as checkpoints want it."""
    optimizer: torch.optim.AdamW

    def __init__(self, config: Configuration, world: World, quiet: bool) -> None:
        assert config.out is not None
        assert config.steps is not None
        assert config.batch_size is not None
        assert config.validate_every is not None
        assert config.checkpoint_every is not None
        assert config.log_every is not None
        self.configuration, self.world, self.folder = config, world, config.out
        self.total, self.batch_size, self.log_every = config.steps, config.batch_size, config.log_every
        self.validate_every, self.checkpoint_every = config.validate_every, config.checkpoint_every
        self.quiet = quiet or not world.leads
        self.record = Record(self.folder / RECORD_FILE)
        self.step, self.seconds, self.best = 0, 0.0, math.inf
        self.validation: dict[str, float] = {}

    def due(self) -> Due:
        last = self.step == self.total
        validating = last or self.step % self.validate_every == 0
        saving = last or self.step % self.checkpoint_every == 0
        return Due(last, validating, saving, validating or saving or self.step % self.log_every == 0)

    def stopping(self, stop: StopRequest, logging: bool) -> bool:
        """Whether to stop: processes must at the same step, so several look only where they are logging."""
        return self.world.any(bool(stop.signum)) if logging or self.world.size == 1 else False

    def stopped(self, stop: StopRequest) -> NoReturn:
        """End after a checkpoint, from which the same command goes on."""
        raise Interrupted(
            stop.signum or signal.SIGTERM,
            f"stopped at step {self.step:,} of {self.total:,}; the checkpoint is in {self.folder}: "
            "the same command with --resume continues",
        )

    def resume(self) -> None:
        """Go on from the newest sound checkpoint, if there is any."""
        load_newest(self.folder, self._load, self.world)
        if self.step > self.total:
            raise ValueError(
                f"the {self.what} in {self.folder} is at step {self.step} already, beyond steps={self.total}"
            )

    def _load(self, checkpoint: Path) -> None:
        state = load_checkpoint(checkpoint, self.model, self.optimizer, self.world.device)
        self.step, self.seconds, self.best = state["step"], state["seconds"], state["best"]
        self.validation = state["validation"]
        self.take(state)
        if len(state["rng"]) == self.world.size:  # another number of processes has no generator state of its own
            torch.set_rng_state(state["rng"][self.world.rank])
            if self.world.device.type == "cuda" and state["cuda_rng"]:
                torch.cuda.set_rng_state(state["cuda_rng"][self.world.rank], self.world.device)

    def save(self) -> None:
        cuda = self.world.device.type == "cuda"
        state = {
            "optimizer": self.optimizer.state_dict()["state"],
            "rng": self.world.gather(torch.get_rng_state()),
            "cuda_rng": self.world.gather(torch.cuda.get_rng_state(self.world.device)) if cuda else [],
            "seconds": self.seconds,
            "best": self.best,
            "validation": self.validation,
            **self.state(),
        }
        if self.world.leads:
            keep = self.configuration.keep_checkpoints
            save_checkpoint(self.folder, self.step, self.model, state, keep, self.configuration.identity)  # type: ignore[arg-type]
        self.world.wait()

    def state(self) -> dict[str, Any]:
        """What else a checkpoint holds; `skipped` at least."""
        raise NotImplementedError

    def take(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        raise NotImplementedError

    def begin_record(self, first: dict[str, Any]) -> None:
        """Start the record with this line, or take it up at the checkpoint that was loaded."""
        if self.world.leads:
            if self.record.path.exists():
                self.record.rewind(self.step, **first)
                self.record.append("resumed", step=self.step, **environment(self.world.device, self.world.size))
            else:
                self.record.start(**first)
        self.world.wait()

    def result(self) -> RunResult:
        return RunResult(self.folder, self.configuration.run_id, self.total, self.best, self.seconds, self.validation)


@contextlib.contextmanager
def alone(folder: Path, world: World) -> Iterator[None]:
    """Hold the run's folder, which is made: two processes never write one record. Of several ranks the first does.

    What was made goes again if an error comes before anything was written.
    """
    if not world.leads:
        yield
        return
    made = [path for path in (folder / LOCK, folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"cannot make the run's folder {folder}: {error.strerror}") from error
    lock = FileLock(folder / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise OSError(f"another process is training in {folder}; wait for it or choose another folder") from None
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # where another process has put something there meanwhile
            if made and [path.name for path in folder.iterdir()] == [LOCK]:
                made[0].unlink()
                for path in made[1:]:
                    path.rmdir()
        raise
    finally:
        lock.release()


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
