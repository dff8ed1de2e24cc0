"""What every estimator here asks of its parameters and tensors, and the form its answers have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor


def checked_tensor(x_ND: Tensor) -> Tensor:
    """A float32 or float64 matrix of at least one row and one column, without infinities."""
    if x_ND.ndim != 2 or x_ND.shape[0] < 1 or x_ND.shape[1] < 1:
        raise ValueError(f"a tensor of shape {tuple(x_ND.shape)} is no table: expected [samples, features], not empty")
    if x_ND.is_complex():
        raise ValueError(f"complex data is not supported, got {x_ND.dtype}: expected real numbers")
    x_ND = x_ND.detach()
    if not x_ND.is_floating_point():
        x_ND = x_ND.double()
    x_ND = x_ND.to(torch.promote_types(x_ND.dtype, torch.float32)).contiguous()
    if bool(x_ND.isinf().any()):
        raise ValueError("the tensor contains infinity: replace it, or put NaN where a value is missing")
    return x_ND


def like_input(value: Tensor, X: Any) -> Any:
    """A tensor on X's device where X is one, else a NumPy array."""
    return value.to(X.device) if isinstance(X, Tensor) else value.cpu().numpy()


def weighted_mean(value_N: Tensor, weight_N: Tensor) -> float:
    return float((value_N.double() @ weight_N.double()) / weight_N.double().sum())


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    if value not in tuple(choices):
        raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(map(repr, choices))}")


def check_number(name: str, value: Any, *, low: float, high: float = float("inf"), whole: bool = False) -> None:
    """Refuse a parameter that is not a finite number from `low` to `high` (a whole one)."""
    kinds = (int, np.integer) if whole else (int, float, np.integer, np.floating)
    if isinstance(value, bool) or not isinstance(value, kinds) or not (low <= value <= high and np.isfinite(value)):
        upper = f" and at most {high:g}" if np.isfinite(high) else ""
        raise ValueError(f"{name}={value!r} must be {'an int' if whole else 'a number'} of at least {low:g}{upper}")
