"""What the trainings of tokenizers and priors share: when they look, how they are kept, stopped and resumed."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
from torch import nn

from topovq.distributed import World
from topovq.tokenizer.training.checkpoint import load_checkpoint, load_newest, save_checkpoint
from topovq.tokenizer.training.config import Configuration
from topovq.tokenizer.training.interrupt import Interrupted, StopRequest
from topovq.tokenizer.training.record import RECORD_FILE, Record, environment
from topovq.tokenizer.training.result import RunResult


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
