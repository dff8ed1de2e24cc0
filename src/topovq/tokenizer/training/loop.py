"""Training from a configuration to a finished run: `train(TrainConfig(...)) -> RunResult`.

The run's folder:
    record.jsonl                   what happened (see record.py)
    checkpoints/step-00001000/     the newest few (see checkpoint.py)
    config.json, model.safetensors the final model, as `from_pretrained` reads it
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock, Timeout

from topovq.distributed import World, join_world, pick_device
from topovq.storage import write_files
from topovq.tokenizer.atlas import charts, map_picture
from topovq.tokenizer.data import Source
from topovq.tokenizer.models import Tokenizer
from topovq.tokenizer.training.checkpoint import (
    checkpoints,
    identity_of,
    load_checkpoint,
    load_newest,
    newest_whole,
    save_checkpoint,
)
from topovq.tokenizer.training.config import IDENTITY, TrainConfig, told_options
from topovq.tokenizer.training.cost import Cost
from topovq.tokenizer.training.datasets import open_data
from topovq.tokenizer.training.evaluate import Validation
from topovq.tokenizer.training.feed import open_feed
from topovq.tokenizer.training.interrupt import Interrupted, StopRequest
from topovq.tokenizer.training.progress import Logger, Reporter, TensorBoard, WeightsAndBiases
from topovq.tokenizer.training.record import RECORD_FILE, Record, environment, read_record
from topovq.tokenizer.training.step import Reading, TrainStep, fastest_convolutions, make_optimizer
from topovq.tokenizer.training.watch import Diverged, UsageWatch, is_finite

SHOWN = 8  # validation images in TensorBoard


@dataclass(frozen=True)
class RunResult:
    """A finished run: its folder, its id, and the figures of its `final` line and last validation."""

    folder: Path
    run_id: str
    steps: int
    best_loss: float
    seconds: float
    validation: dict[str, float]


def train(config: TrainConfig, *, source: Source | None = None, quiet: bool = False) -> RunResult:
    """Train to the end of `config`; under torchrun, together with the other processes.

    `source` (tokenizer/data) replaces the data set that the configuration names. A run that is finished already is not
    repeated when `config.resume` is set. Raises Interrupted after SIGTERM or Ctrl-C, with a checkpoint written.
    """
    resolved = config.resolve(pick_device(config.device).type)
    with join_world(config.device) as world:
        finished = check_folder(resolved)
        world.wait()  # nobody writes before everybody has looked
        if finished is not None:
            return finished
        if source is not None:
            return Run(resolved, source, world, quiet).train()
        with open_data(resolved.data, resolved.data_path, resolved.image_size, resolved.workers) as opened:
            return Run(resolved, opened, world, quiet).train()


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
        ours, theirs = config.as_dict(), {**told, "quantizer_options": told_options(told)}
        names = [n for n in IDENTITY if n != "steps" and (started or n in told)]
        differing = [n for n in names if theirs.get(n) != ours[n]]
        if differing:
            raise ValueError(
                f"the run in {folder} was started with "
                + ", ".join(f"{n}={theirs.get(n)!r}" for n in differing)
                + " but is resumed with "
                + ", ".join(f"{n}={ours[n]!r}" for n in differing)
            )
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


class Run:
    """The state of one training run and the order in which things happen to it.

    `at_once` is how many runs share the device, which the record says since it explains how long they took.
    """

    def __init__(self, config: TrainConfig, source: Source, world: World, quiet: bool, at_once: int = 1) -> None:
        assert config.out is not None
        assert config.batch_size is not None
        assert config.learning_rate is not None
        self.config, self.source, self.world, self.folder = config, source, world, config.out
        self.at_once = at_once
        self.batch_size = config.batch_size
        self.record = Record(self.folder / RECORD_FILE)
        self.cost = Cost(world.device)
        self.quiet = quiet or not world.leads
        torch.manual_seed(config.seed)
        model = config.build_model(source.size, source.mean, source.std)
        self.model: Tokenizer = model.to(world.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.model.train()
        self.optimizer = make_optimizer(self.model, config.learning_rate, config.weight_decay, world.device)
        self.step, self.seconds, self.best = 0, 0.0, float("inf")
        self.validation: dict[str, float] = {}
        self.skipped = 0.0
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
        with self._alone():
            self.cost.begin()
            self._begin()
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
            )
            self.validate = Validation(self.model, self.source, self.batch_size, self.world, bf16)
            title = self.config.quantizer
            reporter = Reporter(title, self.config.steps, self.step, self.batch_size, self._loggers(), self.quiet)
            reporter.skipped = self.skipped  # what was warned of before is not news
            reporter.watch = UsageWatch(self.model.quantizers, self.config.quantizer, self.config.quantizer_options)
            with reporter:
                if self.step:
                    reporter.say(f"continuing {self.folder} at step {self.step:,}")
                try:
                    yield from self._loop(take_step, reporter, stop)
                finally:
                    take_step.close()
                    self.validate.close()
            return self._finish()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the run's folder: two processes never write one record."""
        if not self.world.leads:
            yield
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(f"cannot make the run's folder {self.folder}: {error.strerror}") from error
        lock = FileLock(self.folder / ".lock", timeout=0)
        try:
            lock.acquire()
        except Timeout:
            raise OSError(
                f"another process is training in {self.folder}; wait for it or choose another folder"
            ) from None
        try:
            yield
        finally:
            lock.release()

    def _loop(self, take_step: TrainStep, reporter: Reporter, stop: StopRequest) -> Generator[None, None, None]:
        config = self.config
        began = time.monotonic() - self.seconds
        figures = _Figures(reporter)
        take_step.read()  # the codes as they are now: drift counts from here
        self.cost.start()
        while self.step < config.steps:
            take_step()
            self.step += 1
            self.cost.step()
            last = self.step == config.steps
            validating = last or self.step % config.validate_every == 0
            saving = last or self.step % config.checkpoint_every == 0
            logging = validating or saving or self.step % config.log_every == 0
            if logging:
                figures.send(self.step, take_step.read())
            # Processes must stop at the same step, so several look only where they are logging.
            stopping = self.world.any(bool(stop.signum)) if logging or self.world.size == 1 else False
            if validating or saving or stopping:
                self.cost.give_up()
                figures.show()
            looking = saving or stopping or reporter.warned_nan  # which waits for the device
            if (logging or stopping) and self.world.any(looking and not is_finite(self.model)):
                raise Diverged(self.step, checkpoints(self.folder))
            if validating or saving or stopping:
                self.skipped = reporter.skipped
                self.seconds = time.monotonic() - began
                if validating:
                    self._validate(reporter)
                if saving or stopping:
                    self._save()
                figures.restart()
            if stopping and not last:
                raise Interrupted(
                    stop.signum or signal.SIGTERM,
                    f"stopped at step {self.step:,} of {config.steps:,}; the checkpoint is in {self.folder}: "
                    "the same command with --resume continues",
                )
            if not self.cost.measuring:
                yield

    def _begin(self) -> None:
        """Load the newest checkpoint, or start the record."""
        config = {
            "id": self.config.run_id,
            **self.config.as_dict(),
            **{f"source_{name}": value for name, value in self.source.describe().items()},
            "parameters": sum(p.numel() for p in self.model.parameters()),
            **environment(self.world.device, self.world.size),
            "at_once": self.at_once,
        }
        load_newest(self.folder, self._load, self.world)
        if self.step > self.config.steps:
            raise ValueError(
                f"the run in {self.folder} is at step {self.step} already, beyond steps={self.config.steps}"
            )
        if self.world.leads:
            if self.record.path.exists():
                self.record.rewind(self.step, **config)
                self.record.append("resumed", step=self.step, **environment(self.world.device, self.world.size))
            else:
                self.record.start(**config)
        self.world.wait()

    def _load(self, checkpoint: Path) -> None:
        state = load_checkpoint(checkpoint, self.model, self.optimizer, self.world.device)
        self.step, self.seconds, self.best = state["step"], state["seconds"], state["best"]
        self.validation, self.skipped = state["validation"], state["skipped"]
        if len(state["rng"]) == self.world.size:  # another number of processes has no generator state of its own
            torch.set_rng_state(state["rng"][self.world.rank])
            if self.world.device.type == "cuda" and state["cuda_rng"]:
                torch.cuda.set_rng_state(state["cuda_rng"][self.world.rank], self.world.device)

    def _save(self) -> None:
        cuda = self.world.device.type == "cuda"
        rng = self.world.gather(torch.get_rng_state())
        cuda_rng = self.world.gather(torch.cuda.get_rng_state(self.world.device)) if cuda else []
        state = {
            "optimizer": self.optimizer.state_dict()["state"],
            "rng": rng,
            "cuda_rng": cuda_rng,
            "seconds": self.seconds,
            "best": self.best,
            "validation": self.validation,
            "skipped": self.skipped,
        }
        if self.world.leads:
            told = self.config.as_dict()
            identity = {name: told[name] for name in IDENTITY}
            save_checkpoint(self.folder, self.step, self.model, state, self.config.keep_checkpoints, identity)
        self.world.wait()

    def _validate(self, reporter: Reporter) -> None:
        self.validation = self.validate()
        parts = self.source.parts
        if len(parts) > 1:
            self.validation |= {f"loss_{part}": self.validate(part)["loss"] for part in parts}
        self.best = min(self.best, self.validation["loss"])
        if self.world.leads:
            timing = {"seconds": round(self.seconds, 3), "images_per_second": round(reporter.speed, 1)}
            figures = {**self.validation, **reporter.health, "skipped": self.skipped, **timing}
            self.record.append("validation", step=self.step, **figures)
        reporter.validation(self.step, self.validation)
        reporter.pictures(self.step, self._pictures)

    def _pictures(self) -> dict[str, np.ndarray]:
        """Every map, and a few validation images above their reconstructions."""
        if self.shown_BCHW is None:
            self.shown_BCHW = next(iter(self.source.validation(SHOWN)))[:SHOWN].clone().to(self.world.device)
        maps = charts(self.model)
        drawn = {f"validation/{chart.name}": map_picture(self.model, maps, i) for i, chart in enumerate(maps)}
        decoded = self.model.decode(self.model.encode(self.shown_BCHW))
        rows = torch.cat([torch.cat(list(images), -1) for images in (self.shown_BCHW, decoded)], -2)
        return {**drawn, "validation/reconstructions": rows.permute(1, 2, 0).cpu().numpy()}

    def _finish(self) -> RunResult:
        config = self.config
        if self.world.leads:
            write_files(self.folder, self.model.files())
            figures = {"best_loss": self.best, "seconds": round(self.seconds, 3), **self.cost.figures()}
            self.record.append("final", step=self.step, steps=config.steps, **figures)
        self.world.wait()
        return RunResult(self.folder, config.run_id, config.steps, self.best, self.seconds, self.validation)

    def _loggers(self) -> list[Logger]:
        loggers: list[Logger] = []
        if self.config.tensorboard and self.world.leads:
            loggers.append(TensorBoard(self.folder))
        if self.config.wandb and self.world.leads:
            loggers.append(WeightsAndBiases(self.config.wandb, self.folder, self.config.run_id, self.config.as_dict()))
        return loggers


class _Figures:
    """Figures on their way to the reporter, one interval late: reading them never leaves the device without work."""

    def __init__(self, reporter: Reporter) -> None:
        self.reporter = reporter
        self.pending: tuple[int, Reading] | None = None
        self.restart()

    def send(self, step: int, reading: Reading) -> None:
        self.show()
        self.pending = (step, reading)
        if reading.arrived is None:  # on the CPU there is nothing to wait for
            self.show()

    def show(self) -> None:
        if self.pending is not None:
            step, reading = self.pending
            values = reading.values()
            # Since the restart: where the host was waiting just now says little about when the device did each part.
            self.steps += values["steps"]
            speed = self.steps / max(time.monotonic() - self.began, 1e-9)  # a coarse clock may not have moved
            self.reporter.interval(step, values, speed, reading.levels())
            self.pending = None

    def restart(self) -> None:
        """Leave out of the speed what was not training."""
        self.began, self.steps = time.monotonic(), 0.0
