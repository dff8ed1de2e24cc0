"""What the image quantizers of VQGAN's line share: codes in an `nn.Embedding`, feature maps [B, C, H, W] in and out.

Legend: B batch, C channels, H and W places, N = B * H * W vectors, K codes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from topovq.interop.library import Options, Replacement, given_first
from topovq.interop.states import fill
from topovq.quantizers.kohonen import KohonenVQ


class EmbeddingReplacement(Replacement, nn.Module):
    """KohonenVQ (`.vq`) where a quantizer with an `embedding` was, with the plain attributes and buffers of that."""

    like: Tensor
    used: Tensor  # int64 [U]: with a remap, the codes that tokens count
    re_embed: int
    unknown_index: int | str
    remap: str | None = None

    def __init__(self, theirs: nn.Module, settings: Options, options: Options, unit_length: bool = True) -> None:
        """`settings` are KohonenVQ's arguments. Without unit_length, codes compared by direction keep theirs."""
        super().__init__()
        found: Any = theirs
        weight: Tensor = found.embedding.weight
        settings = {"accept_image_fmap": True, "freeze_codebook": not weight.requires_grad, **settings}
        self.vq = KohonenVQ(weight.shape[1], weight.shape[0], **given_first(options, settings)).to(weight)
        book = self.vq.codebook_of(0)
        lengthless = (weight == 0).all(1).nonzero().flatten().tolist() if book.metric == "cosine" else []
        if lengthless:
            raise ValueError(
                f"{type(theirs).__name__}: codes {lengthless[:8]} are all zeros and have no direction to compare: give "
                "them values, such as small random ones"
            )
        book.unit_length = book.unit_length and unit_length
        fill(book, weight.detach(), None, None)
        for name, value in vars(theirs).items():
            if not name.startswith("_") and name not in ("training", "forward"):
                setattr(self, name, value)
        for name, value in theirs._buffers.items():
            if value is not None:
                self.register_buffer(name, value.detach().clone(), name not in theirs._non_persistent_buffers_set)
        self.remember(theirs, weight)

    @property
    def embedding(self) -> nn.Embedding:
        """The codes for those who read them there; they are no parameter, and a change of them is lost."""
        return nn.Embedding.from_pretrained(self.vq.codebook.detach().to(self.like.dtype))

    def get_codebook_entry(self, indices: Tensor, shape: tuple[int, ...] | None = None) -> Tensor:
        """Codes [..., C] of tokens; with shape = (B, H, W, C) as a feature map [B, C, H, W]."""
        codes = self._codes(self.unmap_to_all(indices))
        return codes if shape is None else codes.reshape(shape).permute(0, 3, 1, 2).contiguous()

    def _codes(self, tokens: Tensor) -> Tensor:
        codes_NC = self.vq.get_codes_from_indices(tokens.flatten()).to(self.like.dtype)
        return codes_NC.view(*tokens.shape, codes_NC.shape[1])

    def remap_to_used(self, inds: Tensor) -> Tensor:
        """Tokens that count only the codes in use, where there is a remap."""
        if self.remap is None:
            return inds
        known = self.used.numel()
        place_K = inds.new_full((self.vq.codebook_size,), known)
        place_K.scatter_reduce_(0, self.used.long(), torch.arange(known, device=inds.device), "amin")
        new = place_K[inds]
        if self.unknown_index == "random":
            return torch.where(new < known, new, torch.randint_like(new, self.re_embed))
        return torch.where(new < known, new, int(self.unknown_index))

    def unmap_to_all(self, inds: Tensor) -> Tensor:
        """The way back from `remap_to_used`; the extra token, if there is one, stands for the first code in use."""
        if self.remap is None:
            return inds
        if self.re_embed > self.used.numel():
            inds = torch.where(inds < self.used.numel(), inds, 0)
        return self.used.long()[inds]

    def restored(self) -> nn.Module:
        own = {name: value for name, value in self.state_dict().items() if name in self._buffers}
        return self.remembered().filled({"embedding.weight": self.vq.codebook, **own}, self.like, self.training)


class LegacyReplacement(EmbeddingReplacement):
    """KohonenVQ where taming's VectorQuantizer2 was, or diffusers' VectorQuantizer, which descends from it.

    The loss is the commitment term alone: the codebook term of theirs moved the codes, which now Kohonen's rule does.
    """

    sane_index_shape: bool

    def __init__(
        self, theirs: nn.Module, options: Options, settings: Options | None = None, unit_length: bool = True
    ) -> None:
        found: Any = theirs
        # "legacy" has beta on the codebook term, where it does not reach the encoder.
        weight = 1.0 if found.legacy else found.beta
        super().__init__(theirs, {"commitment_weight": weight, **(settings or {})}, options, unit_length)

    def forward(
        self, z: Tensor, temp: float | None = None, rescale_logits: bool = False, return_logits: bool = False
    ) -> tuple[Tensor, Tensor, tuple[Tensor, None, Tensor]]:
        """(quantized [B, C, H, W], loss, (perplexity, None, tokens)).

        Tokens are [B, H, W] if sane_index_shape, else flat: [N], and [N, 1] with a remap.
        """
        if temp not in (None, 1.0) or rescale_logits or return_logits:
            raise ValueError(
                f"temp={temp!r}, rescale_logits={rescale_logits!r} and return_logits={return_logits!r} are for Gumbel "
                "quantizers: leave them out"
            )
        quantized, tokens_BHW, loss = self.vq(z)
        tokens = self.remap_to_used(tokens_BHW)
        if not self.sane_index_shape:
            tokens = tokens.flatten() if self.remap is None else tokens.reshape(-1, 1)
        return quantized.contiguous(), loss, (self.vq.perplexity, None, tokens)


def entropies(logits_NK: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """(mean entropy of a vector's soft choice, entropy of the mean choice), for losses that want few and many codes."""
    log_probs_NK = (logits_NK / temperature).log_softmax(1)
    probs_NK = log_probs_NK.exp()
    mean_K = probs_NK.mean(0)
    return -(probs_NK * log_probs_NK).sum(1).mean(), -(mean_K * (mean_K + 1e-5).log()).sum()


def has_embedding(module: nn.Module, dim: str = "e_dim") -> bool:
    """Whether `embedding` is a plain nn.Embedding of n_e codes."""
    found: Any = module
    return (
        type(found.embedding) is nn.Embedding
        and found.embedding.max_norm is None
        and found.embedding.weight.shape == (found.n_e, getattr(found, dim))
    )
