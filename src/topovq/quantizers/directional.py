"""DiVeQ's directional reparameterization: a gradient for input and codes alike (openreview KRVnpTbx7R)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def reparameterize(x: Tensor, q: Tensor, variance: float) -> Tensor:
    """x + sg(v) |q - x| with v the direction from x to q, plus noise of this variance, at length 1; shapes [..., D]."""
    apart = q - x
    with torch.no_grad():
        direction = F.normalize(apart + variance**0.5 * torch.randn_like(apart), dim=-1)
    length: Tensor = apart.norm(dim=-1, keepdim=True)
    return x + direction * length
