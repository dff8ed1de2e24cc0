"""Other ways for a gradient past the search: rotation, a noisy direction (the straight one is in ops/quantize.py)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from topovq.ops.direct import transformed

SHORTEST = 1e-6  # a vector below this length has no direction


class _Turn(NamedTuple):
    """J = s R with R = I - 2 r r^T + 2 v u^T: the mirror image of u in r = (u + v) / |u + v|, then of that in v.

    u and v are the directions of x and q, s = |q| / |x|, all of them constants of the gradient. A vector of no length,
    or an infinite one, has no direction to turn from: there J = I.
    """

    r: Tensor  # [N, D], as u and v
    u: Tensor
    v: Tensor
    s: Tensor  # [N, 1]
    turns: Tensor  # bool [N, 1]

    @classmethod
    def between(cls, x_ND: Tensor, q_ND: Tensor) -> _Turn:
        x_ND, q_ND = (t.detach().to(torch.promote_types(t.dtype, torch.float32)) for t in (x_ND, q_ND))
        length_x, length_q = x_ND.norm(dim=1, keepdim=True), q_ND.norm(dim=1, keepdim=True)
        u, v = x_ND / length_x.clamp(min=SHORTEST), q_ND / length_q.clamp(min=SHORTEST)
        turns = (length_x > SHORTEST) & length_x.isfinite()
        return cls(torch.nn.functional.normalize(u + v, dim=1), u, v, length_q / length_x, turns)

    def there(self, dx_ND: Tensor) -> Tensor:
        """J dx."""
        return self._turned(dx_ND, self.u, self.v)

    def back(self, dq_ND: Tensor) -> Tensor:
        """J^T dq."""
        return self._turned(dq_ND, self.v, self.u)

    def _turned(self, d_ND: Tensor, along: Tensor, to: Tensor) -> Tensor:
        d = d_ND.to(self.u.dtype)
        turned = d - 2 * (d * self.r).sum(1, keepdim=True) * self.r + 2 * (d * along).sum(1, keepdim=True) * to
        return torch.where(self.turns, self.s * turned, d).to(d_ND.dtype)


class _RotateTo(torch.autograd.Function):
    """q = J x, with dx = J^T dq."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, q_ND: Tensor) -> Tensor:
        ctx.save_for_backward(x_ND, q_ND)
        return q_ND.clone()

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None]:
        return _Turn.between(*ctx.saved_tensors).back(grad_ND), None


def rotate_to(x_ND: Tensor, q_ND: Tensor) -> Tensor:
    """q, with dq/dx the rotation and scaling that takes x to q (the rotation trick of Fifty et al., 2024)."""
    if transformed():  # torch's own operations, for torch.func and forward-mode derivatives
        at_ND = x_ND.detach()
        nothing_ND = torch.where(at_ND.isfinite(), x_ND - at_ND, 0)
        return q_ND + _Turn.between(at_ND, q_ND).there(nothing_ND)
    rotated_ND: Tensor = _RotateTo.apply(x_ND, q_ND)  # type: ignore[no-untyped-call]  # of torch
    return rotated_ND


def reparameterize(x: Tensor, q: Tensor, variance: float) -> Tensor:
    """x + sg(v) |q - x| with v the direction from x to q, plus noise of this variance, at length 1; shapes [..., D].

    DiVeQ (openreview KRVnpTbx7R): a gradient for input and codes alike.
    """
    apart = q - x
    with torch.no_grad():
        direction = F.normalize(apart + variance**0.5 * torch.randn_like(apart), dim=-1)
    length: Tensor = apart.norm(dim=-1, keepdim=True)
    return x + direction * length
