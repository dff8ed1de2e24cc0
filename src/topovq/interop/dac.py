"""DAC: `VectorQuantize` of descript's `dac` and `DacVectorQuantize` of transformers' DacModel.

Legend: B batch, C channels, D dimensions of a code (8), T time, K codes.
Replaced is the quantizer of each residual step. Its projections `in_proj` and `out_proj` stay the modules they were,
and so does the model around it, with the choice and the dropout of quantizers.
The search compares directions, x . w / |w|, and the output is the plain code w, whose length counts: the codes keep
their lengths here too, and move to the mean of the plain vectors that chose them.
commitment_loss is what it was (per sample [B] in descript's, a mean in transformers'). codebook_loss keeps its value
but has no gradient: it moved the codes, which now Kohonen's rule does. Where quantizers are dropped in training, the
codes of the dropped ones learn too, from the same residuals as the others.
"""

from __future__ import annotations

import copy
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from topovq.interop.library import Library, Options, Original, Replacement, holds
from topovq.interop.states import fill
from topovq.quantizers.kohonen import KohonenVQ


class Codes(nn.Module):
    """The codes of a KohonenVQ (`.vq`) as an nn.Embedding is used: `weight` [K, D], and tokens in, codes out."""

    like: Tensor

    def __init__(self, embedding: nn.Embedding, options: Options) -> None:
        super().__init__()
        weight = embedding.weight.detach()
        settings = {"channel_last": False, "metric": "cosine", "freeze_codebook": not embedding.weight.requires_grad}
        self.vq = KohonenVQ(weight.shape[1], weight.shape[0], **{**settings, **options}).to(weight)
        book = self.vq.codebook_of(0)
        book.unit_length = False
        fill(book, weight, None, None)
        # Follows .half() and the like, which the codes do not.
        self.register_buffer("like", weight.new_empty(0), persistent=False)

    @property
    def weight(self) -> Tensor:
        return self.vq.codebook

    def forward(self, tokens: Tensor) -> Tensor:
        """Codes [..., D] of tokens [...]."""
        return F.embedding(tokens, self.weight).to(self.like.dtype)


class DacReplacement(Replacement, nn.Module):
    """KohonenVQ (`.codebook.vq`) behind the interface of DAC's quantizer."""

    def __init__(self, theirs: nn.Module, options: Options) -> None:
        super().__init__()
        found: Any = theirs
        lengthless = (found.codebook.weight == 0).all(1).nonzero().flatten().tolist()
        if lengthless:
            raise ValueError(
                f"{type(theirs).__name__}: codes {lengthless[:8]} are all zeros and have no direction to compare: give "
                "them values, such as small random ones"
            )
        self.in_proj: nn.Module = found.in_proj
        self.out_proj: nn.Module = found.out_proj
        self.codebook = Codes(found.codebook, options)
        self.codebook_size: int = found.codebook.num_embeddings
        self.codebook_dim: int = found.codebook_dim
        # Without the projections, which are kept here.
        bare = copy.copy(theirs)
        bare._modules = {name: child if name == "codebook" else None for name, child in theirs._modules.items()}
        self.original = Original(bare)
        self.train(theirs.training)

    def forward(self, z_BCT: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """(quantized [B, C, T], commitment loss, codebook loss, tokens [B, T], the vectors searched for [B, D, T])."""
        z_BDT = self.in_proj(z_BCT)
        q_BDT, tokens_BT, _ = self.codebook.vq(z_BDT)
        loss = self._mean((z_BDT - q_BDT.detach()).square())
        return self.out_proj(q_BDT), loss, loss.detach(), tokens_BT, z_BDT

    def _mean(self, errors_BDT: Tensor) -> Tensor:
        return errors_BDT.mean((1, 2))

    def decode_latents(self, latents_BDT: Tensor) -> tuple[Tensor, Tensor]:
        """(codes [B, D, T], tokens [B, T]) of vectors [B, D, T]; nothing learns."""
        vectors_BTD = latents_BDT.transpose(1, 2)
        tokens_BT = self.codebook.vq.codebook_of(0).search(vectors_BTD.flatten(0, 1)).view(vectors_BTD.shape[:2])
        return self.decode_code(tokens_BT), tokens_BT

    def embed_code(self, embed_id: Tensor) -> Tensor:
        """Codes [..., D] of tokens [...]."""
        return self.codebook(embed_id)

    def decode_code(self, embed_id: Tensor) -> Tensor:
        """Codes [B, D, T] of tokens [B, T]."""
        return self.embed_code(embed_id).transpose(1, 2)

    def restored(self) -> nn.Module:
        codes = self.codebook
        module = self.remembered().filled({"codebook.weight": codes.weight}, codes.like, self.training)
        module.in_proj, module.out_proj = self.in_proj, self.out_proj
        return module


class TransformersDacReplacement(DacReplacement):
    """The same behind transformers' DacVectorQuantize, whose losses are means over the batch."""

    def _mean(self, errors_BDT: Tensor) -> Tensor:
        return errors_BDT.mean()


PARTS = ("in_proj", "out_proj", "codebook", "codebook_dim")


def _is_descripts(module: nn.Module) -> bool:
    return holds(module, (*PARTS, "codebook_size"), methods=("decode_latents", "decode_code", "embed_code"))


def _is_transformers(module: nn.Module) -> bool:
    return holds(module, PARTS, methods=("decode_latents",))


LIBRARIES = (
    Library("VectorQuantize of descript-audio-codec", "VectorQuantize", _is_descripts, DacReplacement),
    Library("DacVectorQuantize of transformers", "DacVectorQuantize", _is_transformers, TransformersDacReplacement),
)
