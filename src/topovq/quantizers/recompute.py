"""Activation checkpointing runs a forward twice: which of the two is this?"""

from __future__ import annotations

import torch


def in_backward() -> bool:
    """Whether a backward pass is running: then this forward is activation checkpointing's second one."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def may_be_recomputed() -> bool:
    """Whether activation checkpointing may run this forward again: it either disables gradients or packs tensors."""
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return False
    return not torch.is_grad_enabled() or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
