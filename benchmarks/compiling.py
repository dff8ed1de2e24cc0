"""Modules through torch.compile, and errors as notes in a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def compiled(module: nn.Module, run: str, whole: bool, backend: str = "inductor") -> Callable[..., Any]:
    """The module as torch.compile makes it: run "compiled" in its default mode, "reduce-overhead" with CUDA graphs.

    whole    refuse what the compiler cannot see, instead of breaking the graph there
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    made = torch.compile(module, fullgraph=whole, backend=backend, mode=None if run == "compiled" else run)
    if run == "compiled":
        return made

    def marked(*inputs: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return made(*inputs)

    return marked


def graph_breaks() -> str:
    """A note on what was compiled last; empty where the graph is whole."""
    number = sum(torch._dynamo.utils.counters["graph_break"].values())
    return f"{number} graph breaks" if number else ""


def told(error: Exception) -> str:
    """An error as a short note."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    if "synchroniz" in str(error):
        return "it waits for the device: no graph can hold it"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}"[:160]
