"""What there is to log of a model, its health and its maps as pictures, and to log it with Accelerate and W&B."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from torch import nn

from topovq.missing import needs
from topovq.quantizers import Quantizer
from topovq.quantizers.portrait import map_pixels

EVERY, MAPS_EVERY = 100, 1000  # steps from one reading to the next, of the figures and of the pictures


def figures(model: nn.Module) -> dict[str, float]:
    """`health()` of every quantizer in `model`, such as {"vq/usage": 0.93, ...}; what is not finite is left out.

    `drift` is how far the codes moved since the last reading. This waits for the device.
    """
    found = {}
    for name, quantizer in quantizers_of(model).items():
        for field, value in quantizer.health()._asdict().items():
            if isinstance(value, int | float) and math.isfinite(value):  # not the advice
                found[f"{name}/{field}"] = float(value)
    return found


def pictures(model: nn.Module) -> dict[str, np.ndarray]:
    """Every map in `model` as uint8 [H, W, 3]: {"vq/codes": ..., "vq/u_matrix": ..., "vq/hits": ...}.

    Codes are colored by their principal components. Where there are several codebooks the names end in _0, _1, ...
    """
    found = {}
    for name, quantizer in quantizers_of(model).items():
        books = quantizer.books() if quantizer.maps else []
        for number, book in enumerate(books):
            ending = f"_{number}" if len(books) > 1 else ""
            for kind, pixels_HW4 in map_pixels(book).items():
                around_HW = pixels_HW4[..., 3:] == 0
                found[f"{name}/{kind}{ending}"] = np.where(around_HW, 255, pixels_HW4[..., :3]).astype(np.uint8)
    return found


def quantizers_of(model: nn.Module) -> dict[str, Quantizer]:
    """The quantizers in `model` by their names there. Those that a ResidualVQ is made of are part of it."""
    found: dict[str, Quantizer] = {}
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if isinstance(module, Quantizer) and module not in inside:
            inside |= set(module.modules())
            plain = name.replace("_orig_mod.", "").removeprefix("module.")  # torch.compile's and DDP's wrappers
            found["quantizer" if plain in ("", "module", "_orig_mod") else plain] = module
    if not found:
        raise ValueError(f"{type(model).__name__} holds no quantizer of topovq, so there is no health to log")
    return found


def check_every(every: int, maps_every: int) -> None:
    for name, value, least in (("every", every, 1), ("maps_every", maps_every, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name}={value!r} must be an int of at least {least}: a number of steps")


def is_due(step: int, every: int) -> bool:
    """Whether `step` ends one of the intervals; with 0 there are none."""
    return every > 0 and step > 0 and step % every == 0


def log_to_wandb(run: Any, model: nn.Module, step: int | None = None, *, maps: bool = True) -> None:
    """Log `figures(model)` and, with `maps`, `pictures(model)` to `run`, which `wandb.init()` gave."""
    with needs("log"):
        import wandb
    shown = {name: wandb.Image(pixels) for name, pixels in pictures(model).items()} if maps else {}
    run.log({**figures(model), **shown}, step=step)


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
