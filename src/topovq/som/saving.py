"""An estimator as one safetensors file: arrays as tensors, the rest as JSON in the header; never pickle.

The header has the SHA-256 of all of it. Older files have none, and are looked at as well as can be.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
from sklearn.base import BaseEstimator

from topovq.grid import Grid
from topovq.storage import DamagedFile, note_without, write_atomic

FORMAT = "topovq estimator 1"


def save(estimator: BaseEstimator, path: Path) -> None:
    """Parameters and fitted attributes, written beside `path` and renamed over it."""
    tensors: dict[str, np.ndarray] = {}
    values: dict[str, Any] = {}
    parameters = estimator.get_params(deep=False)
    fitted = {name: value for name, value in vars(estimator).items() if name not in parameters}
    for group, members in (("parameter", parameters), ("fitted", fitted)):
        for name, value in members.items():
            key = f"{group}.{name}"
            if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
                tensors[key] = np.ascontiguousarray(value)
            else:
                values[key] = _encode(key, value)
    header = {"format": FORMAT, "class": type(estimator).__name__, "values": json.dumps(values, sort_keys=True)}
    header["sha256"] = _digest(header, tensors)
    write_atomic(path, _in_order(safetensors.numpy.save(tensors, metadata=header)))


def load(cls: type, path: Path) -> Any:
    if not path.is_file():  # a named pipe would be waited at for ever
        raise FileNotFoundError(f"there is no saved estimator at {path}")
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            header = file.metadata() or {}
            if header.get("format") != FORMAT:
                found = header.get("format")
                raise DamagedFile(f"{path} is not a saved estimator: its format is {found!r}, not {FORMAT!r}")
            if header.get("class") != cls.__name__:
                raise DamagedFile(
                    f"{path} holds a {header.get('class')}, not a {cls.__name__}: load it with that class"
                )
            state = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (it is not a dict)
        if "sha256" not in header:
            note_without({}, path, "SHA-256")
        elif header["sha256"] != _digest(header, state):
            raise DamagedFile(f"{path} is damaged: it is not what its SHA-256 says")
        state |= {key: _decode(value) for key, value in json.loads(header["values"]).items()}
        estimator = _build(cls, state)
    except (DamagedFile, OSError, MemoryError):
        raise
    except Exception as error:  # safetensors, JSON and estimators have a dozen types for what cannot be
        raise DamagedFile(f"{path} is damaged or no saved estimator: {' '.join(str(error).split())}") from None
    return estimator


def _digest(header: dict[str, str], tensors: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256(json.dumps([header[name] for name in ("format", "class", "values")]).encode())
    for key, tensor in sorted(tensors.items()):
        digest.update(f"{key} {tensor.dtype.str} {tensor.shape} ".encode())
        digest.update(np.ascontiguousarray(tensor).tobytes())
    return digest.hexdigest()


def _in_order(data: bytes) -> bytes:
    """The same safetensors with a sorted header: as they come its order changes, and files of equal maps differ."""
    size = int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8 : 8 + size]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)  # the numbers after it are aligned
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


def _build(cls: type, state: dict[str, Any]) -> Any:
    """The estimator of a state: its parameters and fitted attributes, and nothing else."""
    groups: dict[str, dict[str, Any]] = {"parameter": {}, "fitted": {}}
    for key, value in state.items():
        group, _, name = key.partition(".")
        groups[group][name] = value
    estimator = cls(**groups["parameter"])
    for name, value in groups["fitted"].items():
        if not name.isidentifier() or hasattr(cls, name) or name in groups["parameter"]:
            raise ValueError(f"{name!r} is no fitted attribute")
        setattr(estimator, name, value)
    codes, grid, edges = (groups["fitted"].get(name) for name in ("codes_", "grid_", "edges_"))
    if codes is not None:
        if codes.ndim != 2 or codes.dtype.kind != "f" or not len(codes) or not np.isfinite(codes).all():
            raise ValueError(f"codes_ of type {codes.dtype} and shape {codes.shape} are not codes, or not all finite")
        if estimator.n_features_in_ != codes.shape[1]:
            raise ValueError(
                f"codes_ have {codes.shape[1]} features, and n_features_in_ is {estimator.n_features_in_!r}"
            )
        if grid is not None and grid.size != len(codes):
            raise ValueError(f"there are {len(codes)} codes, and a map of {grid.size}")
        if edges is not None and edges.size and not 0 <= edges.min() <= edges.max() < len(codes):
            raise ValueError("edges_ name codes that are not there")
    return estimator


def _encode(key: str, value: Any) -> Any:
    if isinstance(value, Grid):
        return {"grid": value.to_dict()}
    if isinstance(value, np.ndarray):
        items = value.tolist()
        if all(isinstance(item, str) for item in items):
            return {"strings": items, "object": value.dtype == object}
        raise TypeError(f"{key} is an array of {value.dtype}, which safetensors cannot hold: use joblib.dump")
    if isinstance(value, tuple):
        return {"tuple": [_encode(key, item) for item in value]}
    if isinstance(value, dict):  # what set_output was told
        return {"dict": {name: _encode(key, item) for name, item in value.items()}}
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{key}={value!r} cannot be saved: expected a number, string, tuple or array; joblib.dump can")


def _decode(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "grid" in value:
        return Grid.from_dict(value["grid"])
    if "tuple" in value:
        return tuple(_decode(item) for item in value["tuple"])
    if "dict" in value:
        return {name: _decode(item) for name, item in value["dict"].items()}
    return np.array(value["strings"], dtype=object if value["object"] else None)
