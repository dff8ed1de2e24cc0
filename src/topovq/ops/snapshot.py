"""snapshot: values as they are now, for plain operations that read what an update will move in place.

In a step that updates, torch's compiler may leave a plain clone out, put off an operation that reads the codes until
they have moved, or let the backward pass read them once more. It leaves registered operations alone. `quantize` and the
searches are such operations; what else reads the state of a codebook before its update reads it through this one.
"""

from __future__ import annotations

import torch
from torch import Tensor


def snapshot(tensor: Tensor) -> Tensor:
    """A copy without a gradient."""
    if torch.compiler.is_compiling() and not torch.compiler.is_exporting():  # exported files know no topovq
        copied: Tensor = _snapshot(tensor.detach())
        return copied
    return tensor.detach().clone()


def held(tensor: Tensor) -> Tensor:
    """The same values without a gradient, to use before the update: a copy only where a compiler may put that off."""
    return snapshot(tensor) if torch.compiler.is_compiling() else tensor.detach()


@torch.library.custom_op("topovq::snapshot", mutates_args=())
def _snapshot(tensor: Tensor) -> Tensor:
    return tensor.clone()


@_snapshot.register_fake
def _(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor)
