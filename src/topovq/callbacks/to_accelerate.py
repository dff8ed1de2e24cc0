"""Accelerate: figures and pictures of a model, to the trackers of an Accelerator."""

from __future__ import annotations

from typing import Any

from torch import nn

from topovq.callbacks.readings import figures, pictures


def log_to_accelerate(accelerator: Any, model: nn.Module, step: int | None = None, *, maps: bool = True) -> None:
    """Log `figures(model)` to every tracker, and with `maps` `pictures(model)` to TensorBoard and W&B.

    Call it in every process; the main one logs.
    """
    if not accelerator.is_main_process:
        return
    model = accelerator.unwrap_model(model)
    accelerator.log(figures(model), step=step)
    options: dict[str, dict[str, Any]] = {"tensorboard": {"dataformats": "NHWC"}, "wandb": {}}
    trackers = [tracker for tracker in accelerator.trackers if tracker.name in options]
    if maps and trackers:
        shown = {name: pixels[None] for name, pixels in pictures(model).items()}  # a batch of one image
        for tracker in trackers:
            tracker.log_images(shown, step=step, **options[tracker.name])
