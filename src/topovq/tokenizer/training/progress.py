"""What a person sees of a run: a progress bar, lines, and optionally TensorBoard or Weights & Biases."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, track

from topovq.metrics import Health
from topovq.missing import needs
from topovq.tokenizer.data import Source
from topovq.tokenizer.training.config import TrainConfig
from topovq.tokenizer.training.watch import UsageWatch

T = TypeVar("T")
SMALL = "On a CPU: a small model; --preset full trains the full one."
TIMED = 3  # steps after which a training says how long it will take
NARROW, WIDE = 100, 160  # columns of a terminal from which on the bar says more
ROOMY = 120  # from which on the line of a validation does
BESIDE = 94  # columns that the bar's words and figures take in between
SHOWN_EVERY = 0.05  # seconds: drawing the bar is not to slow quick steps down


def check_loggers(tensorboard: bool, wandb: str | None) -> None:
    """Refuse a logger whose package is not installed."""
    if tensorboard:
        with needs("log"):
            import torch.utils.tensorboard  # noqa: F401
    if wandb:
        with needs("log"):
            import wandb as _  # noqa: F401


class Logger(Protocol):
    def log(self, step: int, figures: dict[str, float]) -> None: ...

    def show(self, step: int, pictures: dict[str, np.ndarray]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder))

    def log(self, step: int, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            self.writer.add_scalar(name, value, step)

    def show(self, step: int, pictures: dict[str, np.ndarray]) -> None:
        """Pictures uint8 [H, W, 3 or 4] by name."""
        for name, pixels_HWC in pictures.items():
            self.writer.add_image(name, pixels_HWC, step, dataformats="HWC")

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    def __init__(self, project: str, folder: Path, run_id: str, config: dict[str, Any]) -> None:
        import wandb

        self.run = wandb.init(project=project, dir=str(folder), id=run_id, resume="allow", config=config)

    def log(self, step: int, figures: dict[str, float]) -> None:
        self.run.log(figures, step=step)

    def show(self, step: int, pictures: dict[str, np.ndarray]) -> None:
        """Pictures uint8 [H, W, 3 or 4] by name."""
        import wandb

        self.run.log({name: wandb.Image(pixels_HWC) for name, pixels_HWC in pictures.items()}, step=step)

    def close(self) -> None:
        self.run.finish()


class Reporter:
    """Shows a run: a live bar on a terminal, a line per validation elsewhere, nothing when `quiet`."""

    def __init__(self, title: str, steps: int, done: int, batch_size: int, loggers: list[Logger], quiet: bool) -> None:
        self.batch_size, self.loggers, self.quiet = batch_size, loggers, quiet
        self.console = Console(quiet=quiet, highlight=False)
        self.live = self.console.is_terminal and not quiet
        self.width = width = self.console.width
        self.bar = Progress(
            *([TextColumn("[bold]{task.description}")] if width >= NARROW else []),
            BarColumn(bar_width=4 if width < NARROW else min(20, width - BESIDE) if width < WIDE else None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TextColumn("{task.fields[left]}"),
            console=self.console,
            disable=not self.live,
            refresh_per_second=4,
        )
        self.task = self.bar.add_task(title, total=steps, completed=done, figures="", left="")
        self.steps, self.first, self.began, self.drawn = steps, done + 1, 0.0, 0.0
        self.timed = TIMED
        self.skipped = 0.0
        self.warned_nan = False
        self.speed = 0.0
        self.loss_sum = self.loss_steps = 0.0  # since the last validation
        self.health: dict[str, float] = {}
        self.watch: UsageWatch | None = None

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.bar.stop()
        for logger in self.loggers:
            logger.close()

    def say(self, text: str) -> None:
        self.bar.console.print(text, soft_wrap=not self.live)  # on a terminal lines end between words

    def start(self, config: TrainConfig, source: Source, device: torch.device) -> None:
        """What is trained on what, before the first step."""
        if config.preset == "auto" and config.is_small(device.type) and self.first == 1:
            self.say(SMALL)
        number = "endless crops as" if source.train_images is None else f"{source.train_images:,}"
        size, place = f"{source.size}x{source.size}", place_of(device)
        self.say(f"{number} training and {source.validation_images:,} validation images of {size} pixels")
        self.say(f"{config.model}, {config.quantizer}: {config.codebook_size:,} codes, {self.steps:,} steps on {place}")

    def step(self, step: int) -> None:
        """`step` steps are done: the bar moves, and from the second one on it says how long the rest takes. After
        `timed` of them a line says how long all take."""
        now = time.monotonic()
        if step == self.first + self.timed - 1:
            seconds = (now - self.began) / (self.timed - 1)
            self.say(f"about {duration(seconds * self.steps)} for {self.steps:,} steps ({seconds:.2g} s a step)")
        if step <= self.first:
            self.began = now
        elif self.first + 2 < step < self.steps and now - self.drawn < SHOWN_EVERY:
            return
        self.drawn = now
        left = ""
        if step >= self.steps:
            left = "done"
        elif step > self.first:
            left = duration((now - self.began) / (step - self.first) * (self.steps - step))
        self.bar.update(self.task, completed=step, left=left, refresh=True)

    def interval(self, step: int, figures: dict[str, float], speed: float, levels: Sequence[Health] = ()) -> None:
        """Figures of the steps since the last call; `speed` is in steps a second, `levels` are the quantizers' healths.

        `self.health` is then what the record's validation line says of the codebook in training.
        """
        self.speed = speed * self.batch_size
        self.loss_sum += figures["reconstruction_loss"] * figures["steps"]
        self.loss_steps += figures["steps"]
        self.health = {
            "train_loss": self.loss_sum / self.loss_steps,
            "train_usage": figures["usage"],
            "train_tokens": int(figures["tokens"]),
            "train_perplexity": figures["perplexity"],
            "dead_codes": figures["dead_codes"],
            "drift": figures["drift"],
            "drift_steps": int(figures["steps"]),
        }
        self.bar.update(self.task, completed=step, figures=self._figures(figures))
        self.warn_of_nan(step, figures["loss"])
        if figures["skipped"] > self.skipped:
            new = figures["skipped"] - self.skipped
            self.say(
                f"[bold red]warning:[/] step {step}: {new:,.0f} vectors left out of the codebook: NaN, infinity, or "
                "far from all others"
            )
            self.skipped = figures["skipped"]
        warning = self.watch.look(step, levels) if self.watch is not None else None
        if warning is not None:
            self.say(f"[bold red]warning:[/] {warning}")
        shown = {f"train/{name}": value for name, value in figures.items() if name != "steps"}
        self._log(step, {**shown, "train/images_per_second": self.speed})

    def warn_of_nan(self, step: int, loss: float) -> None:
        """Say once that a loss is no number."""
        if not math.isfinite(loss) and not self.warned_nan:
            self.warned_nan = True
            self.say(f"[bold red]warning:[/] the loss is {loss} at step {step}; a lower learning rate may help")

    def _figures(self, figures: dict[str, float]) -> str:
        loss, perplexity, usage = (figures[name] for name in ("loss", "perplexity", "usage"))
        tokens, dead, drift = figures["tokens"], figures["dead_codes"], figures["drift"]
        if self.width < WIDE:
            short = f"loss {loss:.4f} use {usage:.0%}/{_short(tokens)} perp {_short(perplexity)} dead {_short(dead)}"
            short += f" drift {drift:.1%}"
            return short if self.width < NARROW else f"{short} {_short(self.speed)} img/s"
        return (
            f"loss {loss:.4f} · usage {usage:.0%} of {_short(tokens)} tokens · perplexity {perplexity:,.0f} · "
            f"dead codes {dead:,.0f} · drift {drift:.1%} · {self.speed:,.0f} images/s"
        )

    def validation(self, step: int, figures: dict[str, float]) -> None:
        loss, psnr, usage = f"{figures['loss']:.5f}", f"{figures['psnr']:.2f} dB", f"{figures['usage']:.1%}"
        if self.live and self.width < ROOMY:
            perplexity, tokens = f"{figures['perplexity']:,.0f}", _short(figures["tokens"])
            self.say(f"validation at {step:,}: loss {loss}  {psnr}  perp {perplexity}  usage {usage}/{tokens}")
        else:
            self.say(
                f"step {step:>7,}  validation loss {loss}  psnr {psnr}  perplexity {figures['perplexity']:.1f}  "
                f"usage {usage} of {figures['tokens']:,} tokens"
                + (f"  {self.speed:,.0f} images/s" if self.speed else "")
            )
        self.loss_sum = self.loss_steps = 0.0
        self._log(step, {f"validation/{name}": value for name, value in figures.items()})

    def pictures(self, step: int, draw: Callable[[], dict[str, np.ndarray]]) -> None:
        """Log what `draw` gives; without a logger it is not called."""
        if self.loggers:
            drawn = draw()
            for logger in self.loggers:
                logger.show(step, drawn)

    def _log(self, step: int, figures: dict[str, float]) -> None:
        for logger in self.loggers:
            logger.log(step, figures)


def shown(batches: Iterable[T], what: str, total: int | None, show: bool = True) -> Iterable[T]:
    """The batches, with a bar on the terminal's error stream where one is wanted."""
    console = Console(stderr=True)
    if not (show and console.is_terminal):
        return batches
    return track(batches, what, total, console=console, transient=True)


def place_of(device: torch.device) -> str:
    """What trains, in words: the GPU's name, or the CPU and its threads."""
    threads = torch.get_num_threads()
    cores = f"the CPU, {threads} thread" + "s" * (threads != 1)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cores


def _short(number: float) -> str:
    """A number in four characters or so: 512, 9999, 12k, 3M."""
    if number >= 999_999.5:
        return f"{number / 1e6:.0f}M"
    return f"{number / 1000:.0f}k" if number >= 9_999.5 else f"{number:.0f}"


def duration(seconds: float) -> str:
    """Seconds in words: 45 s, 12 min, 5.1 h, 9 days."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if seconds < 99.5 * 60:
        return f"{seconds / 60:.0f} min"
    hours = seconds / 3600
    return f"{hours:.1f} h" if hours < 48 else f"{hours / 24:,.0f} days"
