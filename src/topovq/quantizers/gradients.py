"""The rotation trick: the other way for a gradient to get past the search (the straight one is in ops/quantize.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

SHORTEST = 1e-6  # a vector below this length has no direction


class _RotateTo(torch.autograd.Function):
    """q = s R x with R the rotation from x to q and s = |q| / |x|, both constants of the gradient: dx = s R^T dq.

    A vector of no length, or an infinite one, has no direction to turn from: there dx = dq.
    """

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, q_ND: Tensor) -> Tensor:
        ctx.save_for_backward(x_ND, q_ND)
        return q_ND.clone()

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None]:
        x_ND, q_ND = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in ctx.saved_tensors)
        g_ND = grad_ND.to(x_ND.dtype)
        length_x, length_q = x_ND.norm(dim=1, keepdim=True), q_ND.norm(dim=1, keepdim=True)
        u, v = x_ND / length_x.clamp(min=SHORTEST), q_ND / length_q.clamp(min=SHORTEST)
        # R = I - 2 r r^T + 2 v u^T with r = (u + v) / |u + v|: the mirror image of u in r, then of that in v.
        r = torch.nn.functional.normalize(u + v, dim=1)
        turned = g_ND - 2 * (g_ND * r).sum(1, keepdim=True) * r + 2 * (g_ND * v).sum(1, keepdim=True) * u
        has_direction = (length_x > SHORTEST) & length_x.isfinite()
        return torch.where(has_direction, length_q / length_x * turned, g_ND).to(grad_ND.dtype), None


def rotate_to(x_ND: Tensor, q_ND: Tensor) -> Tensor:
    """q, with dq/dx the rotation and scaling that takes x to q (the rotation trick of Fifty et al., 2024)."""
    return _RotateTo.apply(x_ND, q_ND)
