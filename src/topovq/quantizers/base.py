"""What every quantizer shares: layouts, masks, projections, heads, the gradient past the search, the loss.

Legend: B batch, C channels (= `dim`), N vectors, H heads, D = `codebook_dim` dimensions of a code, K codes.
A tensor changes its layout only here: [B, C, height, width] and friends become vectors [N, D] on the way in, and the
codes they chose become the same layout on the way out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from topovq.codebook import Codebook
from topovq.grid import Grid, check_range
from topovq.health import Health, as_health, together
from topovq.ops.quantize import Choice, quantize
from topovq.quantizers.rotation import rotate_to


class Quantized(NamedTuple):
    """What a quantizer returns; unpacks as `quantized, indices, loss`."""

    quantized: Tensor
    """The codes, in the layout and type of the input; 0 where masked."""
    indices: Tensor
    """int64, the shape of the input without its channels (with heads: one more axis, last); -1 where masked."""
    loss: Tensor
    """A scalar, its weight applied."""


pytree._register_namedtuple(Quantized, serialized_type_name="topovq.Quantized")  # so that torch.export.save knows it


class Quantizer(nn.Module):
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
    ) -> None:
        super().__init__()
        if accept_image_fmap and accept_3d_fmap:
            raise ValueError("accept_image_fmap and accept_3d_fmap exclude each other: choose the one your input has")
        if not 0 <= commitment_weight < math.inf:
            raise ValueError(f"commitment_weight={commitment_weight!r} must be a finite number of at least 0")
        self.dim = dim
        self.heads = heads
        self.codebook_dim = codebook_dim
        self.channel_last = channel_last
        self.accept_image_fmap = accept_image_fmap
        self.accept_3d_fmap = accept_3d_fmap
        self.commitment_weight = commitment_weight
        self.rotation_trick = rotation_trick
        self.freeze_codebook = freeze_codebook
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
        **unsupported: Any,
    ) -> Quantized:
        """Quantize x; in training mode the codebook moves by one update (unless frozen).

        x     [B, ..., C]; [B, C, n] with channel_last=False; [B, C, h, w] with accept_image_fmap=True;
              [B, C, d, h, w] with accept_3d_fmap=True
        mask  bool, the shape of x without its channels: False leaves a vector out of everything
        lens  int [B], for x of shape [B, n, C]: the same as a mask that is True for the first lens[b] vectors
        """
        if unsupported:
            refuse_arguments(type(self).__name__ + ".forward", unsupported, FORWARD_ADVICE)
        self._check_input(x)
        z = self._channels_to_last(x)
        mask = self._checked_mask(mask, lens, z)
        if mask is not None:  # whatever padding holds (NaN, say), neither counters nor gradients see it
            z = torch.where(mask[..., None], z, 0)
        shape = z.shape[:-1]
        z_NHD = self.project_in(z).reshape(-1, self.heads, self.codebook_dim)
        keep_N = None if mask is None else mask.reshape(-1)
        frozen = self.freeze_codebook if freeze_codebook is None else freeze_codebook
        if self.training and not frozen:
            refuse_transforms(type(self).__name__)

        parts = []
        if len(self.codebooks) == 1:  # heads share it: their vectors are one batch
            keep = None if keep_N is None else keep_N.repeat_interleave(self.heads)
            parts.append(self._quantize(self.codebook_of(0), z_NHD.reshape(-1, self.codebook_dim), keep, frozen))
        else:
            parts += [self._quantize(self.codebook_of(h), z_NHD[:, h], keep_N, frozen) for h in range(self.heads)]
        if len(parts) == 1:
            q, indices, loss = parts[0]
        else:
            q = torch.stack([part.quantized for part in parts], 1)
            indices = torch.stack([part.indices for part in parts], 1)
            loss = torch.stack([part.loss for part in parts]).mean()
        q = q.reshape(*shape, self.heads * self.codebook_dim)
        indices = indices.reshape(*shape, self.heads)

        q = self.project_out(q)
        if mask is not None:
            q = torch.where(mask[..., None], q, 0)
            indices = torch.where(mask[..., None], indices, -1)
        return Quantized(self._channels_back(q), indices[..., 0] if self.heads == 1 else indices, loss)

    def _quantize(self, book: Codebook, x_ND: Tensor, keep_N: Tensor | None, frozen: bool) -> Quantized:
        """Search, gather, learn, and let the gradient past: for one codebook."""
        book.settle()
        learns = self.training and not frozen
        recomputes = learns and in_backward()
        if book.unit_length:
            x_ND = nn.functional.normalize(x_ND, dim=1)
        valid_N = None
        if learns and not recomputes:
            if not book.is_initialized or book.dead_threshold:
                valid_N = x_ND.detach().isfinite().all(1)
                valid_N = valid_N if keep_N is None else valid_N & keep_N
            if not book.is_initialized:
                assert valid_N is not None
                book.initialize(x_ND.detach(), valid_N)
            if may_be_recomputed():
                book.remember()
        codes_KD = book.remembered()[0] if recomputes else book.codes
        stats = learns and (book.learnable or not recomputes)
        choice = quantize(x_ND, codes_KD, keep_N, book.metric, book.precision, stats=stats)
        loss = self.commitment_weight * choice.error
        codebook_loss = self._codebook_loss(book, x_ND, choice, keep_N, learns)
        loss = loss if codebook_loss is None else loss + codebook_loss
        if learns and not recomputes:
            book.learn(choice.sums_KD, choice.counts_K, choice.skipped)
            if valid_N is not None and book.dead_threshold and not book.accumulating:
                book.revive(x_ND.detach(), valid_N)
        q_ND = rotate_to(x_ND, choice.q_ND.detach()) if self.rotation_trick else choice.q_ND
        return Quantized(q_ND, choice.index_N, loss)

    def _codebook_loss(
        self, book: Codebook, x_ND: Tensor, choice: Choice, keep_N: Tensor | None, learns: bool
    ) -> Tensor | None:
        """What moves the codes where they are parameters; nothing here."""
        return None

    # Tokens

    def get_codes_from_indices(self, indices: Tensor) -> Tensor:
        """Codes of tokens, heads side by side, before the projection out; a token of -1 gives zeros."""
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
        book = self.codebooks[head if len(self.codebooks) > 1 else 0]
        assert isinstance(book, Codebook)
        return book

    def _books(self) -> list[Codebook]:
        return [self.codebook_of(h) for h in range(len(self.codebooks))]

    @property
    def codebook(self) -> Tensor:
        """The codes: [K, D], or [H, K, D] with separate codebooks. Assign to it to set them, statistics included."""
        codes = [book.codes for book in self._books()]
        return codes[0] if len(codes) == 1 else torch.stack(codes)

    @codebook.setter
    def codebook(self, codes: Tensor) -> None:
        books = self._books()
        expected = tuple(books[0].codes.shape) if len(books) == 1 else (len(books), *books[0].codes.shape)
        if tuple(codes.shape) != expected:
            raise ValueError(f"codes of shape {tuple(codes.shape)} do not fit: expected {expected}")
        for book, part in zip(books, [codes] if len(books) == 1 else list(codes)):
            book.set_codes(part)

    @property
    def codebook_size(self) -> int:
        return self.codebook_of(0).size

    @property
    def grid(self) -> Grid:
        return self.codebook_of(0).neighborhood.grid

    def freeze(self, indices: Tensor | Sequence[int] | None = None) -> None:
        """Stop these codes (default: all) from moving; they are still chosen."""
        self._set_frozen(indices, True)

    def unfreeze(self, indices: Tensor | Sequence[int] | None = None) -> None:
        """Let these codes (default: all) move again."""
        self._set_frozen(indices, False)

    def _set_frozen(self, indices: Tensor | Sequence[int] | None, value: bool) -> None:
        places = slice(None) if indices is None else torch.as_tensor(indices)
        if isinstance(places, Tensor):
            check_range("code", places, self.codebook_size)
        for book in self._books():
            book.frozen[places] = value

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Gradient accumulation: forwards within gather statistics; the first one outside moves the codes by all."""
        with ExitStack() as stack:
            for book in self._books():
                stack.enter_context(book.accumulate_updates())
            yield

    # Figures, over all ranks, without waiting for the device

    @property
    def perplexity(self) -> Tensor:
        """exp(entropy) of the running use of the codes, 0-dim; the mean over separate codebooks."""
        return torch.stack([book.perplexity() for book in self._books()]).mean()

    @property
    def usage(self) -> Tensor:
        """Share of codes chosen in the last 1/(1 - decay) updates, 0-dim; the mean over separate codebooks."""
        return torch.stack([book.usage() for book in self._books()]).mean()

    def read_health(self) -> Tensor:
        """The figures of `health()`, float32 [5] on the device: for those who cannot wait for it."""
        return together([book.read_health() for book in self._books()])

    def health(self) -> Health:
        """Usage, perplexity, dead codes (not chosen in the last 1/(1 - decay) updates) and drift: how far the
        codes moved since this was last asked, in units of their spread (nan the first time). Waits for the device."""
        return as_health(self.read_health().tolist())

    @property
    def skipped(self) -> Tensor:
        """How many vectors with NaN or infinity training has left out so far, int64, 0-dim."""
        return torch.stack([book.skipped for book in self._books()]).sum()

    @property
    def step(self) -> Tensor:
        """Codebook updates so far, int64, 0-dim."""
        return self.codebook_of(0).step

    # Layouts

    def _check_input(self, x: Tensor) -> None:
        if not x.is_floating_point():
            raise TypeError(f"x must hold floating-point vectors, got {x.dtype}")
        if self.accept_image_fmap or self.accept_3d_fmap:
            axes, layout = (
                (4, "[B, C, height, width]") if self.accept_image_fmap else (5, "[B, C, depth, height, width]")
            )
            if x.ndim != axes or x.shape[1] != self.dim:
                raise ValueError(f"x of shape {tuple(x.shape)} must be {layout} with C = dim = {self.dim}")
        elif not self.channel_last:
            if x.ndim < 2 or x.shape[1] != self.dim:
                raise ValueError(f"x of shape {tuple(x.shape)} must be [B, C, ...] with C = dim = {self.dim}")
        elif x.ndim < 2:
            raise ValueError(f"x of shape {tuple(x.shape)} must be [B, ..., C] with C = dim = {self.dim}")
        elif x.shape[-1] != self.dim:
            hint = ""
            if x.ndim in (4, 5) and x.shape[1] == self.dim:
                option = "accept_image_fmap" if x.ndim == 4 else "accept_3d_fmap"
                hint = f"; for feature maps with channels first use {option}=True"
            raise ValueError(f"x of shape {tuple(x.shape)} must end in dim = {self.dim}{hint}")

    def _channels_to_last(self, x: Tensor) -> Tensor:
        return x if self._keeps_channels_last else x.movedim(1, -1)

    def _channels_back(self, x: Tensor) -> Tensor:
        return x if self._keeps_channels_last else x.movedim(-1, 1)

    @property
    def _keeps_channels_last(self) -> bool:
        return self.channel_last and not (self.accept_image_fmap or self.accept_3d_fmap)

    def _checked_mask(self, mask: Tensor | None, lens: Tensor | None, z: Tensor) -> Tensor | None:
        if lens is not None:
            if mask is not None:
                raise ValueError("mask and lens exclude each other: give one")
            if z.ndim != 3 or lens.shape != z.shape[:1]:
                raise ValueError(
                    f"lens of shape {tuple(lens.shape)} needs x of [B, n, C] with one length per batch entry, "
                    f"got vectors of shape {tuple(z.shape)}"
                )
            return torch.arange(z.shape[1], device=z.device) < lens[:, None]
        if mask is not None and (mask.dtype != torch.bool or mask.shape != z.shape[:-1]):
            raise ValueError(
                f"mask of shape {tuple(mask.shape)} and {mask.dtype} must be bool of shape {tuple(z.shape[:-1])}, "
                "the shape of x without its channels"
            )
        return mask


def refuse_arguments(where: str, arguments: dict[str, Any], advice: dict[str, str]) -> None:
    name = next(iter(arguments))
    raise TypeError(
        f"{where}: {name}={arguments[name]!r} is not supported; {advice.get(name, 'it is no argument here')}"
    )


FORWARD_ADVICE = {
    "indices": "for a cross-entropy loss on given tokens, compare them with the `indices` this returns",
    "topk": "compute distances to `codebook` yourself for more than the closest code",
    "sample_codebook_temp": "codes are chosen by distance; SoftKohonenVQ has a temperature",
    "return_loss_breakdown": "the loss is commitment_weight times the commitment error, and nothing else",
    "codebook_transform_fn": "transform the codes and assign them to `codebook`",
    "ema_update_weight": "use mask to leave vectors out",
    "accum_ema_update": "use `with vq.accumulate():` around all forwards of an optimizer step but the last",
    "ema_update": "use freeze_codebook=True for a forward without an update",
}


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
