"""When an operation may be called as the function it is.

Registered operations are what torch.compile, export and fake tensors need. Their dispatch takes the host longer than
many kernels take the device; where nobody looks, it is left out.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

PLAIN = (Tensor, nn.Parameter)


def plain(*tensors: Tensor) -> bool:
    """Whether nothing traces, fakes or wraps what is done to these tensors."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
        and all(type(tensor) in PLAIN for tensor in tensors)
    )


def transformed() -> bool:
    """Whether this runs within torch.func's grad, jvp, vmap, ... or within a level of forward-mode derivatives."""
    if torch.compiler.is_compiling():  # it has rules of its own
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
