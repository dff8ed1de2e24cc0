"""What every quantizer shares: layouts, masks, projections, heads, the gradient past the search, the loss.

Legend: B batch, C channels (= `dim`), N vectors, H heads, D = `codebook_dim` dimensions of a code, K codes.
A tensor changes its layout only here: [B, C, height, width] and friends become vectors [N, D] on the way in, and the
codes they chose become the same layout on the way out.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from topovq.codebook import Codebook, Turn
from topovq.grid import check_range
from topovq.ops.candidates import sample
from topovq.ops.chosen import quantize_as
from topovq.ops.direct import refuse_onnx, refuse_transforms, transformed
from topovq.ops.quantize import Choice, quantize
from topovq.quantizers.arguments import FORWARD_ADVICE, refuse_arguments
from topovq.quantizers.closest import closest
from topovq.quantizers.extras import Extras
from topovq.quantizers.layout import Layout
from topovq.quantizers.orthogonal import orthogonality
from topovq.quantizers.quantizer import Quantizer
from topovq.quantizers.results import Ask, LossBreakdown, Part, Quantized, WeightLike, breakdown, choosing, mean, shares
from topovq.quantizers.rotation import reparameterize, rotate_to


class Layer(Layout, Quantizer):
    """Layouts, masks, projections and heads around one codebook (or one per head)."""

    def __init__(
        self,
        dim: int,
        codebooks: list[Codebook],
        *,
        codebook_dim: int,
        heads: int,
        channel_last: bool,
        accept_image_fmap: bool,
        accept_3d_fmap: bool,
        commitment_weight: float,
        rotation_trick: bool,
        freeze_codebook: bool,
        extras: Extras,
    ) -> None:
        super().__init__(dim, channel_last, accept_image_fmap, accept_3d_fmap)
        if not 0 <= commitment_weight < math.inf:
            raise ValueError(f"commitment_weight={commitment_weight!r} must be a finite number of at least 0")
        self.heads = heads
        self.codebook_dim = codebook_dim
        self.commitment_weight = commitment_weight
        self.rotation_trick = rotation_trick
        self.freeze_codebook = freeze_codebook
        self.extras = extras
        self.codebooks = nn.ModuleList(codebooks)
        inner = codebook_dim * heads
        self.project_in: nn.Module = nn.Linear(dim, inner) if inner != dim else nn.Identity()
        self.project_out: nn.Module = nn.Linear(inner, dim) if inner != dim else nn.Identity()

    # Forward

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        lens: Tensor | None = None,
        freeze_codebook: bool | None = None,
        *,
        sample_codebook_temp: float | None = None,
        topk: int | None = None,
        return_loss_breakdown: bool = False,
        ema_update: bool | None = None,
        accum_ema_update: bool = False,
        ema_update_weight: WeightLike = None,
        **unsupported: Any,
    ) -> Quantized | tuple[Tensor, Tensor, Tensor, LossBreakdown]:
        """Quantize x, to a Quantized; in training mode the codebook moves by one update (unless frozen).

        x     [B, ..., C]; [B, C, n] with channel_last=False; [B, C, h, w] with accept_image_fmap=True;
              [B, C, d, h, w] with accept_3d_fmap=True
        mask  bool, the shape of x without its channels: False leaves a vector out of everything
        lens  int [B], for x of shape [B, n, C]: the same as a mask that is True for the first lens[b] vectors
        As in vector-quantize-pytorch
            sample_codebook_temp   with stochastic_sample_codes, another temperature
            topk                   the k closest codes, without an update (closest.py)
            return_loss_breakdown  a LossBreakdown, fourth
            ema_update             False: the running means, and the codes that follow them, stay
            accum_ema_update       True: the statistics wait for the next forward without it
            ema_update_weight      how much of the update each code takes (weighting.py)
        """
        if unsupported:
            refuse_arguments(type(self).__name__ + ".forward", unsupported, FORWARD_ADVICE, self.forward)
        if topk is not None:
            return closest(self, x, mask, lens, topk)
        if ema_update is not None:
            follows = self.codebook_of(0).ema_update
            if ema_update and not follows:
                raise ValueError(
                    "ema_update=True: this layer (ema_update=False, or decay=1) has no running means to update"
                )
            freeze_codebook = freeze_codebook if ema_update or not follows else True
        ask = self._ask(freeze_codebook, sample_codebook_temp, ema_update_weight)
        with self.accumulate() if accum_ema_update else nullcontext():
            quantized, parts = self._forward(x, mask, lens, ask)
        return (*quantized, breakdown(parts)) if return_loss_breakdown else quantized

    def quantize_chosen(
        self,
        x: Tensor,
        mask: Tensor | None,
        freeze_codebook: bool | None,
        sample_codebook_temp: float | None,
        chosen: Tensor | None,
    ) -> Quantized:
        """`forward`, with codes that were chosen already, if any: for layers made of several quantizers."""
        ask = self._ask(freeze_codebook, sample_codebook_temp)
        return self._forward(x, mask, None, choosing(ask, chosen))[0]

    def _ask(self, freeze_codebook: bool | None, temperature: float | None, weight: WeightLike = None) -> Ask:
        frozen = self.freeze_codebook if freeze_codebook is None else freeze_codebook
        temperature = self.extras.sample_codebook_temp if temperature is None else temperature
        drawn = self.training and self.extras.stochastic_sample_codes
        return Ask(frozen, temperature if drawn else 0.0, weight=weight)

    def update_indices(self, x: Tensor, indices: Tensor, mask: Tensor | None = None) -> None:
        """One update, in training mode, as if `forward` had chosen these codes for x; -1 leaves a vector out."""
        if not self.training:
            raise RuntimeError("update_indices moves the codes, which only training mode does: call .train() first")
        with torch.no_grad():
            self._forward(x, mask, None, Ask(self.freeze_codebook, chosen=indices))

    update_ema_indices = update_indices

    def _forward(self, x: Tensor, mask: Tensor | None, lens: Tensor | None, ask: Ask) -> tuple[Quantized, list[Part]]:
        self._check_input(x)
        z = self._channels_to_last(x)
        mask = self._checked_mask(mask, lens, z)
        shape = z.shape[:-1]
        chosen_NH = None
        if ask.chosen is not None:
            chosen_NH = ask.chosen.reshape(*shape, self.heads)
            known = (chosen_NH >= 0).all(-1)
            mask = known if mask is None else mask & known
            chosen_NH = chosen_NH.reshape(-1, self.heads).clamp(min=0)
        if mask is not None:  # whatever padding holds (NaN, say), neither counters nor gradients see it
            z = torch.where(mask[..., None], z, 0)
        z = self.project_in(z)
        keep_N = None if mask is None else mask.reshape(-1)
        if self.training and not ask.frozen:
            refuse_transforms(type(self).__name__)
            refuse_onnx(type(self).__name__)

        # Each view that changes nothing would cost the host time, and the backward pass one more step.
        flat = z.ndim == 2 and self.heads == 1
        if len(self.codebooks) == 1:  # heads share it: their vectors are one batch
            keep = None if keep_N is None else keep_N.repeat_interleave(self.heads)
            ask = ask if chosen_NH is None else choosing(ask, chosen_NH.flatten())
            x_ND = z if flat else z.reshape(-1, self.codebook_dim)
            parts = [self._quantize(self.codebook_of(0), x_ND, keep, ask)]
        else:
            z_NHD = z.reshape(-1, self.heads, self.codebook_dim)
            asks = [choosing(ask, None if chosen_NH is None else chosen_NH[:, h]) for h in range(self.heads)]
            parts = [self._quantize(self.codebook_of(h), z_NHD[:, h], keep_N, asks[h]) for h in range(self.heads)]
        q = parts[0].q_ND if len(parts) == 1 else torch.stack([part.q_ND for part in parts], 1)
        indices = parts[0].index_N if len(parts) == 1 else torch.stack([part.index_N for part in parts], 1)
        if not flat:
            q = q.reshape(*shape, self.heads * self.codebook_dim)
            indices = indices.reshape(shape if self.heads == 1 else (*shape, self.heads))

        q = self.project_out(q)
        if mask is not None:
            q = torch.where(mask[..., None], q, 0)
            indices = torch.where(mask if self.heads == 1 else mask[..., None], indices, -1)
        loss = mean([self._loss(part) for part in parts])
        return Quantized(self._channels_back(q), indices, loss), parts

    def _loss(self, part: Part) -> Tensor:
        # torch.func.jvp makes float64 of a float times a float32 number, but not of a float times a float32 vector.
        if self.commitment_weight == 1:
            loss = part.error
        elif transformed():
            loss = (self.commitment_weight * part.error[None])[0]
        else:
            loss = self.commitment_weight * part.error
        loss = loss if part.codebook_loss is None else loss + part.codebook_loss
        if part.orthogonality is not None:
            loss = loss + self.extras.orthogonal_reg_weight * part.orthogonality
        return loss

    def _quantize(self, book: Codebook, x_ND: Tensor, keep_N: Tensor | None, ask: Ask) -> Part:
        """Search, gather, learn, and let the gradient past: for one codebook."""
        if book.unit_length:
            x_ND = nn.functional.normalize(x_ND, dim=1)
        turn = book.begin(x_ND, keep_N, self.training and not ask.frozen)
        keep_N = turn.keep_N
        stats = turn.moves or (turn.learns and isinstance(book.codes, nn.Parameter))
        index_N = ask.chosen
        if index_N is None and ask.temperature > 0:
            index_N = sample(x_ND, turn.codes_KD, ask.temperature, book.metric)
        if index_N is None:
            choice = quantize(x_ND, turn.codes_KD, keep_N, book.metric, book.precision, stats, turn.learns)
        else:
            choice = quantize_as(x_ND, turn.codes_KD, index_N, keep_N, stats, turn.learns)
        codebook_loss = self._codebook_loss(book, turn, x_ND, choice, keep_N)
        q_ND = self._past_the_search(book, turn, x_ND, choice)
        share_K = None if ask.weight is None or not turn.moves else shares(book, choice, ask.weight)
        book.finish(turn, x_ND, choice.sums_KD, choice.counts_K, choice.skipped, share_K)
        return Part(q_ND, choice.index_N, choice.error, codebook_loss, self._orthogonality(book, turn, choice))

    def _past_the_search(self, book: Codebook, turn: Turn, x_ND: Tensor, choice: Choice) -> Tensor:
        """The chosen codes, with the gradient that was asked for."""
        if not self.extras.route_gradients_to_input or (self.extras.directional_reparam and self.training):
            q_ND = choice.q_ND.detach()
            if book.learnable and turn.learns:
                q_ND = book.free_codes()[choice.index_N].to(x_ND.dtype)
            if not self.extras.route_gradients_to_input:
                return q_ND
            return reparameterize(x_ND, q_ND, self.extras.directional_reparam_variance)
        return rotate_to(x_ND, choice.q_ND.detach()) if self.rotation_trick else choice.q_ND

    def _orthogonality(self, book: Codebook, turn: Turn, choice: Choice) -> Tensor | None:
        """The penalty on the codes as they are after the update, which it sees in the next step."""
        if not (self.extras.orthogonal_reg_weight and turn.learns):
            return None
        active_K = choice.counts_K > 0 if self.extras.orthogonal_reg_active_codes_only else None
        return orthogonality(book.free_codes(), active_K, self.extras.orthogonal_reg_max_codes)

    def _codebook_loss(
        self, book: Codebook, turn: Turn, x_ND: Tensor, choice: Choice, keep_N: Tensor | None
    ) -> Tensor | None:
        """What moves the codes where they are parameters; nothing here."""
        return None

    # Tokens

    def get_codes_from_indices(self, indices: Tensor) -> Tensor:
        """Codes of tokens, heads side by side, before the projection out; zeros for a token of -1."""
        return self._channels_back(self._codes_of(indices))

    def get_output_from_indices(self, indices: Tensor) -> Tensor:
        """What `forward` returned as `quantized` for these tokens."""
        codes = self._codes_of(indices)
        masked = indices < 0 if self.heads == 1 else (indices < 0).all(-1)
        return self._channels_back(torch.where(masked[..., None], 0, self.project_out(codes)))

    def _codes_of(self, indices: Tensor) -> Tensor:
        if indices.dtype.is_floating_point or indices.dtype == torch.bool:
            raise TypeError(f"tokens must be integers, got {indices.dtype}")
        if self.heads > 1 and indices.shape[-1:] != (self.heads,):
            raise ValueError(f"tokens of shape {tuple(indices.shape)} must end in {self.heads}, the number of heads")
        check_range("token", indices, self.codebook_size, masked=True)
        indices = (indices[..., None] if self.heads == 1 else indices).long()
        codes = torch.stack([self.codebook_of(h).codes[indices[..., h].clamp(min=0)] for h in range(self.heads)], -2)
        codes = torch.where(indices[..., None] < 0, 0, codes).flatten(-2)
        weight = getattr(self.project_out, "weight", None)
        return codes if weight is None else codes.to(weight.dtype)

    def coords(self, indices: Tensor) -> Tensor:
        """Places of tokens on the map, int64 [..., grid axes]; -1 for masked ones."""
        check_range("token", indices, self.codebook_size, masked=True)
        return torch.where(indices[..., None] < 0, -1, self.grid.coords(indices.clamp(min=0)))

    # The codebook

    def codebook_of(self, head: int) -> Codebook:
        books = self.codebooks
        book = books[head if len(books) > 1 else 0]
        assert isinstance(book, Codebook)
        return book

    @property
    def maps(self) -> list[Codebook]:
        return [self.codebook_of(head) for head in range(self.heads)]

    @property
    def codebook(self) -> Tensor:
        """The codes: [K, D], or [H, K, D] with separate codebooks. Assign to it to set them, statistics included."""
        codes = [book.codes for book in self.books()]
        return codes[0] if len(codes) == 1 else torch.stack(codes)

    @codebook.setter
    def codebook(self, codes: Tensor) -> None:
        books = self.books()
        expected = tuple(books[0].codes.shape) if len(books) == 1 else (len(books), *books[0].codes.shape)
        if tuple(codes.shape) != expected:
            raise ValueError(f"codes of shape {tuple(codes.shape)} do not fit: expected {expected}")
        for book, part in zip(books, [codes] if len(books) == 1 else list(codes)):
            book.set_codes(part)

    @property
    def _codebook(self) -> SimpleNamespace:
        """The codebooks under vector-quantize-pytorch's names, to read: embed and embed_avg [H, K, D], cluster_size."""
        names = {"embed": "codes", "embed_avg": "sums", "cluster_size": "counts"}
        books = self.books()
        held = {
            theirs: [getattr(book, ours) for book in books] for theirs, ours in names.items() if hasattr(books[0], ours)
        }
        return SimpleNamespace(**{theirs: torch.stack(parts) for theirs, parts in held.items()})
