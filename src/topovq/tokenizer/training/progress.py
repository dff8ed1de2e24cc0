"""What a person sees of a run: a progress bar, lines, and optionally TensorBoard or Weights & Biases."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from topovq.metrics import Health
from topovq.missing import MissingExtra
from topovq.tokenizer.training.watch import UsageWatch

NARROW, WIDE = 100, 140  # columns of a terminal from which on the bar says more


class Logger(Protocol):
    def log(self, step: int, figures: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise MissingExtra("tensorboard", "log") from None
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
        try:
            import wandb
        except ImportError:
            raise MissingExtra("wandb", "log") from None
        self.run = wandb.init(project=project, dir=str(folder), id=run_id, resume="allow", config=config)

    def log(self, step: int, figures: dict[str, float]) -> None:
        self.run.log(figures, step=step)

    def close(self) -> None:
        self.run.finish()


class Reporter:
    """Shows a run: a live bar on a terminal, a line per validation elsewhere, nothing when `quiet`."""

    def __init__(self, title: str, steps: int, done: int, batch_size: int, loggers: list[Logger], quiet: bool) -> None:
        self.batch_size, self.loggers, self.quiet = batch_size, loggers, quiet
        self.console = Console(quiet=quiet, highlight=False)
        self.live = self.console.is_terminal and not quiet
        width = self.console.width
        self.bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=4 if width < NARROW else 10 if width < WIDE else None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(elapsed_when_finished=True, compact=True),
            console=self.console,
            disable=not self.live,
            refresh_per_second=4,
        )
        self.task = self.bar.add_task(title, total=steps, completed=done, figures="")
        self.skipped = 0.0
        self.warned_nan = False
        self.speed = 0.0
        self.health: dict[str, float] = {}
        self.watch: UsageWatch | None = None

    def __enter__(self) -> Reporter:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.bar.stop()
        for logger in self.loggers:
            logger.close()

    def say(self, text: str) -> None:
        self.bar.console.print(text, soft_wrap=True)

    def interval(self, step: int, figures: dict[str, float], speed: float, levels: Sequence[Health] = ()) -> None:
        """Figures of the steps since the last call; `speed` is in steps a second, `levels` are the quantizers' healths.

        `self.health` is then what the record's validation line says of the codebook in training.
        """
        self.speed = speed * self.batch_size
        self.health = {
            "train_usage": figures["usage"],
            "train_perplexity": figures["perplexity"],
            "dead_codes": figures["dead_codes"],
            "drift": figures["drift"],
            "drift_steps": int(figures["steps"]),
        }
        self.bar.update(
            self.task,
            completed=step,
            figures=self._figures(figures),
        )
        if not math.isfinite(figures["loss"]) and not self.warned_nan:
            self.warned_nan = True
            self.say(
                f"[bold red]warning:[/] the loss is {figures['loss']} at step {step}; a lower learning rate may help"
            )
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

    def _figures(self, figures: dict[str, float]) -> str:
        loss, perplexity, usage = (figures[name] for name in ("loss", "perplexity", "usage"))
        dead, drift = figures["dead_codes"], figures["drift"]
        if self.console.width < WIDE:
            short = f"loss {loss:.4f} use {usage:.0%} perp {_short(perplexity)} dead {_short(dead)} drift {drift:.1%}"
            return short if self.console.width < NARROW else f"{short} {_short(self.speed)} img/s"
        return (
            f"loss {loss:.4f} · usage {usage:.0%} · perplexity {perplexity:,.0f} · dead codes {dead:,.0f} · "
            f"drift {drift:.1%} · {self.speed:,.0f} images/s"
        )

    def validation(self, step: int, figures: dict[str, float]) -> None:
        self.say(
            f"step {step:>7,}  validation loss {figures['loss']:.5f}  psnr {figures['psnr']:.2f} dB  "
            f"perplexity {figures['perplexity']:.1f}  usage {figures['usage']:.1%}"
            + (f"  {self.speed:,.0f} images/s" if self.speed else "")
        )
        self._log(step, {f"validation/{name}": value for name, value in figures.items()})

    def pictures(self, step: int, draw: Callable[[], dict[str, np.ndarray]]) -> None:
        """Log what `draw` gives, where a logger shows pictures; else it is not called."""
        shows = [logger for logger in self.loggers if isinstance(logger, TensorBoard)]
        if shows:
            drawn = draw()
            for logger in shows:
                logger.show(step, drawn)

    def _log(self, step: int, figures: dict[str, float]) -> None:
        for logger in self.loggers:
            logger.log(step, figures)


def _short(number: float) -> str:
    """A number in four characters or so: 512, 9999, 12k."""
    return f"{number / 1000:.0f}k" if number >= 9_999.5 else f"{number:.0f}"
