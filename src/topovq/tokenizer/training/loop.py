"""Training from a configuration to a finished run: `train(TrainConfig(...)) -> RunResult`.

The run's folder:
    record.jsonl                   what happened (see record.py)
    checkpoints/step-00001000/     the newest few (see checkpoint.py)
    snapshots/step-00000120.npz    how the maps looked on the way, if asked for (see snapshots.py)
    config.json, model.safetensors the final model, as `from_pretrained` reads it
    README.md                      its model card
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator
from typing import Any, NoReturn

import numpy as np
import torch

from topovq.distributed import World, join_world, pick_device
from topovq.storage import write_files
from topovq.tokenizer.atlas import charts, map_picture
from topovq.tokenizer.data import Source, open_data
from topovq.tokenizer.models import Tokenizer
from topovq.tokenizer.training.base import RunResult, Training, alone, check_folder
from topovq.tokenizer.training.card import write_card
from topovq.tokenizer.training.checkpoint import checkpoints
from topovq.tokenizer.training.config import TrainConfig
from topovq.tokenizer.training.cost import LAST, Cost
from topovq.tokenizer.training.evaluate import Validation
from topovq.tokenizer.training.feed import open_feed
from topovq.tokenizer.training.interrupt import Dropped, StopRequest
from topovq.tokenizer.training.progress import TIMED, Logger, Reporter, TensorBoard, WeightsAndBiases, check_loggers
from topovq.tokenizer.training.record import environment, read_record
from topovq.tokenizer.training.snapshots import Snapshots, in_rows, originals_and_decoded
from topovq.tokenizer.training.step import Figures, TrainStep, fastest_convolutions, make_optimizer
from topovq.tokenizer.training.trace import Trace
from topovq.tokenizer.training.watch import Diverged, UsageWatch, is_finite

SHOWN = 8  # validation images in TensorBoard


def train(config: TrainConfig, *, source: Source | None = None, quiet: bool = False) -> RunResult:
    """Train to the end of `config`; under torchrun, together with the other processes.

    `source` (tokenizer/data) replaces the data set that the configuration names. A run that is finished already is not
    repeated when `config.resume` is set. Raises Interrupted after SIGTERM or Ctrl-C, with a checkpoint written.
    """
    resolved = config.resolve(pick_device(config.device).type)
    check_loggers(resolved.tensorboard, resolved.wandb)
    with join_world(config.device) as world:
        finished = check_folder(resolved)
        world.wait()  # nobody writes before everybody has looked
        if finished is not None:
            return finished
        if source is not None:
            return Run(resolved, source, world, quiet).train()
        with open_data(resolved.data, resolved.data_path, resolved.image_size, resolved.workers) as opened:
            return Run(resolved, opened, world, quiet).train()


class Run(Training):
    """The state of one training run and the order in which things happen to it.

    `at_once` is how many runs share the device, which the record says since it explains how long they took.
    """

    what = "run"

    def __init__(self, config: TrainConfig, source: Source, world: World, quiet: bool, at_once: int = 1) -> None:
        super().__init__(config, world, quiet)
        assert config.learning_rate is not None
        self.config, self.source, self.at_once = config, source, at_once
        self.snapshots = Snapshots(self.folder, config.snapshots, self.total)
        self.cost = Cost(world.device)
        torch.manual_seed(config.seed)
        model = config.build_model(source.size, source.mean, source.std)
        self.model: Tokenizer = model.to(world.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.model.train()
        self.optimizer = make_optimizer(self.model, config.learning_rate, config.weight_decay, world.device)
        self.skipped = 0.0
        self.health: dict[str, float] = {}
        self.shown_BCHW: torch.Tensor | None = None
        self.cost.made()

    def train(self) -> RunResult:
        with StopRequest() as stop, fastest_convolutions():
            steps = self.steps(stop)
            while True:
                try:
                    next(steps)
                except StopIteration as end:
                    return end.value

    def steps(self, stop: StopRequest) -> Generator[None, None, RunResult]:
        """The run, which pauses after every step it has put on the device, so that others may put theirs there; not
        while the cost of a step is measured."""
        with alone(self.folder, self.world):
            self.cost.begin()
            self.resume()
            feed = open_feed(self.source, self.batch_size, self.config.seed, self.step, self.world)
            bf16 = self.config.precision == "bf16"
            take_step = TrainStep(
                self.model,
                self.optimizer,
                feed,
                self.world,
                clip=self.config.clip,
                bf16=bf16,
                compile=bool(self.config.compile),
                stop=stop,
            )
            self.validate = Validation(self.model, self.source, self.batch_size, self.world, bf16)
            title = self.config.quantizer
            reporter = Reporter(title, self.total, self.step, self.batch_size, self._loggers(), self.quiet)
            self._begin()  # the first line that is written: whatever can be wrong is known by now
            reporter.skipped = self.skipped  # what was warned of before is not news
            reporter.health = self.health
            reporter.timed = TIMED if self.world.device.type == "cpu" else LAST
            reporter.watch = UsageWatch(self.model.quantizers, self.config.quantizer, self.config.quantizer_options)
            with reporter:
                reporter.start(self.config, self.source, self.world.device)
                if self.step:
                    reporter.say(f"continuing {self.folder} at step {self.step:,}")
                try:
                    self._keep_snapshot()
                    yield from self._loop(take_step, reporter, stop)
                finally:
                    take_step.close()
                    self.validate.close()
            return self._finish()

    def _loop(self, take_step: TrainStep, reporter: Reporter, stop: StopRequest) -> Generator[None, None, None]:
        began = time.monotonic() - self.seconds
        figures, trace = Figures(reporter), Trace(self.config.trace_every, take_step)
        take_step.read()  # the codes as they are now: drift counts from here
        if self._owes_validation():
            self._validate(reporter, stop)
        self.cost.start()
        while self.step < self.total:
            try:
                trace.step(self.step + 1)
            except Dropped:
                take_step.undo()
                self._keep_trace(trace)
                self.seconds = time.monotonic() - began
                if not is_finite(self.model):
                    raise Diverged(self.step, checkpoints(self.folder)) from None
                self._stop(stop)
            self.step += 1
            self.cost.step()
            reporter.step(self.step)
            last, validating, saving, logging = self.due()
            if logging:
                figures.send(self.step, take_step.read())
            stopping = self.stopping(stop, logging)
            if validating or saving or stopping:
                self.cost.give_up()
                figures.show()
                self._keep_trace(trace)
            looking = saving or stopping or reporter.warned_nan  # which waits for the device
            if (logging or stopping) and self.world.any(looking and not is_finite(self.model)):
                raise Diverged(self.step, checkpoints(self.folder))
            if validating or saving or stopping:
                self.skipped, self.health = reporter.skipped, reporter.health
                self.seconds = time.monotonic() - began
                if stopping and not last:
                    self._stop(stop)
                if validating:
                    self._validate(reporter, stop)
                if saving:
                    self.save()
                figures.restart()
            self._keep_snapshot()
            if not self.cost.measuring:
                yield

    def _stop(self, stop: StopRequest) -> NoReturn:
        """Leave a checkpoint, from which the same run goes on."""
        self.save()
        self.stopped(stop)

    def _owes_validation(self) -> bool:
        """Whether the run was stopped after a step that is validated, but before it was."""
        if not self.step or (self.step < self.total and self.step % self.validate_every):
            return False
        lines = read_record(self.record.path)
        return not any(line["event"] == "validation" and line["step"] == self.step for line in lines)

    def _begin(self) -> None:
        if self.world.leads:
            self.snapshots.rewind(self.step)
        self.begin_record({
            "id": self.config.run_id,
            **self.config.as_dict(),
            **{f"source_{name}": value for name, value in self.source.describe().items()},
            "parameters": sum(p.numel() for p in self.model.parameters()),
            **environment(self.world.device, self.world.size),
            "at_once": self.at_once,
        })  # fmt: skip

    def state(self) -> dict[str, Any]:
        return {"skipped": self.skipped, "health": self.health}

    def take(self, state: dict[str, Any]) -> None:
        self.skipped, self.health = state["skipped"], state.get("health", {})

    def _validate(self, reporter: Reporter, stop: StopRequest) -> None:
        try:
            # Several processes stop at the same step, or they would wait for one another.
            with stop.droppable() if self.world.size == 1 else contextlib.nullcontext():
                validation = self.validate()
                parts = self.source.parts
                if len(parts) > 1:
                    validation |= {f"loss_{part}": self.validate(part)["loss"] for part in parts}
        except Dropped:
            self._stop(stop)
        self.validation = validation
        self.best = min(self.best, self.validation["loss"])
        if self.world.leads:
            timing = {"seconds": round(self.seconds, 3), "images_per_second": round(reporter.speed, 1)}
            figures = {**self.validation, **reporter.health, "skipped": self.skipped, **timing}
            self.record.append("validation", step=self.step, **figures)
        reporter.validation(self.step, self.validation)
        reporter.pictures(self.step, self._pictures)

    def _pictures(self) -> dict[str, np.ndarray]:
        """Every map, and a few validation images above their reconstructions."""
        maps = charts(self.model)
        drawn = {f"validation/{chart.name}": map_picture(self.model, maps, i) for i, chart in enumerate(maps)}
        rows = in_rows(originals_and_decoded(self.model, self._shown()))
        return {**drawn, "validation/reconstructions": rows.permute(1, 2, 0).numpy()}

    def _shown(self) -> torch.Tensor:
        if self.shown_BCHW is None:
            self.shown_BCHW = next(iter(self.source.validation(SHOWN)))[:SHOWN].clone().to(self.world.device)
        return self.shown_BCHW

    def _keep_trace(self, trace: Trace) -> None:
        course = trace.lines()
        if course and self.world.leads:
            self.record.append("trace", step=self.step, **course)

    def _keep_snapshot(self) -> None:
        if self.step in self.snapshots.due:
            self.cost.give_up()
            if self.world.leads:
                self.snapshots.keep(self.step, self.model, self._shown())

    def _finish(self) -> RunResult:
        if self.world.leads:
            write_files(self.folder, self.model.files())
            figures = {"best_loss": self.best, "seconds": round(self.seconds, 3), **self.cost.figures()}
            self.record.append("final", step=self.step, steps=self.total, **figures)
            write_card(self.folder, self.model, read_record(self.record.path))
        self.world.wait()
        return self.result()

    def _loggers(self) -> list[Logger]:
        loggers: list[Logger] = []
        if self.config.tensorboard and self.world.leads:
            loggers.append(TensorBoard(self.folder))
        if self.config.wandb and self.world.leads:
            loggers.append(WeightsAndBiases(self.config.wandb, self.folder, self.config.run_id, self.config.as_dict()))
        return loggers
