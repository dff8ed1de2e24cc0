"""When an operation may be called as the function it is.

Registered operations are what torch.compile, export and fake tensors need. Their dispatch takes the host longer than
many kernels take the device; where nobody looks, it is left out.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

PLAIN = (Tensor, nn.Parameter)


def plain(*tensors: Tensor) -> bool:
    """Whether nothing traces, fakes or wraps what is done to these tensors."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._are_functorch_transforms_active()
        and all(type(tensor) in PLAIN for tensor in tensors)
    )
