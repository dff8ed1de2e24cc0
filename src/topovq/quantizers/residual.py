"""ResidualVQ: quantizers in a row, each of which quantizes what the ones before it left over."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Self

import torch
from torch import Tensor, nn

from topovq.codebook import Codebook, Turn
from topovq.ops.bound import counted
from topovq.ops.direct import in_backward, refuse_transforms
from topovq.ops.snapshot import held
from topovq.pretrained import HubModule
from topovq.quantizers.arguments import ADVICE, FORWARD_ADVICE, RESIDUAL_ADVICE, argument_names, refuse_arguments
from topovq.quantizers.beam import beam_search
from topovq.quantizers.dropout import Dropout
from topovq.quantizers.extras import Extras
from topovq.quantizers.gradient import REDUCTION, REDUCTION_BEFORE, GradientVQ
from topovq.quantizers.kohonen import KohonenVQ, as_saved, follows_gradient, neighborhood_name
from topovq.quantizers.layout import Layout
from topovq.quantizers.quantizer import Quantizer
from topovq.quantizers.results import Quantized
from topovq.quantizers.rotation import reparameterize
from topovq.quantizers.soft import SoftKohonenVQ

QUANTIZERS: dict[str, type[KohonenVQ]] = {"kohonen": KohonenVQ, "gradient": GradientVQ, "soft": SoftKohonenVQ}
DIVEQ = {"ema_update": False, "learnable_codebook": True, "route_gradients_to_input": False, "commitment_weight": 0.0}
DIVEQ_VARIANCE = 5e-3


class ResidualVQ(Layout, Quantizer, HubModule):
    """`quantized, indices, losses = ResidualVQ(dim, codebook_size, num_quantizers=4)(x)`.

    indices get one more axis, last: one token per quantizer, -1 where it was dropped; losses is [quantizers].
    However many quantizers there are, x gets the gradient of the output once.

    codebook_size     one size, or one for each quantizer (then num_quantizers may be left out)
    codebook_dim      x is projected to it before the first quantizer, and back after the last
    quantizer         "kohonen", "gradient" or "soft"; all further options go to each of them
    shared_codebook   one codebook for all: it learns from all that they quantized, in one update
    quantize_dropout  in training only the first few quantizers are used, at least quantize_dropout_cutoff_index + 1,
                      and a multiple of quantize_dropout_multiple_of
    beam_size, eval_beam_size, beam_score_quantizer_weights   choose tokens together (beam.py), in training and in
                      evaluation; the weights say how much the error after each quantizer counts
    quant_grad_frac   the share of a quantizer's gradient that later quantizers see in what it left over
    diveq             codes that are parameters, moved by the gradient of the output (directional.py)
    """

    def __init__(
        self,
        dim: int,
        codebook_size: int | Sequence[int],
        num_quantizers: int | None = None,
        *,
        codebook_dim: int | None = None,
        quantizer: str = "kohonen",
        shared_codebook: bool = False,
        quantize_dropout: bool = False,
        quantize_dropout_cutoff_index: int = 0,
        quantize_dropout_multiple_of: int = 1,
        beam_size: int | None = None,
        eval_beam_size: int | None = None,
        beam_score_quantizer_weights: Sequence[float] | None = None,
        quant_grad_frac: float = 0.0,
        diveq: bool = False,
        channel_last: bool = True,
        accept_image_fmap: bool = False,
        accept_3d_fmap: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(dim, channel_last, accept_image_fmap, accept_3d_fmap)
        sizes = layer_sizes(codebook_size, num_quantizers)
        if quantizer not in QUANTIZERS:
            choices = ", ".join(map(repr, QUANTIZERS))
            raise ValueError(f"quantizer={quantizer!r} is unknown; choose one of {choices}")
        kind = QUANTIZERS[quantizer]
        takers = kind, KohonenVQ, Extras
        taken = set(argument_names(*takers)) - RESIDUAL_ADVICE.keys()
        others = {name: options.pop(name) for name in [*options] if name not in taken}
        refuse_arguments(type(self).__name__, others, {**ADVICE, **RESIDUAL_ADVICE}, type(self), *takers)
        if shared_codebook and len(set(sizes)) > 1:
            raise ValueError(f"shared_codebook=True needs one size for all quantizers, got codebook_size={sizes}")
        if beam_size is not None and quantizer == "soft":
            raise ValueError(f"beam_size={beam_size!r}: quantizer='soft' mixes codes in training and chooses none")
        if not 0 <= quant_grad_frac <= 1:
            raise ValueError(f"quant_grad_frac={quant_grad_frac!r} must be from 0 to 1")
        weights = [1.0] * len(sizes) if beam_score_quantizer_weights is None else list(beam_score_quantizer_weights)
        if len(weights) != len(sizes):
            raise ValueError(f"beam_score_quantizer_weights={weights} must be {len(sizes)} numbers, one per quantizer")
        self.codebook_dim = dim if codebook_dim is None else codebook_dim
        self.codebook_sizes = sizes
        self.shared_codebook = shared_codebook
        self.dropout: Dropout | None = None
        if quantize_dropout:
            self.dropout = Dropout(len(sizes), quantize_dropout_cutoff_index, quantize_dropout_multiple_of)
        self.beam_size = beam_size
        self.eval_beam_size = beam_size if eval_beam_size is None else eval_beam_size
        self.beam_weights = weights
        self.diveq = diveq
        self.quant_grad_frac = 1.0 if diveq else quant_grad_frac
        self.project_in: nn.Module = nn.Identity()
        self.project_out: nn.Module = nn.Identity()
        if self.codebook_dim != dim:
            self.project_in, self.project_out = nn.Linear(dim, self.codebook_dim), nn.Linear(self.codebook_dim, dim)
        options = {**options, **DIVEQ} if diveq else options
        if kind is GradientVQ:
            options = {**REDUCTION, **options}
            (getattr(self, "_hub_mixin_config", None) or {}).update(neighbor_reduction=options["neighbor_reduction"])
        if kind is KohonenVQ and not follows_gradient(options):
            reach = [options.get(name) for name in ("neighborhood", "tau", "radius", "schedule")]
            (getattr(self, "_hub_mixin_config", None) or {}).update(neighborhood=neighborhood_name(*reach))
        self.layers = nn.ModuleList(kind(self.codebook_dim, size, **options) for size in sizes)
        if shared_codebook:
            for layer in self.quantizers[1:]:
                layer.codebooks = self.quantizers[0].codebooks
            with self.quantizers[0].accumulate():
                pass  # makes the buffer that every forward will need, so that no address changes later

    @classmethod
    def _from_pretrained(cls, **arguments: Any) -> Self:
        return super()._from_pretrained(**residual_as_saved(arguments))

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        lens: Tensor | None = None,
        freeze_codebook: bool | None = None,
        *,
        return_all_codes: bool = False,
        sample_codebook_temp: float | None = None,
        beam_size: int | None = None,
        rand_quantize_dropout_fixed_seed: int | None = None,
        dropped_after: Tensor | None = None,
        **unsupported: Any,
    ) -> Quantized | tuple[Tensor, Tensor, Tensor, Tensor]:
        """Quantize x, as KohonenVQ.forward does, to a Quantized.

        return_all_codes  the codes of each quantizer, fourth, as get_codes_from_indices gives them
        dropped_after     int64, 0-dim: the last quantizer to use, instead of one that is drawn
        """
        if unsupported:
            refuse_arguments(type(self).__name__ + ".forward", unsupported, FORWARD_ADVICE, self.forward)
        self._check_input(x)
        z = self._channels_to_last(x)
        mask = self._checked_mask(mask, lens, z)
        z = z if mask is None else torch.where(mask[..., None], z, 0)
        z = self.project_in(z)
        frozen = self.quantizers[0].freeze_codebook if freeze_codebook is None else freeze_codebook
        learns = self.training and not frozen
        if learns and not in_backward():
            self._start(z, mask)
        last = dropped_after
        if self.dropout is not None and self.training and last is None:
            last = self.dropout.draw(z.device, rand_quantize_dropout_fixed_seed)
        beams = (self.beam_size if self.training else self.eval_beam_size) if beam_size is None else beam_size
        chosen: Tensor | None = None
        if beams is not None and beams > 1:
            codes = self._searched(z, learns)
            tokens_NL = beam_search(self.quantizers, codes, z.detach().flatten(0, -2), beams, self.beam_weights, last)
            chosen = tokens_NL.view(*z.shape[:-1], len(self.layers))
        total, tokens, losses = self._through_layers(z, mask, last, chosen, freeze_codebook, sample_codebook_temp)
        total = reparameterize(z, total, DIVEQ_VARIANCE) if self.diveq and self.training else total
        total = self.project_out(total)
        total = total if mask is None else torch.where(mask[..., None], total, 0)
        made = Quantized(self._channels_back(total), torch.stack(tokens, -1), torch.stack(losses))
        return (*made, self.get_codes_from_indices(made.indices)) if return_all_codes else made

    @torch.no_grad()
    def _start(self, z: Tensor, mask: Tensor | None) -> None:
        """Let codes that still have no start take it, those of each quantizer from what the ones before leave over.

        All of them, and before anything is drawn or searched: so the first forward is like any other, and like itself
        where activation checkpointing runs it again.
        """
        books = self.books()
        for book in books:
            book.settle()
        if all(book.is_initialized for book in books):
            return
        refuse_transforms(type(self).__name__)
        left, keep_N = z.detach(), None if mask is None else mask.flatten()
        for vq in self.quantizers:
            book = vq.codebook_of(0)
            x_ND = vq.project_in(left).flatten(0, -2)
            x_ND = nn.functional.normalize(x_ND, dim=1) if book.unit_length else x_ND
            if not book.is_initialized:
                book.start(x_ND, keep_N)
            left = left - vq.project_out(book.codes[book.search(x_ND)].to(x_ND.dtype)).view_as(left)

    def _searched(self, z: Tensor, learns: bool) -> list[Tensor]:
        """The codes of each quantizer for a beam search: a second forward sees what the first one saw."""
        books = self.maps
        if not (learns and in_backward() and books[0].recall.forwards):
            return [held(book.codes) if learns else book.codes for book in books]
        x_ND = z.flatten(0, -2)
        place = books[0].recall.place(nn.functional.normalize(x_ND, dim=1) if books[0].unit_length else x_ND)
        return [book.recall.seen(place)[0] for book in books]

    def _through_layers(
        self,
        z: Tensor,
        mask: Tensor | None,
        last: Tensor | None,
        chosen: Tensor | None,
        freeze_codebook: bool | None,
        temperature: float | None,
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """(the sum of the codes, tokens and losses of each quantizer) for z [..., D]."""
        left, total = z, torch.zeros_like(z)
        tokens, losses, inputs, keeps = [], [], [], []
        shared = self.quantizers[0] if self.shared_codebook else None
        outer = shared is not None and shared.codebook_of(0).accumulating
        with nullcontext() if shared is None else shared.accumulate():
            for place, layer in enumerate(self.quantizers):
                keep = mask
                if last is not None:  # a quantizer that is dropped has all of its vectors masked
                    used = (last >= place).expand(z.shape[:-1])
                    keep = used if mask is None else used & mask
                quantized, indices, loss = layer.quantize_chosen(
                    left, keep, freeze_codebook, temperature, None if chosen is None else chosen[..., place]
                )
                inputs.append(left)
                keeps.append(keep)
                passed = self.quant_grad_frac
                part = quantized.detach()
                left = left - (passed * quantized + (1 - passed) * part if passed else part)
                total = total + quantized
                tokens.append(indices)
                losses.append(loss)
        if shared is not None and self.training and not outer:
            frozen = shared.freeze_codebook if freeze_codebook is None else freeze_codebook
            if not frozen and not in_backward():
                learn_from_all(shared, inputs, keeps)
        if self.quantizers[0].output_moves_codes:
            return total, tokens, losses
        # Each quantizer hands its output's gradient on to z, less what the ones before took from what they left over.
        # Their sum over what they add up to is what one quantizer's would be.
        count = len(self.layers) if last is None else last + 1
        kept = 1 - self.quant_grad_frac
        times = count if kept == 1 else (1 - kept**count) / (1 - kept)
        value = total.detach()
        return value + (total - value) / times, tokens, losses

    # Tokens

    def get_codes_from_indices(self, indices: Tensor) -> Tensor:
        """Codes of each quantizer, [quantizers, ...] in the layout of one; zeros for a token of -1, or for none."""
        codes = [vq.get_codes_from_indices(tokens) for vq, tokens in self._with_tokens(indices)]
        codes += [torch.zeros_like(codes[0])] * (len(self.layers) - len(codes))
        return torch.stack([self._channels_back(part) for part in codes])

    def get_output_from_indices(self, indices: Tensor) -> Tensor:
        """What `forward` returned as `quantized` for these tokens [..., quantizers].

        Fewer tokens than quantizers are those of the first ones. A token of -1 adds nothing.
        """
        parts = [vq.get_output_from_indices(tokens) for vq, tokens in self._with_tokens(indices)]
        total = torch.zeros_like(parts[0])
        for part in parts:  # added in the order of `forward`, so that both agree bit for bit
            total = total + part
        masked = (indices < 0).all(-1, keepdim=True)
        return self._channels_back(torch.where(masked, 0, self.project_out(total)))

    def coords(self, indices: Tensor) -> Tensor:
        """Places of tokens on the maps, int64 [..., quantizers, grid axes]."""
        return torch.stack([vq.coords(tokens) for vq, tokens in self._with_tokens(indices)], -2)

    def _with_tokens(self, indices: Tensor) -> list[tuple[KohonenVQ, Tensor]]:
        if not indices.ndim or not 1 <= indices.shape[-1] <= len(self.layers):
            raise ValueError(
                f"tokens of shape {tuple(indices.shape)} must end in {len(self.layers)}, the number of quantizers, "
                "or in fewer"
            )
        return list(zip(self.quantizers, indices.unbind(-1)))

    # The codebooks

    @property
    def quantizers(self) -> list[KohonenVQ]:
        return [layer for layer in self.layers if isinstance(layer, KohonenVQ)]

    @property
    def maps(self) -> list[Codebook]:
        return [vq.codebook_of(0) for vq in self.quantizers]

    @property
    def skipped(self) -> Tensor:
        """As in every quantizer; a vector is counted where it came in, by the first of the row."""
        return self.maps[0].skipped

    @property
    def num_quantizers(self) -> int:
        return len(self.layers)

    @property
    def codebooks(self) -> Tensor | tuple[Tensor, ...]:
        """[quantizers, K, D], or [K, D] of each in a tuple where sizes differ."""
        codes = tuple(vq.codebook for vq in self.quantizers)
        return codes if len(set(self.codebook_sizes)) > 1 else torch.stack(codes)

    @property
    def codebook(self) -> Tensor | tuple[Tensor, ...]:
        return self.codebooks

    # Loading

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Layers saved before there was one projection for all have one each: then so has this one, from now on."""
        if f"{prefix}layers.0.project_in.weight" in state and isinstance(self.project_in, nn.Linear):
            weight = self.project_in.weight
            for layer in self.quantizers:
                layer.dim = self.dim
                layer.project_in = nn.Linear(self.dim, self.codebook_dim).to(weight)
                layer.project_out = nn.Linear(self.codebook_dim, self.dim).to(weight)
            self.project_in, self.project_out = nn.Identity(), nn.Identity()
        super()._load_from_state_dict(state, prefix, *rest)


def residual_as_saved(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a layer that was saved some time ago, as they were meant then."""
    kind = arguments.get("quantizer", "kohonen")
    if kind == "kohonen":
        return as_saved(arguments)
    return {**REDUCTION_BEFORE, **arguments} if kind == "gradient" else arguments


def layer_sizes(codebook_size: int | Sequence[int], num_quantizers: int | None) -> tuple[int, ...]:
    """The size of each quantizer's codebook."""
    if num_quantizers is not None and (not isinstance(num_quantizers, int) or num_quantizers < 1):
        raise ValueError(f"num_quantizers={num_quantizers!r} must be an int of at least 1")
    if isinstance(codebook_size, Sequence):
        if not codebook_size or num_quantizers not in (None, len(codebook_size)):
            raise ValueError(
                f"codebook_size={codebook_size!r} is {len(codebook_size)} sizes for num_quantizers={num_quantizers!r}: "
                "give one size for each quantizer, and leave num_quantizers out"
            )
        return tuple(codebook_size)
    if num_quantizers is None:
        raise ValueError(f"num_quantizers is missing beside codebook_size={codebook_size!r}: give the number of layers")
    return (codebook_size,) * num_quantizers


def learn_from_all(vq: KohonenVQ, inputs: list[Tensor], keeps: list[Tensor | None]) -> None:
    """The update of a shared codebook, from the statistics that its quantizers put off; then dead codes revive."""
    book = vq.codebook_of(0)
    x_ND, valid_N = inputs[0], None
    if book.dead_threshold:
        x_ND = torch.cat([vq.project_in(x.detach()).flatten(0, -2) for x in inputs])
        x_ND = nn.functional.normalize(x_ND, dim=1) if book.unit_length else x_ND
        valid_N = counted(x_ND, held(book.codes), learns=True)
        if keeps[0] is not None:
            valid_N &= torch.cat([keep.flatten() for keep in keeps if keep is not None])
    nothing_KD = torch.zeros_like(book.codes.detach())
    turn = Turn(book.codes, book.step, learns=True, moves=True, valid_N=valid_N)
    book.finish(turn, x_ND, nothing_KD, nothing_KD[:, 0], book.skipped.new_zeros(()))
