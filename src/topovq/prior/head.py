"""How likely each code is, given a hidden state: heads for any model that predicts tokens.

A head takes a token apart into digits, one for each of its factors, and multiplies the probabilities of the digits:

    p(token | h) = prod_f p(digit_f | digits before f, h)

FlatHead has one factor, a softmax over all K codes. MapHead has one for each axis of the map (a row, then a column of
that row), or several for an axis that is split (first which block of rows, then which row of it). So 262,144 codes need
two softmaxes over 512 places.

Label smoothing on the map (`width`, in cells) trains towards a Gaussian around the token instead of the token itself:

    q(j | k) ~ exp(-(d(j, k) / width)^2),    loss = -sum_j q(j | k) log p(j | h)

d^2 is a sum over the axes, so q is a product with one factor for each axis, q(j | k) = prod_a q_a(j_a | k_a), and
the loss takes the same steps as p. With two axes, rows r and columns c:

    loss = -sum_r q_1(r | k_1) log p(r | h) - E_{r ~ q_1} [ sum_c q_2(c | k_2) log p(c | r, h) ]

Every sum over one axis is taken in full. The expectation over the digits that come before is estimated by one draw from
q, which leaves the gradient unbiased and costs no more logits than one-hot targets do. Only a hexagonal map and a last
row that is partly empty make q_2 depend on the row that was drawn; q is then normalized row by row.

Legend: ... any leading axes, D width of the model, K codes, F factors, n choices of a factor, A axes of the map.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from topovq.grid import Grid, check_range
from topovq.prior.choosing import check_drawing, check_drawn, choose, inverse
from topovq.prior.layers import NO_CODES, CodeFit, Mix, check_takes_codes, check_widths, scaled_codes
from topovq.prior.targets import NEVER, Neighbors, check_width

MOST_AXES = 3


class Head(nn.Module):
    """What all heads have in common. A subclass gives `factor_logits` and, if it has several factors, their sizes."""

    def __init__(self, dim: int, grid: Grid | int, splits: Sequence[Sequence[int]]) -> None:
        """`splits` has for each axis of the grid the sizes of its digits, whose product is at least the axis."""
        super().__init__()
        self.grid = grid if isinstance(grid, Grid) else Grid(grid)
        if self.grid.ndim > MOST_AXES:
            raise ValueError(f"grid shape {self.grid.shape} has {self.grid.ndim} axes; heads know 1 to {MOST_AXES}")
        if len(splits) != self.grid.ndim:
            raise ValueError(
                f"splits={splits!r} has {len(splits)} entries; the grid {self.grid.shape} needs one an axis"
            )
        for side, sizes in zip(self.grid.shape, splits):
            digits = list(sizes) if isinstance(sizes, Sequence) else []
            if not digits or not all(type(n) is int and n >= 1 for n in digits) or math.prod(digits) < side:
                raise ValueError(f"the split {sizes!r} must be ints whose product is at least the axis, {side}")
        check_widths(dim=dim)
        self.dim, self.splits = dim, tuple(map(tuple, splits))
        self.factors: tuple[int, ...] = tuple(n for sizes in self.splits for n in sizes)
        self.gaps = math.prod(self.factors) > self.grid.size  # whether some digits together are no code's

    @property
    def size(self) -> int:
        """K, the number of codes."""
        return self.grid.size

    @property
    def takes_codes(self) -> bool:
        """Whether this head was made to know the codes (code_dim), which `set_codes` gives it."""
        return False

    def factor_logits(self, hidden: Tensor, before: Tensor) -> Tensor:
        """Logits float32 [..., n] of the next factor, from hidden states [..., D] and the digits int64 [..., f] of the
        f factors before it. A choice that leads to no code has a probability of 0."""
        raise NotImplementedError

    # Tokens and their digits

    def digits(self, tokens: Tensor) -> Tensor:
        """Tokens int64 [...] -> their digits [..., F]. Of a token that is no code the first is out of range, too: so
        the loss stops where nothing is checked here, on a GPU."""
        check_range("token", tokens, self.size)
        found: list[Tensor] = []
        for axis in reversed(range(self.grid.ndim)):
            side, sizes = self.grid.shape[axis], self.splits[axis]
            along, tokens = (tokens % side, tokens // side) if axis else (tokens, tokens)
            for n in reversed(sizes[1:]):
                found.append(along % n)
                along = along // n
            found.append(along)
        return torch.stack(found[::-1], -1)

    def _fitting(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Tokens as int64, if there is one for each hidden state."""
        if tokens.dtype.is_floating_point or tokens.dtype == torch.bool:
            raise TypeError(f"tokens must be integers, got {tokens.dtype}")
        if hidden.shape != (*tokens.shape, self.dim):
            expected = (*tokens.shape, self.dim)
            raise ValueError(
                f"hidden states {tuple(hidden.shape)} do not fit tokens {tuple(tokens.shape)}: {expected} is expected"
            )
        return tokens.long()

    def tokens(self, digits: Tensor) -> Tensor:
        """Digits int64 [..., F] -> the tokens [...]."""
        every, axes = iter(digits.unbind(-1)), []
        for sizes in self.splits:
            along = next(every)
            for n in sizes[1:]:
                along = along * n + next(every)
            axes.append(along)
        return self.grid.flatten(axes)

    def _number(self, digits: Tensor) -> Tensor:
        """The number [...] of the first digits int64 [..., f] among all that there are: 0 if f is 0."""
        number = digits.new_zeros(digits.shape[:-1])
        for n, digit in zip(self.factors, digits.unbind(-1)):
            number = number * n + digit
        return number

    def _mask(self, logits: Tensor, before: Tensor) -> Tensor:
        """Logits of the next factor without the choices that lead to no code."""
        if not self.gaps:
            return logits
        n, left = logits.shape[-1], len(self.factors) - before.shape[-1] - 1
        # The least token that a choice leads to: digits only count upwards.
        choice = torch.arange(n, device=logits.device).expand(logits.shape)
        before = before[..., None, :].expand(*logits.shape, before.shape[-1])
        digits = F.pad(torch.cat([before, choice[..., None]], -1), (0, left))
        fits, first = self.tokens(digits) < self.size, 0
        for side, sizes in zip(self.grid.shape, self.splits):
            along = torch.zeros_like(choice)
            for place in range(first, first + len(sizes)):
                along = along * self.factors[place] + digits[..., place]
            fits, first = fits & (along < side), first + len(sizes)
        return logits.masked_fill(~fits, NEVER)

    # Probabilities

    def log_probs(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """log p(token | h) in nats, float32 [...], of hidden states [..., D] and tokens int64 [...]."""
        digits = self.digits(self._fitting(hidden, tokens))
        found = []
        for factor in range(len(self.factors)):
            logits = self.factor_logits(hidden, digits[..., :factor])
            target = digits[..., factor].reshape(-1)
            found.append(
                -F.cross_entropy(logits.reshape(-1, logits.shape[-1]), target, reduction="none").view(tokens.shape)
            )
        return torch.stack(found).sum(0)

    def loss(self, hidden: Tensor, tokens: Tensor, width: Tensor | float | None = None) -> Tensor:
        """Mean cross entropy in nats, a scalar; with `width` (cells of the map) that of smoothed targets."""
        if width is None:
            return -self.log_probs(hidden, tokens).mean()
        check_width(width)
        tokens = self._fitting(hidden, tokens)
        check_range("token", tokens, self.size)
        return self.smoothed(hidden, tokens, torch.as_tensor(width, device=hidden.device)).mean()

    def smoothed(self, hidden: Tensor, tokens: Tensor, width: Tensor) -> Tensor:
        """Cross entropy [...] in nats with smoothed targets: an unbiased estimate, for which one row is drawn."""
        raise NotImplementedError

    def distributions(self, hidden: Tensor, tokens: Tensor) -> list[Tensor]:
        """What an entropy coder needs to write `tokens`: for each factor its probabilities [..., n], given the digits
        before. To read them back, take `factor_logits` digit by digit."""
        digits = self.digits(self._fitting(hidden, tokens))
        return [self.factor_logits(hidden, digits[..., :f]).softmax(-1) for f in range(len(self.factors))]

    def all_log_probs(self, hidden: Tensor) -> Tensor:
        """log p of every code, float32 [..., K]: for pictures and small maps, since it follows every path."""
        rows = hidden.reshape(-1, 1, hidden.shape[-1])
        total = hidden.new_zeros(len(rows), 1, dtype=torch.float32)
        before = torch.zeros(len(rows), 1, 0, dtype=torch.long, device=hidden.device)
        for n in self.factors:
            paths = before.shape[1]
            logits = self.factor_logits(rows.expand(-1, paths, -1), before)
            total = (total[..., None] + logits.log_softmax(-1)).flatten(1)
            choice = torch.arange(n, device=hidden.device).repeat(paths).view(1, -1, 1).expand(len(rows), -1, -1)
            before = torch.cat([before.repeat_interleave(n, 1), choice], -1)
        places = self._number(self.digits(torch.arange(self.size, device=hidden.device)))
        return total[:, places].view(*hidden.shape[:-1], self.size)

    # Sampling

    def sample(
        self,
        hidden: Tensor,
        temperature: float = 1.0,
        top_p: float = 1.0,
        generator: torch.Generator | None = None,
        *,
        without: Tensor | None = None,
        guidance: float = 1.0,
    ) -> Tensor:
        """Tokens int64 [...] drawn for hidden states [..., D]: each digit from its softmax.

        temperature  divides the logits; 0 takes the likeliest digit
        top_p        keeps the likeliest digits that together have this probability, of each factor
        without      hidden states of the same model without the condition, for guidance
        guidance     logits are without + guidance * (with - without): 1 is the condition alone, more follow it closer

        Where logits are NaN or infinite nothing can be drawn. On the CPU that is an error. On a GPU the token is -1,
        since asking would make the host wait.
        """
        shape = (*hidden.shape[:-1], len(self.factors))
        uniform = torch.rand(shape, generator=generator, device=hidden.device)
        return self.pick(hidden, uniform, temperature, top_p, without=without, guidance=guidance)

    def pick(
        self,
        hidden: Tensor,
        uniform: Tensor,
        temperature: float = 1.0,
        top_p: float = 1.0,
        *,
        without: Tensor | None = None,
        guidance: float = 1.0,
    ) -> Tensor:
        """`sample` with its random numbers given: uniform in [0, 1), [..., F]."""
        check_drawing(temperature, top_p, guidance)
        if without is None and guidance != 1:
            raise ValueError(
                f"guidance={guidance!r} needs without=, the hidden states of the same model without the condition"
            )
        if without is not None and without.shape != hidden.shape:
            raise ValueError(
                f"without= of shape {tuple(without.shape)} must be as the hidden states are: {tuple(hidden.shape)}"
            )
        sound = torch.ones(hidden.shape[:-1], dtype=torch.bool, device=hidden.device)
        before = torch.zeros(*hidden.shape[:-1], 0, dtype=torch.long, device=hidden.device)
        for factor in range(len(self.factors)):
            logits = self.factor_logits(hidden, before)
            if without is not None:
                plain = self.factor_logits(without, before)
                logits = torch.where(logits > NEVER / 2, plain + guidance * (logits - plain), NEVER)
            sound = sound & logits.isfinite().all(-1)
            digit = choose(logits, uniform[..., factor], temperature, top_p)
            before = torch.cat([before, digit[..., None]], -1)
        tokens = torch.where(sound, self.tokens(before), -1)
        check_drawn(tokens)
        return tokens


class FlatHead(Head):
    """One softmax over all codes: K x D weights, and K logits a token.

    dim       width of the hidden states
    grid      the map, or the number of codes; only label smoothing looks at it
    code_dim  if given, the head is tied to codes of so many dimensions: a hidden state is mapped to a point of their
              space, and a logit is its product with the code. Give the codes by `set_codes`.
    """

    codes_KD: Tensor

    def __init__(self, dim: int, grid: Grid | int, *, code_dim: int | None = None) -> None:
        size = grid.size if isinstance(grid, Grid) else grid
        super().__init__(dim, size, ((size,),))
        check_widths(code_dim=code_dim)
        self.map = Neighbors(grid if isinstance(grid, Grid) else Grid(grid))
        self.tied = code_dim is not None
        self.out = nn.Linear(dim, code_dim if code_dim is not None else size, bias=code_dim is None)
        if code_dim is not None:
            self.bias_K = nn.Parameter(torch.zeros(size))
            self.register_buffer("codes_KD", torch.zeros(size, code_dim))
        self.given = False  # whether there are codes yet

    @property
    def takes_codes(self) -> bool:
        return self.tied

    @torch.no_grad()
    def set_codes(self, codes_KD: Tensor) -> None:
        """Tie the head to these codes [K, code_dim], scaled to a mean square of 1."""
        check_takes_codes(self.takes_codes)
        self.codes_KD.copy_(scaled_codes(codes_KD, *self.codes_KD.shape))
        self.given = True

    def _load_from_state_dict(self, *state: Any) -> None:
        self.given = True
        super()._load_from_state_dict(*state)

    def factor_logits(self, hidden: Tensor, before: Tensor) -> Tensor:
        if self.tied and not self.given:
            raise RuntimeError(NO_CODES)
        out = self.out(hidden)
        return (F.linear(out, self.codes_KD, self.bias_K) if self.tied else out).float()

    def smoothed(self, hidden: Tensor, tokens: Tensor, width: Tensor) -> Tensor:
        logits = self.factor_logits(hidden, tokens[..., None][..., :0])
        coords = self.map.grid.unflatten(tokens)
        drawn: list[Tensor] = []
        for axis in range(self.map.grid.ndim - 1):  # the last axis is summed over in full
            drawn.append(inverse(self.map.weights(axis, coords, drawn, width), torch.rand_like(logits[..., 0])))
        last = self.map.weights(len(drawn), coords, drawn, width)
        first = self.map.grid.flatten([*drawn, torch.zeros_like(tokens)])
        codes = (first[..., None] + torch.arange(last.shape[-1], device=tokens.device)).clamp(max=self.size - 1)
        return logits.logsumexp(-1) - (last * logits.gather(-1, codes)).sum(-1)


class MapHead(Head):
    """One softmax for each axis of the map, each given the place on the axes before: a row, then a column of it.

    dim     width of the hidden states
    grid    the map of the codes, of one to three axes: `Grid((512, 512))`, or `quantizer.maps[0].neighborhood.grid`. A
            hexagonal map has rows and columns, too.
    splits  coarse-to-fine: for each axis the sizes of its digits, such as ((16, 32), (16, 32)) of a map of 512 x 512,
            which picks one of 16 blocks of rows first. An axis by itself, (512,), is not split.
            A line with splits is any factorization of token numbers: `MapHead(dim, 2**18, splits=[(64, 4096)])` takes
            the first 6 bits, then the other 12.
    hidden  width of the MLPs below; dim if not given
    code_dim  if given, the head knows the codes, which have so many dimensions. Give them by `set_codes`.

    Each factor has a small MLP of its own. From the second on, the hidden state is first scaled and shifted by each of
    the digits before, so that a column is predicted for the row that was chosen:

        x = (1 + S[digit]) * h + B[digit],   y_f = norm(x + MLP_f(norm(x))),   logits_f = W_f y_f

    The last digit settles the code. With codes its logits say, too, how well the code at that place fits, so that codes
    that are alike are learned together wherever they lie on the map:

        logits_F[place] = W_F[place] y_F + <Q y_F, features(code[place])>
    """

    def __init__(
        self,
        dim: int,
        grid: Grid | int,
        *,
        splits: Sequence[Sequence[int]] | None = None,
        hidden: int | None = None,
        code_dim: int | None = None,
    ) -> None:
        grid = grid if isinstance(grid, Grid) else Grid(grid)
        super().__init__(dim, grid, splits if splits is not None else [(n,) for n in grid.shape])
        check_widths(hidden=hidden, code_dim=code_dim)
        self.map = Neighbors(grid)
        self.embed = nn.ModuleList(nn.Embedding(n, 2 * dim) for n in self.factors[:-1])  # scales and shifts
        self.mix = nn.ModuleList(Mix(dim, hidden or dim) for _ in self.factors)
        self.out = nn.ModuleList(nn.Linear(dim, n) for n in self.factors)
        paths = math.prod(self.factors[:-1])
        self.fit = CodeFit(dim, code_dim, paths, self.factors[-1]) if code_dim is not None else None

    @property
    def takes_codes(self) -> bool:
        return self.fit is not None

    @torch.no_grad()
    def set_codes(self, codes_KC: Tensor) -> None:
        """Take the codes [K, code_dim], scaled to a mean square of 1."""
        check_takes_codes(self.takes_codes)
        assert self.fit is not None
        held = self.fit.codes_PnC
        scaled_KC = scaled_codes(codes_KC, self.size, held.shape[-1])
        places = self._number(self.digits(torch.arange(self.size)))
        held.flatten(0, 1)[places.to(held.device)] = scaled_KC.to(held)
        self.fit.given = True

    def factor_logits(self, hidden: Tensor, before: Tensor) -> Tensor:
        factor = before.shape[-1]
        for embed, digit in zip(self.embed, before.unbind(-1)):
            scale, shift = embed(digit).chunk(2, -1)
            hidden = (1 + scale) * hidden + shift
        hidden = self.mix[factor](hidden)
        logits = self.out[factor](hidden)
        if self.fit is not None and not self.fit.given:
            raise RuntimeError(NO_CODES)
        if self.fit is not None and factor == len(self.factors) - 1:
            logits = logits + self.fit(hidden, self._number(before))
        return self._mask(logits.float(), before)

    def smoothed(self, hidden: Tensor, tokens: Tensor, width: Tensor) -> Tensor:
        coords, loss = self.grid.unflatten(tokens), torch.zeros(tokens.shape, device=tokens.device)
        axes: list[Tensor] = []
        before = tokens[..., None][..., :0]
        for axis, sizes in enumerate(self.splits):
            weights = self.map.weights(axis, coords, axes, width)  # of the places that the digits so far allow
            weights = F.pad(weights, (0, math.prod(sizes) - weights.shape[-1]))
            along = torch.zeros_like(tokens)
            for n in sizes:
                weights = weights.unflatten(-1, (n, -1))
                target = weights.sum(-1)
                loss = loss - (target * self.factor_logits(hidden, before).log_softmax(-1)).sum(-1)
                digit = inverse(target, torch.rand_like(loss))
                chosen = digit[..., None, None].expand(*digit.shape, 1, weights.shape[-1])
                weights = weights.gather(-2, chosen).squeeze(-2)
                weights = weights / weights.sum(-1, keepdim=True)
                before, along = torch.cat([before, digit[..., None]], -1), along * n + digit
            axes.append(along)
        return loss
