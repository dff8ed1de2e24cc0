"""Checkpoints: `checkpoints/step-00001000/` has a model (config.json, model.safetensors), `state.pt` and a manifest.

Each is written beside its place and renamed, so one that is there is whole; older ones go only after that.
`state.pt` holds tensors, numbers and strings alone: `torch.load(weights_only=True)` reads it. The manifest has the
SHA-256 of the files, and what identifies the run. Nothing of a checkpoint is used before all of it was looked at: the
fused optimizer trusts the shapes of its state, and would run past the end of a tensor that is too short.
"""

from __future__ import annotations

import io
import math
import re
import shutil
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import safetensors.torch
import torch
from torch import Tensor, nn

from topovq.distributed import World
from topovq.pretrained import check_finite, check_weights
from topovq.storage import (
    CONFIG,
    MANIFEST,
    WEIGHTS,
    DamagedFile,
    atomic_folder,
    logger,
    manifest,
    note_without,
    read_json,
    read_manifest,
    remove_leftovers,
)

STATE_FILE = "state.pt"
FILES = (CONFIG, WEIGHTS, STATE_FILE)
STEP = re.compile(r"step-(\d{8,})")
MOMENTS, COUNTER = ("exp_avg", "exp_avg_sq"), torch.zeros(())  # what AdamW has for a parameter, beside it a count
MODEL_FIELDS = ("model", "codebook_size", "code_dim", "quantizer", "quantizer_options")  # in config.json and of the run


class Saved(Protocol):
    def files(self) -> dict[str, bytes]:
        """The model's configuration and weights, by file name."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; what was there before is whole."""


def checkpoints(run: Path) -> list[Path]:
    """The run's checkpoint folders, oldest first; whatever else lies among them is passed over."""
    found = (run / "checkpoints").glob("step-*")
    return sorted((path for path in found if STEP.fullmatch(path.name) and path.is_dir()), key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def save_checkpoint(
    run: Path, step: int, model: Saved, state: dict[str, Any], keep: int, identity: Mapping[str, Any] | None = None
) -> Path:
    """Write the checkpoint of `step` and keep the newest `keep`; `identity` is what makes the run the one it is."""
    folder = run / "checkpoints" / f"step-{step:08d}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder.parent)
        with atomic_folder(folder) as temporary:
            # All through Python's own files, so that a full disk is an OSError like any other.
            buffer = io.BytesIO()
            torch.save({"step": step, **state}, buffer)
            files = model.files() | {STATE_FILE: buffer.getvalue()}
            for name, data in (files | {MANIFEST: manifest(files, step=step, run=identity or {})}).items():
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


def newest_whole(run: Path) -> Path | None:
    """The newest checkpoint whose files are what its manifest says; damaged ones are named in the log."""
    for folder in reversed(checkpoints(run)):
        try:
            read_manifest(folder, FILES)
        except DamagedFile as error:
            logger.warning("%s is passed over: %s", folder, error)
        else:
            return folder
    return None


def load_newest(run: Path, load: Callable[[Path], None], world: World) -> None:
    """Call `load` on the newest checkpoint, and on the one before where it raises DamagedFile in any process.

    A damaged one is named in the log and kept under another name. It is an error if there are some and none is sound.
    """
    found, first = checkpoints(run), ""
    for checkpoint in reversed(found):
        problem = ""
        try:
            load(checkpoint)
        except DamagedFile as error:
            problem = str(error)
        if not world.any(bool(problem)):
            return
        if world.leads:
            aside = checkpoint.with_name(f"damaged-{checkpoint.name}")
            shutil.rmtree(aside, ignore_errors=True)  # of an earlier time
            checkpoint.rename(aside)
            logger.warning("warning: a damaged checkpoint is set aside as %s: %s", aside, problem or "see other ranks")
        world.wait()
        first = first or problem
    if found:
        raise DamagedFile(
            f"none of the {len(found)} checkpoints of {run} is sound, so the run cannot go on; start it anew in "
            f"another folder. {first}"
        )


def identity_of(checkpoint: Path) -> dict[str, Any]:
    """What the checkpoint tells of the run's configuration: of an older one, what is in its model's."""
    told = read_manifest(checkpoint, ()).get("run")
    config = told if told and isinstance(told, dict) else read_json(checkpoint / CONFIG)
    return dict(config) if config is told else {name: config.get(name) for name in MODEL_FIELDS}


def load_checkpoint(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> dict[str, Any]:
    """Load the weights into `model` and the moments into `optimizer`, and return the state.

    DamagedFile says which file is not what it should be; `model` may then hold other weights, and nothing else.
    """
    for name in FILES:
        if not (folder / name).is_file():
            raise DamagedFile(f"{folder / name} is missing")
    told = read_manifest(folder, FILES)
    if told and told.get("step") != step_of(folder):
        raise DamagedFile(f"{folder / MANIFEST} is of step {told.get('step')!r}, not {step_of(folder)}")
    weights, path = folder / WEIGHTS, folder / STATE_FILE
    state = read_state(path)
    check_state(state, optimizer, step_of(folder), path)
    check_weights(model, weights, exact=True)
    tensors = safetensors.torch.load_file(weights, device=str(device))
    check_finite(tensors, weights)
    try:
        model.load_state_dict(tensors)
    except (RuntimeError, TypeError, ValueError) as error:
        raise DamagedFile(f"{weights} does not fit the run: {' '.join(str(error).split())[:500]}") from error
    # The groups hold how the optimizer is run (fused, on which device), which may differ now.
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state["optimizer"], "param_groups": groups})
    note_without(told, folder)
    return state


def read_state(path: Path) -> dict[str, Any]:
    """What `state.pt` holds: no code is run, and no more memory is taken than the file has bytes."""
    try:
        with zipfile.ZipFile(path) as archive:
            if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
                raise DamagedFile(f"{path} is compressed, which no checkpoint is")
            bad = archive.testzip()
        if bad is not None:
            raise DamagedFile(f"{path} is damaged: the checksum of its part {bad!r} is wrong")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (DamagedFile, MemoryError):
        raise
    except Exception as error:  # torch's own advice, to load it with code in it, is of no use to anybody here
        raise DamagedFile(f"{path} is damaged or no checkpoint's state: {type(error).__name__}") from None
    if not isinstance(state, dict):
        raise DamagedFile(f"{path} holds a {type(state).__name__}, not a checkpoint's state")
    return state


def check_state(state: Mapping[str, Any], optimizer: torch.optim.Optimizer, step: int, path: Path) -> None:
    """Refuse a state that is not one of `optimizer` at `step`."""
    expected = {
        "optimizer": lambda value: isinstance(value, dict),
        "rng": lambda value: isinstance(value, list) and all(map(_is_generator, value)),
        "cuda_rng": lambda value: isinstance(value, list) and all(map(_is_bytes, value)),
        "step": lambda value: type(value) is int and value == step,
        "seconds": lambda value: _is_number(value) and 0 <= value < math.inf,
        "best": _is_number,
        "skipped": lambda value: _is_number(value) and value >= 0,
        "validation": lambda value: isinstance(value, dict) and all(map(_is_number, value.values())),
    }
    for name, fits in expected.items():
        if name not in state or not fits(state[name]):
            found = repr(state[name])[:80] if name in state else "missing"
            raise DamagedFile(f"{path} is not the state of step {step}: its {name!r} is {found}")
    (group,) = optimizer.param_groups
    for number, moments in state["optimizer"].items():
        known = type(number) is int and 0 <= number < len(group["params"])
        if not known or not isinstance(moments, dict) or moments.keys() != {"step", *MOMENTS}:
            raise DamagedFile(f"{path}: the optimizer's state of parameter {number!r} is not one of this model")
        for name, like in (dict.fromkeys(MOMENTS, group["params"][number]) | {"step": COUNTER}).items():
            tensor = moments[name]
            if not isinstance(tensor, Tensor) or (tensor.shape, tensor.dtype) != (like.shape, like.dtype):
                found = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, Tensor) else repr(tensor)[:80]
                raise DamagedFile(
                    f"{path}: {name} of the optimizer's parameter {number} is {found}; "
                    f"expected {like.dtype} {list(like.shape)}"
                )
            if not bool(tensor.isfinite().all()) or (name != "exp_avg" and bool((tensor < 0).any())):
                raise DamagedFile(f"{path}: {name} of the optimizer's parameter {number} has values that cannot be")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_bytes(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.uint8 and value.ndim == 1


def _is_generator(value: Any) -> bool:
    try:
        return _is_bytes(value) and torch.Generator().set_state(value) is not None
    except RuntimeError:
        return False
