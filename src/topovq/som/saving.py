"""An estimator as one safetensors file: arrays as tensors, the rest as JSON in the header; never pickle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
from sklearn.base import BaseEstimator

from topovq.grid import Grid
from topovq.storage import write_atomic

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
    header = {"format": FORMAT, "class": type(estimator).__name__, "values": json.dumps(values)}
    write_atomic(path, safetensors.numpy.save(tensors, metadata=header))


def load(cls: type, path: Path) -> Any:
    with safetensors.safe_open(path, framework="numpy") as file:
        header = file.metadata() or {}
        if header.get("format") != FORMAT:
            raise ValueError(f"{path} is not a saved estimator: its format is {header.get('format')!r}, not {FORMAT!r}")
        if header["class"] != cls.__name__:
            raise ValueError(f"{path} holds a {header['class']}, not a {cls.__name__}: load it with that class")
        state = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (it is not a dict)
    state |= {key: _decode(value) for key, value in json.loads(header["values"]).items()}
    estimator = cls(**{key.split(".", 1)[1]: value for key, value in state.items() if key.startswith("parameter.")})
    for key, value in state.items():
        if key.startswith("fitted."):
            setattr(estimator, key.split(".", 1)[1], value)
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
