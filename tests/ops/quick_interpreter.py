"""Triton's interpreter, which computes what it did, but works out once what it works out again at every operation.

That is most of its time. Whether integers overflow is left out: it is computed beside every sum and product of
integers, but asserted only in Triton's debug mode, which is off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton.language import core
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterOptions

_launch, _patch, _dtype = GridExecutor.__call__, interpreter._patch_lang, interpreter._get_np_dtype
_block, _tensor = core.block_type.__init__, core.tensor.__init__
_patched: set[int] = set()
_dtypes: dict[str, Any] = {}
_blocks: dict[tuple[Any, ...], dict[str, Any]] = {}
_tensors: dict[str, dict[str, Any]] = {}


def _launch_anew(self: GridExecutor, *arguments: Any, **options: Any) -> None:
    _patched.clear()
    _launch(self, *arguments, **options)


def _patch_once(function: Callable[..., Any]) -> Any:
    """Triton's language is patched by a launch, and again by each call of a helper: once for a module is enough."""
    if id(function.__globals__) in _patched:
        return None  # only the launch itself, which comes first, restores what it patched
    _patched.add(id(function.__globals__))
    return _patch(function)


def _known_dtype(of: Any) -> Any:
    if of.name not in _dtypes:
        _dtypes[of.name] = _dtype(of)
    return _dtypes[of.name]


def _known_block(self: Any, element: Any, shape: Any) -> None:
    key = element.name, *(size.value if isinstance(size, core.constexpr) else size for size in shape)
    if key not in _blocks:
        _block(self, element, shape)
        _blocks[key] = dict(vars(self))
    vars(self).update(_blocks[key])


def _known_tensor(self: Any, handle: Any, of: Any) -> None:
    """Shape, size and type by the name of its type."""
    if of.name not in _tensors:
        _tensor(self, handle, of)
        _tensors[of.name] = dict(vars(self))
    vars(self).update(_tensors[of.name], handle=handle, type=of)


def quicken() -> None:
    """From now on, for every kernel of this process."""
    interpreter.interpreter_builder.options = InterpreterOptions(sanitize_overflow=False)
    GridExecutor.__call__ = _launch_anew
    interpreter._patch_lang = _patch_once
    interpreter._get_np_dtype = _known_dtype
    core.block_type.__init__ = _known_block
    core.tensor.__init__ = _known_tensor
