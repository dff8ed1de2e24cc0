"""The health and the map of a model's quantizers, in the logs of other libraries' training loops.

    LightningHealth    a callback of Lightning's Trainer
    TrainerHealth      a callback of transformers' Trainer
    log_to_accelerate  to the trackers of an Accelerator
    log_to_wandb       to a run of Weights & Biases, pictures included
    figures, pictures  the same for a logger of your own

Each library is imported when its name is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from topovq.callbacks.readings import figures, log_to_accelerate, log_to_wandb, pictures

if TYPE_CHECKING:
    from topovq.callbacks.to_lightning import LightningHealth
    from topovq.callbacks.to_trainer import TrainerHealth

__all__ = ["LightningHealth", "TrainerHealth", "figures", "log_to_accelerate", "log_to_wandb", "pictures"]
HOMES = {"LightningHealth": "to_lightning", "TrainerHealth": "to_trainer"}


def __getattr__(name: str) -> Any:
    if name in HOMES:
        return getattr(import_module(f"topovq.callbacks.{HOMES[name]}"), name)
    raise AttributeError(f"module 'topovq.callbacks' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
