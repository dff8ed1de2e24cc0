"""Weights & Biases: figures and pictures of a model, in a run."""

from __future__ import annotations

from typing import Any

from torch import nn

from topovq.callbacks.readings import figures, pictures
from topovq.missing import needs


def log_to_wandb(run: Any, model: nn.Module, step: int | None = None, *, maps: bool = True) -> None:
    """Log `figures(model)` and, with `maps`, `pictures(model)` to `run`, which `wandb.init()` gave."""
    with needs("log"):
        import wandb
    shown = {name: wandb.Image(pixels) for name, pixels in pictures(model).items()} if maps else {}
    run.log({**figures(model), **shown}, step=step)
