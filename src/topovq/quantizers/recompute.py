"""Who calls this forward: activation checkpointing, for the first or the second time, or torch.func?"""

from __future__ import annotations

import torch


def refuse_transforms(where: str) -> None:
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            f"{where}: a training step moves the codes in place, which torch.func (grad, jvp, vmap) does not allow; "
            "call eval() or pass freeze_codebook=True, or use torch.autograd and, instead of vmap, one larger batch"
        )


def in_backward() -> bool:
    """Whether a backward pass is running: then this forward is activation checkpointing's second one."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def may_be_recomputed() -> bool:
    """Whether activation checkpointing may run this forward again: it either disables gradients or packs tensors."""
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return False
    return not torch.is_grad_enabled() or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
