"""Files and folders that are either whole or not there, and modules as safetensors and a config.json; never pickle."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import inspect
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import safetensors.torch
from torch import nn

from topovq.grid import Grid
from topovq.missing import MissingExtra, needs
from topovq.neighborhood import Schedule

logger = logging.getLogger("topovq")

CONFIG, WEIGHTS, CARD, MANIFEST = "config.json", "model.safetensors", "README.md", "manifest.json"
JSON_BYTES = 1 << 20  # a configuration has a few thousand
CARD_TEXT = """---
library_name: topovq
tags:
- self-organizing-map
- vector-quantization
---
{name} of topovq. `topovq.{name}.from_pretrained(...)` loads it.
"""


# Files


def write_atomic(path: Path, data: bytes) -> None:
    """Write `data` beside `path`, flush it to the disk, then rename it over `path`."""
    with atomic_file(path) as temporary:
        temporary.write_bytes(data)


def append(path: Path, data: bytes) -> None:
    """Add `data` to the end of `path` and flush it to the disk; after a failure the file may end in a part of it."""
    with naming(path), open(path, "ab") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Have the error of a full disk say what could not be written: the system's own names no file."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) and error.filename is None:
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        raise


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a name beside `path` to write to; if nothing fails that file becomes `path`, else it is removed.

    The folder is made if it is not there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _beside(path)
    try:
        with naming(path):
            yield temporary
            _sync(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync(path.parent)


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder beside `path` to fill; if nothing fails it becomes `path`, else it is removed."""
    temporary = _beside(path)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for file in temporary.iterdir():
            _sync(file)
        if path.exists():
            shutil.rmtree(path)
        os.replace(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _sync(path.parent)


def remove_leftovers(folder: Path) -> None:
    """Remove what an interrupted write left in `folder`: nothing that has its final name."""
    for path in folder.glob(".*.tmp"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def _sync(path: Path) -> None:
    """Have the disk hold a file's bytes or a folder's names, so that they last through a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# Manifests: `manifest.json` beside files says what they were when they were written


class DamagedFile(ValueError):
    """A file that is not what was written: the message names it and says what is wrong with it."""


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hex digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def model_id(folder: Path) -> str:
    """What tells the model in `folder` from every other one: the SHA-256 of its weights."""
    return sha256(folder / WEIGHTS)


def manifest(files: Mapping[str, bytes | Path], **facts: Any) -> bytes:
    """The text of manifest.json for `files`, by name, in memory or on disk; `facts` are what else it says."""
    digests = {
        name: sha256(data) if isinstance(data, Path) else hashlib.sha256(data).hexdigest()
        for name, data in sorted(files.items())
    }
    return json.dumps({**facts, "sha256": digests}, indent=2).encode() + b"\n"


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write `files` into `folder`, each whole or not at all, and their manifest last.

    The manifest that was there goes first: a process that is killed in between leaves none, and not a wrong one.
    """
    (folder / MANIFEST).unlink(missing_ok=True)
    for name, data in files.items():
        write_atomic(folder / name, data)
    write_atomic(folder / MANIFEST, manifest(files))


def read_manifest(folder: Path, names: Sequence[str]) -> dict[str, Any]:
    """The manifest of `folder`, after the files `names` were compared with it; {} where it has none.

    Raises DamagedFile where a file differs. Folders of versions before manifests load with a note in the log.
    """
    path = folder / MANIFEST
    if not path.is_file():
        logger.warning("%s has no %s: damage to its files would not be noticed", folder, MANIFEST)
        return {}
    told = read_json(path)
    digests = told.get("sha256")
    if not isinstance(digests, dict) or not {*names} <= digests.keys():
        raise DamagedFile(f"{path} is damaged: it must have the SHA-256 of {', '.join(names)}")
    for name in names:
        if not (folder / name).is_file():
            raise DamagedFile(f"{folder / name} is missing, but {MANIFEST} names it")
        found = sha256(folder / name)
        if found != digests[name]:
            raise DamagedFile(
                f"{folder / name} is damaged or was changed: its SHA-256 is {found}, and {MANIFEST} has "
                f"{digests[name]!r}. If you changed it yourself, delete {path}"
            )
    return told


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object of a file that a person may have edited; the error names the file."""
    if path.stat().st_size > JSON_BYTES:
        raise DamagedFile(f"{path} has {path.stat().st_size:,} bytes; no such file has more than {JSON_BYTES:,}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"{path} is damaged or no JSON file: {error}") from None
    if not isinstance(value, dict):
        raise DamagedFile(f"{path} holds {str(value)[:80]!r}; expected a JSON object, {{...}}")
    return value


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{max(names, key=names.count)!r} is there twice")
    return found


# Modules


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
        config = json.loads(_find(model_id, CONFIG, hub).read_text(encoding="utf-8"))
        parameters = inspect.signature(cls.__init__).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            config = {name: value for name, value in config.items() if name in parameters}
        return cls._from_pretrained(model_id=model_id, **hub, **(config | arguments))

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
        cls, *, model_id: str, map_location: str = "cpu", strict: bool = True, **arguments: Any
    ) -> Self:
        weights = _find(model_id, WEIGHTS, _hub_options(arguments))
        model = cls(**arguments)
        assert isinstance(model, nn.Module)
        safetensors.torch.load_model(model, weights, strict=strict, device=map_location)
        model.eval()
        return model


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
        raise FileNotFoundError(f"there is no {name} in {model_id!r}: was it saved by save_pretrained?")
    return path


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
