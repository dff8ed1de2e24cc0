"""use: how often each code is chosen, and how long ago it last was."""

from __future__ import annotations

import torch
from torch import Tensor

NEVER = 2**30  # `idle` of a code that was never chosen, before it counts the updates since
CHOSEN = 0.5  # vectors in a batch that make a code a chosen one: soft choices give every code a little


def follow_use(hits_K: Tensor, idle_K: Tensor, batch_K: Tensor, decay: float) -> Tensor:
    """Move the running use of the codes by a batch's counts, in place; whether the batch held anything, bool, 0-dim."""
    live = batch_K.sum() > 0
    hits_K.copy_(torch.where(live, decay * hits_K + (1 - decay) * batch_K, hits_K))
    idle_K.copy_(torch.where(batch_K >= CHOSEN, 0, idle_K + live))
    return live


def waited(idle_K: Tensor) -> Tensor:
    """Updates since a code was chosen, or since it was put where it is."""
    return torch.where(idle_K >= NEVER, idle_K - NEVER, idle_K)
