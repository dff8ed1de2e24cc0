"""Checkpoints: `checkpoints/step-00001000/` holds the model (config.json, model.safetensors) and `state.pt`.

Each is written beside its place and renamed, so one that is there is whole; older ones go only after that.
`state.pt` holds tensors, numbers and strings alone: `torch.load(weights_only=True)` reads it.
"""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from topovq.storage import atomic_folder, remove_leftovers
from topovq.tokenizer.models import WEIGHTS_FILE, Tokenizer

STATE_FILE = "state.pt"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; what was there before is whole."""


def checkpoints(run: Path) -> list[Path]:
    """The run's checkpoint folders, oldest first."""
    return sorted((run / "checkpoints").glob("step-*"), key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def save_checkpoint(run: Path, step: int, model: Tokenizer, state: dict[str, Any], keep: int) -> Path:
    """Write the checkpoint of `step` and keep the newest `keep`."""
    folder = run / "checkpoints" / f"step-{step:08d}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder.parent)
        with atomic_folder(folder) as temporary:
            # All through Python's own files, so that a full disk is an OSError like any other.
            buffer = io.BytesIO()
            torch.save({"step": step, **state}, buffer)
            for name, data in (model.files() | {STATE_FILE: buffer.getvalue()}).items():
                (temporary / name).write_bytes(data)
    except OSError as error:
        whole = checkpoints(run)
        raise CheckpointError(
            f"could not write the checkpoint of step {step} to {folder}: {error.strerror or error}; "
            + (f"the last whole one is {whole[-1]}" if whole else "there is no earlier one")
        ) from error
    for old in checkpoints(run)[:-keep]:
        shutil.rmtree(old)
    return folder


def load_checkpoint(folder: Path, model: Tokenizer, device: torch.device) -> dict[str, Any]:
    """Load the weights into `model` and return the state."""
    weights = safetensors.torch.load_file(folder / WEIGHTS_FILE, device=str(device))
    model.load_state_dict(weights)
    return torch.load(folder / STATE_FILE, map_location="cpu", weights_only=True)
