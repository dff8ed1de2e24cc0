"""Triton's interpreter, which computes what it did, but works out once what it works out again at every operation.

That is most of its time. Types and shapes that are the same already go past what would make them so. Whether integers
overflow is left out: it is computed beside every sum and product of integers, but asserted only in Triton's debug mode,
which is off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, InterpreterOptions, TensorHandle

_launch, _patch, _dtype = GridExecutor.__call__, interpreter._patch_lang, interpreter._get_np_dtype
_block, _tensor = core.block_type.__init__, core.tensor.__init__
_with_element, _item, _equal = core.block_type.with_element_ty, core.tuple.__getitem__, core.dtype.__eq__
_broadcast, _operands, _cast = (
    TritonSemantic.broadcast_impl_value,
    TritonSemantic.binary_op_type_checking_impl,
    TritonSemantic.cast,
)
_patched: set[int] = set()
_dtypes: dict[str, Any] = {}
_blocks: dict[tuple[Any, ...], dict[str, Any]] = {}
_of_elements: dict[tuple[str, str], Any] = {}
_tensors: dict[str, tuple[Any, ...]] = {}
_shared: dict[tuple[str, str], tuple[Any, Any] | None] = {}


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


def _known_of_elements(self: Any, scalar: Any) -> Any:
    key = self.name, scalar.name
    if key not in _of_elements:
        _of_elements[key] = _with_element(self, scalar)
    return _of_elements[key]


def _known_tensor(self: Any, handle: Any, of: Any) -> None:
    """Shape, size and type by the name of its type."""
    known = _tensors.get(of.name)
    if known is None:
        _tensor(self, handle, of)
        known = _tensors[of.name] = self.shape, self.numel, self.dtype
    self.handle, self.type = handle, of
    self.shape, self.numel, self.dtype = known


def _patch_attribute(of: Any, name: str, member: Callable[..., Any], _: Any, scope: Any) -> None:
    def call(*arguments: Any, **options: Any) -> Any:
        options["_semantic"] = interpreter.interpreter_semantic
        return member(*arguments, **options)

    scope.set_attr(of, name, call)


def _same_dtype(self: Any, other: Any) -> bool:
    return self.name == other.name if isinstance(other, core.dtype) else _equal(self, other)


def _item_of_tuple(self: Any, index: Any) -> Any:
    return self.values[index] if type(index) is int else _item(self, index)


def _splat(self: InterpreterBuilder, block: Any, scalar: TensorHandle) -> TensorHandle:
    value = scalar.data[0] if isinstance(scalar.dtype, core.block_type) else scalar.data
    return TensorHandle(np.full(block.shape.values, value, dtype=_known_dtype(scalar.dtype)), scalar.dtype.scalar)


def _of_one_shape(self: TritonSemantic, left: Any, right: Any) -> tuple[Any, Any]:
    a, b = left.type, right.type
    if a.is_block():
        if not b.is_block():
            block = _known_of_elements(a, b)
            return left, self.tensor(_splat(self.builder, block, right.handle), block)
        if a.shape.values == b.shape.values:
            return left, right
    elif b.is_block():
        block = _known_of_elements(b, a)
        return self.tensor(_splat(self.builder, block, left.handle), block), right
    else:
        return left, right
    key = a.name, b.name
    if key not in _shared:
        one, two = _broadcast(self, left, right)
        _shared[key] = (one.type, two.type) if len(a.shape.values) == len(b.shape.values) else None
        return one, two
    types = _shared[key]
    if types is None:
        return _broadcast(self, left, right)
    return _stretched(left, types[0]), _stretched(right, types[1])


def _stretched(x: Any, to: Any) -> Any:
    if x.type.name == to.name:
        return x
    return core.tensor(TensorHandle(np.broadcast_to(x.handle.data, to.shape.values), x.handle.dtype.scalar), to)


def _takes(of: Any, number: Any) -> bool:
    """Whether a number takes the type of the tensor that it meets, as nearly all do."""
    if of.name in ("fp32", "fp64"):
        return type(number) is float or type(number) is int
    return of.name in ("int32", "int64") and type(number) is int and -(2**31) <= number < 2**31


def _of_one_type(
    self: TritonSemantic,
    left: Any,
    right: Any,
    left_points: bool = False,
    right_points: bool = False,
    arithmetic: bool = True,
    quotient: bool = False,
) -> tuple[Any, Any]:
    if isinstance(left, core.tensor):
        a = left.dtype
        if isinstance(right, core.tensor):
            # A quotient of halves is float32, and of pointers some pairs are refused.
            if a.name == right.dtype.name and a.name not in ("fp16", "bf16") and not a.is_ptr():
                return _of_one_shape(self, left, right)
        elif arithmetic and _takes(a, right):
            return _of_one_shape(self, left, self.scalar_constant(right, dtype=a))
    elif arithmetic and isinstance(right, core.tensor) and _takes(right.dtype, left):
        return _of_one_shape(self, self.scalar_constant(left, dtype=right.dtype), right)
    return _operands(self, left, right, left_points, right_points, arithmetic, quotient)


def _cast_to_another(self: TritonSemantic, x: Any, to: Any, *how: Any) -> Any:
    return x if x.dtype.name == to.scalar.name else _cast(self, x, to, *how)


def quicken() -> None:
    """From now on, for every kernel of this process."""
    interpreter.interpreter_builder.options = InterpreterOptions(sanitize_overflow=False)
    GridExecutor.__call__ = _launch_anew
    interpreter._patch_lang = _patch_once
    interpreter._get_np_dtype = _known_dtype
    interpreter._patch_attr = _patch_attribute
    core.block_type.__init__ = _known_block
    core.block_type.with_element_ty = _known_of_elements
    core.tensor.__init__ = _known_tensor
    core.dtype.__eq__ = _same_dtype
    core.tuple.__getitem__ = _item_of_tuple
    InterpreterBuilder.create_splat = _splat
    TritonSemantic.broadcast_impl_value = _of_one_shape
    TritonSemantic.binary_op_type_checking_impl = _of_one_type
    TritonSemantic.cast = _cast_to_another
