"""Modules as safetensors, a config.json and a manifest; never pickle.

What a file asks for is looked at before anything is spent on it: the module is built without memory first (on torch's
meta device), and compared with the names and shapes in the header of the weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from topovq.grid import Grid
from topovq.missing import MissingExtra, needs
from topovq.neighborhood import Schedule
from topovq.storage import (
    CONFIG,
    MANIFEST,
    WEIGHTS,
    DamagedFile,
    atomic_file,
    manifest,
    note_without,
    read_json,
    read_manifest,
    write_atomic,
    write_files,
)

T = TypeVar("T")

CARD = "README.md"
COUNTS, MANY = ("heads", "groups", "num_quantizers", "residual_layers"), 1024  # arguments that number modules
DTYPES = {torch.float32: "F32", torch.int32: "I32", torch.int64: "I64", torch.bool: "BOOL"}
FLOATS = ("F64", "F32", "F16", "BF16")
ROOM, SMALL = 8, 1 << 26  # a module may need more than its file: half precision is widened, statistics may be left out
CARD_TEXT = """---
library_name: topovq
tags:
- self-organizing-map
- vector-quantization
---
{name} of topovq. `topovq.{name}.from_pretrained(...)` loads it.
"""


class HubModule:
    """A module with `save_pretrained(folder)` and `from_pretrained(folder)`: its arguments and its weights.

    Methods and files are those of huggingface_hub's PyTorchModelHubMixin. Names on the Hub need that package.
    """

    _hub_mixin_config: dict[str, Any]  # the constructor's arguments, as far as JSON knows them

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        module = super().__new__(cls)
        parameters = inspect.signature(cls.__init__).parameters
        defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
        given = dict(zip(list(parameters)[1:], args)) | kwargs
        plain = {name: _plain(value) for name, value in (defaults | given).items()}
        module._hub_mixin_config = {name: value for name, value in plain.items() if _is_json(value)}
        return module

    def save_pretrained(
        self, save_directory: str | Path, *, push_to_hub: bool = False, repo_id: str | None = None, **hub: Any
    ) -> str | None:
        """Write the folder. `push_to_hub=True` uploads it too, as `repo_id` or the folder's name: see push_to_hub."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        self._save_pretrained(folder)
        if not (folder / CARD).exists():
            (folder / CARD).write_text(CARD_TEXT.format(name=type(self).__name__))
        return self.push_to_hub(repo_id or folder.name, **hub) if push_to_hub else None

    def push_to_hub(
        self, repo_id: str, *, private: bool | None = None, token: str | bool | None = None, **upload: Any
    ) -> str:
        """Upload to the Hub, into a repository that is made if need be; returns the commit's address.

        Other arguments go to huggingface_hub's `upload_folder`: commit_message, revision, create_pr.
        """
        with needs("train"):
            from huggingface_hub import HfApi
        api = HfApi(token=token)
        repo_id = api.create_repo(repo_id=repo_id, private=private, exist_ok=True).repo_id
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            return str(api.upload_folder(repo_id=repo_id, folder_path=folder, **upload))

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, **arguments: Any) -> Self:
        """The module of a folder, or of a repository on the Hub, in eval mode.

        `arguments` replace those of its config.json. map_location and strict are for the weights; revision, cache_dir,
        force_download, local_files_only and token are for the Hub.
        """
        model_id = str(pretrained_model_name_or_path)
        hub = _hub_options(arguments)
        path = _find(model_id, CONFIG, hub)
        _find(model_id, WEIGHTS, hub)
        _fetch_manifest(model_id, hub)
        note_without(read_manifest(path.parent, (CONFIG, WEIGHTS)), path.parent)
        config = cls._check_config(read_json(path), path)
        return cls._from_pretrained(model_id=model_id, **hub, **(config | arguments))

    @classmethod
    def _check_config(cls, config: dict[str, Any], path: Path) -> dict[str, Any]:
        """The arguments that config.json at `path` names: none that the class does not have."""
        parameters = inspect.signature(cls.__init__).parameters
        check_counts(config, path)
        if "model" in config and "model" not in parameters:
            raise ValueError(
                f"{path.parent} is the model of a run ({config['model']}), not a saved {cls.__name__}: "
                f"topovq.load({str(path.parent)!r}) gives the model, and its .quantizers are what it quantizes with"
            )
        unknown = config.keys() - parameters
        if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            raise ValueError(f"{path} has {sorted(unknown)[0]!r}, which is no argument of {cls.__name__}")
        return config

    def _save_pretrained(self, save_directory: Path) -> None:
        """The weights and the arguments, each file whole or not at all."""
        assert isinstance(self, nn.Module)
        config = json.dumps(self._hub_mixin_config, sort_keys=True, indent=2)
        (save_directory / MANIFEST).unlink(missing_ok=True)
        with atomic_file(save_directory / WEIGHTS) as temporary:
            safetensors.torch.save_model(self, str(temporary))
        write_atomic(save_directory / CONFIG, config.encode())
        write_atomic(save_directory / MANIFEST, manifest({n: save_directory / n for n in (CONFIG, WEIGHTS)}))

    @classmethod
    def _from_pretrained(
        cls, *, model_id: str, map_location: str = "cpu", strict: bool = True, outline: bool = False, **arguments: Any
    ) -> Self:
        weights = _find(model_id, WEIGHTS, _hub_options(arguments))
        bare = skeleton(lambda: cls(**arguments), weights)
        check_weights(bare, weights)
        model = bare if outline and bare is not None else cls(**arguments)
        assert isinstance(model, nn.Module)
        if model is bare:
            return model.eval()
        try:
            safetensors.torch.load_model(model, weights, strict=strict, device=map_location)
        except (RuntimeError, TypeError, ValueError) as error:  # what a state that does not fit raises, here and there
            raise ValueError(f"{weights} does not fit its {CONFIG}: {_one_line(error)}") from error
        check_finite(model.state_dict(), weights)
        model.eval()
        return model


class HubModel(HubModule):
    """A module whose configuration says more than its arguments: a model, of a run or of a prior."""

    @property
    def config(self) -> dict[str, Any]:
        """What config.json says, JSON-able."""
        raise NotImplementedError

    def files(self) -> dict[str, bytes]:
        """What `save_pretrained` writes, by file name: the weights as safetensors, the configuration as JSON."""
        assert isinstance(self, nn.Module)
        # contiguous: safetensors refuses the strides of channels-last weights
        weights = {name: tensor.contiguous() for name, tensor in self.state_dict().items()}
        config = json.dumps(self.config, indent=2, sort_keys=True) + "\n"
        return {WEIGHTS: safetensors.torch.save(weights, metadata={"format": "pt"}), CONFIG: config.encode()}

    def _save_pretrained(self, save_directory: Path) -> None:
        write_files(save_directory, self.files())


# What weights ask for, and whether they are sound


def tensors_of(path: Path) -> dict[str, tuple[list[int], str]]:
    """Shapes and types of the tensors of a safetensors file, from its header."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (it is not a dict)
            return {name: (each.get_shape(), each.get_dtype()) for name, each in slices.items()}
    except safetensors.SafetensorError as error:
        raise DamagedFile(f"{path} is damaged or no safetensors file: {error}") from None


def check_counts(config: Mapping[str, Any], path: Path) -> None:
    """Refuse a configuration that asks for more modules than anybody has, which would take for ever to build."""
    for name, value in config.items():
        number = len(value) if isinstance(value, list) else value if name in COUNTS else 0
        if isinstance(value, dict):
            check_counts(value, path)
        elif isinstance(number, int) and number > MANY:
            raise ValueError(f"{path}: {name} asks for {number:,} modules or entries; more than {MANY:,} are not built")


def skeleton(build: Callable[[], T], weights: Path) -> T | None:
    """The module without memory for its tensors; None where it cannot be built so, as some of other libraries.

    The error for arguments that make none names the configuration beside `weights`.
    """
    try:
        with torch.device("meta"), warnings.catch_warnings(action="ignore"):  # an error says it better
            return build()
    except (ImportError, MemoryError):
        raise
    except Exception as error:  # arguments of any type and size raise whatever Python and torch have
        if "meta tensor" in str(error):
            return None
        raise ValueError(f"{weights.parent / CONFIG} does not describe a module: {_one_line(error)}") from error


def check_weights(model: object, weights: Path, *, exact: bool = False) -> None:
    """Refuse weights that do not fit `model` by shape or kind of number, `exact` by type, before memory is spent.

    Which names must be there is for the module to say: it knows what states of older versions lack.
    """
    found = tensors_of(weights)
    if not isinstance(model, nn.Module):
        return
    for name, tensor in model.state_dict().items():
        if name in found and not name.endswith("grid_shape"):  # a codebook says itself what is wrong with its map
            shape, dtype = found[name]
            if shape != list(tensor.shape):
                raise DamagedFile(f"{weights}: {name} has shape {shape}, but the model's is {list(tensor.shape)}")
            fits = dtype == DTYPES.get(tensor.dtype) if exact else (dtype in FLOATS) == tensor.is_floating_point()
            if not fits:
                raise DamagedFile(f"{weights}: {name} is of type {dtype}, but the model's is {tensor.dtype}")
    own = {id(t): t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers())}
    needed, room = sum(own.values()), ROOM * weights.stat().st_size + SMALL
    if needed > room:
        raise DamagedFile(
            f"{weights.parent / CONFIG} describes a model of {needed:,} bytes, but {weights.name} has "
            f"{weights.stat().st_size:,}: they do not belong together"
        )


def check_finite(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Refuse weights with NaN or infinity."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            bad = int((~tensor.isfinite()).sum())
            raise DamagedFile(f"{path}: {bad:,} of {tensor.numel():,} values of {name} are NaN or infinite")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:500] or type(error).__name__


def _hub_options(arguments: dict[str, Any]) -> dict[str, Any]:
    """Those of `arguments` that say how to fetch from the Hub, taken out of them."""
    names = ("revision", "cache_dir", "force_download", "local_files_only", "token")
    return {name: arguments.pop(name) for name in names if name in arguments}


def _find(model_id: str, name: str, hub: dict[str, Any]) -> Path:
    """A file of a folder, or of a repository on the Hub."""
    if not os.path.isdir(model_id):
        try:
            from huggingface_hub import hf_hub_download
        except ImportError:
            wanted = f"{model_id!r} is no folder, and huggingface_hub, which finds names on the Hub,"
            raise MissingExtra(wanted, "train") from None
        return Path(hf_hub_download(repo_id=model_id, filename=name, **hub))
    path = Path(model_id) / name
    if not path.is_file():
        hint = "was it saved by save_pretrained?"
        if (Path(model_id) / "record.jsonl").is_file():
            hint = f"it is a run, whose model topovq.load({model_id!r}) gives"
        raise FileNotFoundError(f"there is no {name} in {model_id!r}: {hint}")
    return path


def _fetch_manifest(model_id: str, hub: dict[str, Any]) -> None:
    """Have the manifest beside the other files of a repository on the Hub, if it has one."""
    if not os.path.isdir(model_id):
        from huggingface_hub.utils import EntryNotFoundError

        with contextlib.suppress(EntryNotFoundError):
            _find(model_id, MANIFEST, hub)


def _plain(value: Any) -> Any:
    """A value as JSON may hold it; constructors take the dictionaries back as they are."""
    if isinstance(value, Grid | Schedule):
        return value.to_dict()
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return True
