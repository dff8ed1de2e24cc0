"""Registering an operation that a compiled step calls: torch.library.custom_op checks its results at each call, which
takes the host several times as long as a launch. What it would find, the tests look for (torch.library.opcheck)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

_library = torch.library.Library("topovq", "FRAGMENT")  # type: ignore[no-untyped-call]  # of torch


def registered(
    name: str, function: Callable[..., Any], outlines: Callable[..., Any], mutates: Iterable[str] = ()
) -> Any:
    """The operation topovq::NAME, which is `function` on every device and `outlines` for tensors without values;
    tensors in `mutates` it changes in place."""
    schema = torch.library.infer_schema(function, mutates_args=mutates)
    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    _library.impl(name, function, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"topovq::{name}", outlines)
    return getattr(torch.ops.topovq, name).default
