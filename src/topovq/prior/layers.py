"""The parts of the transformer: its inputs, its blocks, angles that say where a token lies, and what heads consist of.

Legend: B images, T tokens of an image, D width, H heads, d = D / H, K codes, C dimensions of a code, P paths of digits
to the last one, n choices of that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from topovq.grid import Grid

LONGEST_TURN = 100.0  # cells that it takes the slowest rotary angle to turn by one radian
FEATURES = 16  # of a code, in a head that knows the codes
NO_CODES = "this head was made with code_dim, but knows no codes yet: give them by set_codes(codes)"


def check_widths(**given: int | None) -> None:
    """Refuse widths that are no ints of at least 1."""
    for name, value in given.items():
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"{name}={value!r} must be an int of at least 1")


def check_takes_codes(takes: bool) -> None:
    if not takes:
        raise ValueError("this head has no use for codes: make it with code_dim, their dimensions")


def scaled_codes(codes: Tensor, size: int, dim: int) -> Tensor:
    """Codes [K, C], scaled to a mean square of 1; others than K = size and C = dim are refused."""
    codes = torch.as_tensor(codes).detach()
    if codes.shape != (size, dim):
        raise ValueError(f"codes of shape {tuple(codes.shape)} do not fit: expected {(size, dim)}")
    if not codes.is_meta and not bool(codes.isfinite().all()):
        rows = int((~codes.isfinite().all(1)).sum())
        raise ValueError(f"{rows:,} of {size:,} codes are NaN or infinite: give codes that are finite")
    return codes / codes.square().mean().sqrt().clamp(min=1e-12)


class TokenInput(nn.Module):
    """Tokens [...] -> [..., D]: a learned vector for each row and each column of the map, and the code itself."""

    codes_KC: Tensor

    def __init__(self, dim: int, grid: Grid, code_dim: int) -> None:
        super().__init__()
        self.grid = grid
        self.axes = nn.ModuleList(nn.Embedding(side, dim) for side in grid.shape)
        self.project = nn.Linear(code_dim, dim) if code_dim else None
        if code_dim:
            self.register_buffer("codes_KC", torch.zeros(grid.size, code_dim))

    def set_codes(self, codes_KC: Tensor) -> None:
        """Take the codes, scaled to a mean square of 1."""
        if self.project is not None:
            self.codes_KC.copy_(scaled_codes(codes_KC, *self.codes_KC.shape))

    def forward(self, tokens: Tensor) -> Tensor:
        x = sum(axis(along) for axis, along in zip(self.axes, self.grid.unflatten(tokens)))
        assert isinstance(x, Tensor)
        return x if self.project is None else x + self.project(self.codes_KC[tokens])


class Block(nn.Module):
    """Attention to the steps before, then an MLP; each adds to what it was given."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(
        self, x_BTD: Tensor, cos_Td: Tensor, sin_Td: Tensor, kept: tuple[Tensor, Tensor] | None = None, first: int = 0
    ) -> Tensor:
        """`kept` are keys and values [B, H, T, d] of all steps, those before `first` known already; then T is 1."""
        qkv = self.qkv(self.norm1(x_BTD)).unflatten(-1, (3, self.heads, -1))
        q_BHTd, k_BHTd, v_BHTd = (each.transpose(1, 2) for each in qkv.unbind(2))
        q_BHTd, k_BHTd = rotate(q_BHTd, cos_Td, sin_Td), rotate(k_BHTd, cos_Td, sin_Td)
        if kept is not None:
            last = first + x_BTD.shape[1]
            for whole, new in zip(kept, (k_BHTd, v_BHTd)):
                whole[:, :, first:last] = new
            k_BHTd, v_BHTd = (whole[:, :, :last].to(q_BHTd.dtype) for whole in kept)
        a_BHTd = F.scaled_dot_product_attention(q_BHTd, k_BHTd, v_BHTd, is_causal=kept is None)
        x_BTD = x_BTD + self.out(a_BHTd.transpose(1, 2).flatten(2))
        return x_BTD + self.down(F.gelu(self.up(self.norm2(x_BTD))))


def rotary_turns(places: Sequence[tuple[float, float]], width: int) -> Tensor:
    """Angles float32 [T, width / 2] of steps at (row, column): the first half turn with the row, the second with the
    column, each at width / 4 speeds from 1 down to 1 / LONGEST_TURN."""
    at_T2 = torch.tensor(places, dtype=torch.float32)
    speeds = LONGEST_TURN ** -torch.linspace(0, 1, width // 4)
    return (at_T2[:, :, None] * speeds).flatten(1)


def rotate(x_BHTd: Tensor, cos_Td: Tensor, sin_Td: Tensor) -> Tensor:
    """Turn pairs of numbers (i, i + d/2) by the angles, so that products of queries and keys depend on differences."""
    left, right = x_BHTd.to(cos_Td.dtype).chunk(2, -1)
    return torch.cat([left * cos_Td - right * sin_Td, left * sin_Td + right * cos_Td], -1).to(x_BHTd.dtype)


# Of heads


class Mix(nn.Module):
    """norm(x + MLP(norm(x)))."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(dim), nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.last = nn.RMSNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.down(F.gelu(self.up(self.norm(x)))))


class CodeFit(nn.Module):
    """How well codes fit hidden states: <Q h, features(code)>. The codes are laid out by the path of digits that leads
    to them, [P, n, C]: P paths, n choices of the last digit. Where digits lead to no code there are zeros."""

    codes_PnC: Tensor

    def __init__(self, dim: int, code_dim: int, paths: int, choices: int) -> None:
        super().__init__()
        self.query = nn.Linear(dim, FEATURES)
        self.up, self.down = nn.Linear(code_dim, 4 * FEATURES), nn.Linear(4 * FEATURES, FEATURES)
        self.last = nn.RMSNorm(FEATURES)
        self.register_buffer("codes_PnC", torch.zeros(paths, choices, code_dim))
        self.given = False  # whether there are codes yet

    def forward(self, hidden: Tensor, path: Tensor) -> Tensor:
        """Products [..., n] of hidden states [..., D] with the codes on their paths int64 [...]."""
        query = self.query(hidden) / math.sqrt(FEATURES)
        if len(self.codes_PnC) == 1:
            return F.linear(query, self.features(self.codes_PnC[0]))
        if path.numel() < len(self.codes_PnC):  # in sampling: the features of those alone
            found = self.features(self.codes_PnC[path]).mT
        else:
            every = self.features(self.codes_PnC).mT.to(query.dtype).flatten(1)  # half precision is half the memory
            found = every.index_select(0, path.flatten()).view(*path.shape, FEATURES, -1)
        return (query[..., None, :] @ found).squeeze(-2)

    def features(self, codes: Tensor) -> Tensor:
        features = self.down(F.gelu(self.up(codes)))
        return self.last(features.to(self.last.weight.dtype))  # which autocast leaves in half precision

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        """A head that was saved before it knew codes says what it said then: its queries are 0."""
        if not any(name.startswith(prefix) for name in state):
            nn.init.zeros_(self.query.weight)
            nn.init.zeros_(self.query.bias)
            state.update({prefix + name: tensor for name, tensor in self.state_dict().items()})
        self.given = True
        super()._load_from_state_dict(state, prefix, *rest)
