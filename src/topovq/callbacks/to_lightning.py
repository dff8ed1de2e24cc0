"""Lightning: a callback that logs figures and pictures of the model's quantizers."""

from __future__ import annotations

import contextlib
from importlib import import_module
from typing import Any

from topovq.callbacks.readings import EVERY, MAPS_EVERY, check_every, figures, is_due, pictures


def _callback() -> Any:
    """Lightning's class, under the name that it is installed by."""
    for package in ("pytorch_lightning", "lightning.pytorch"):
        with contextlib.suppress(ImportError):
            return import_module(package).Callback
    raise ImportError("LightningHealth is a callback of Lightning, which is not installed: pip install lightning")


Callback: Any = _callback()


class LightningHealth(Callback):
    """`Trainer(callbacks=[LightningHealth()])`: `health()` and the maps of every quantizer, to the Trainer's loggers.

    every       optimizer steps from one reading of the figures to the next
    maps_every  the same for the pictures, which loggers of TensorBoard and W&B get; 0: none
    """

    def __init__(self, every: int = EVERY, maps_every: int = MAPS_EVERY) -> None:
        check_every(every, maps_every)
        self.every, self.maps_every = every, maps_every
        self._last = 0  # several batches may make one step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *batch: Any, **more: Any) -> None:
        step = trainer.global_step
        if step == self._last or not trainer.is_global_zero:
            return
        self._last = step
        if is_due(step, self.every):
            found = figures(pl_module)
            for logger in trainer.loggers:
                logger.log_metrics(found, step=step)
        if is_due(step, self.maps_every):
            shows = [logger for logger in trainer.loggers if _shows(logger)]
            for name, pixels in (pictures(pl_module) if shows else {}).items():
                for logger in shows:
                    if hasattr(logger, "log_image"):  # W&B
                        logger.log_image(name, [pixels], step=step)
                    else:
                        logger.experiment.add_image(name, pixels, step, dataformats="HWC")


def _shows(logger: Any) -> bool:
    return hasattr(logger, "log_image") or hasattr(logger.experiment, "add_image")
