"""Who calls: when an operation may be called as the function it is, and which forward this one is.

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
    if torch.compiler.is_compiling():
        return False
    for tensor in tensors:  # a loop: this is asked several times a step, and a generator takes the host twice as long
        if type(tensor) not in PLAIN:
            return False
    return (
        torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
    )


def transformed() -> bool:
    """Whether this runs within torch.func's grad, jvp, vmap, ... or within a level of forward-mode derivatives."""
    if torch.compiler.is_compiling():  # it has rules of its own
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def refuse_transforms(where: str) -> None:
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            f"{where}: a training step moves the codes in place, which torch.func (grad, jvp, vmap) does not allow; "
            "call eval() or pass freeze_codebook=True, or use torch.autograd and, instead of vmap, one larger batch"
        )


def _to_onnx() -> bool:
    return torch.onnx.is_in_onnx_export()


# torch.onnx.export also traces with dynamo, which takes torch's own function for False. This is what
# torch.compiler.assume_constant_result does, without its import of dynamo.
_to_onnx._dynamo_marked_constant = True  # type: ignore[attr-defined]


def refuse_onnx(where: str) -> None:
    if torch.compiler.is_exporting() and _to_onnx():
        raise RuntimeError(
            f"{where}: torch.onnx.export met a layer in training mode, whose step moves the codes; ONNX files are for "
            "inference: call .eval() on the model first"
        )


def in_backward() -> bool:
    """Whether a backward pass is running: then this forward is activation checkpointing's second one."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def may_be_recomputed() -> bool:
    """Whether activation checkpointing may run this forward again: within an autograd function, or with packed tensors.

    Within the forward of such a function both kinds of derivatives are off; torch.no_grad() leaves forward-mode on.
    """
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return False
    if not torch.is_grad_enabled():
        return not torch._C._is_fwd_grad_enabled()
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
