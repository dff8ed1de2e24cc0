"""rosinality's VQ-VAE-2 (vq-vae-2-pytorch): `Quantize`, twice in its VQVAE, and its state dict.

Legend: K codes, D dimensions.
It keeps embed [D, K], embed_avg [D, K] and cluster_size [K]. Codes that nothing chose lie at 1e5 to 1e6 there; they are
kept where they are, and the first update that reaches them brings them back among the others.
`diff`, the commitment error, and the straight-through gradient are what they were. The class is known by its name and
what it holds, since the repository is no package: a copy of the file works too.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from topovq.interop.library import Library, Options, Replacement, holds
from topovq.interop.states import Layout, State, below, export_statistics, statistics, with_codes
from topovq.quantizers.kohonen import KohonenVQ

ROSINALITY = Layout("rosinality's VQ-VAE-2", "embed", "embed_avg", "cluster_size")


def from_rosinality(state: State, *, prefix: str | None = None, **options: Any) -> KohonenVQ:
    """A KohonenVQ with the codes and statistics of one quantizer of rosinality's VQ-VAE-2, say prefix="quantize_t"."""
    own = below(state, ROSINALITY, prefix)
    codes_DK, sums_DK, counts_K = statistics(own, ROSINALITY, "[D, K]")
    return with_codes(codes_DK.T, None if sums_DK is None else sums_DK.T, counts_K, options)


class RosinalityReplacement(Replacement, nn.Module):
    """KohonenVQ (`.vq`) behind the interface of rosinality's Quantize."""

    like: Tensor

    def __init__(self, theirs: nn.Module, options: Options) -> None:
        super().__init__()
        found: Any = theirs
        self.vq = from_rosinality(theirs.state_dict(), prefix="", **{"decay": found.decay, "eps": found.eps, **options})
        self.dim: int = found.dim
        self.n_embed: int = found.n_embed
        self.remember(theirs, found.embed)

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(quantized [..., D], commitment error, tokens [...]) of vectors [..., D]."""
        quantized, tokens, loss = self.vq(input)
        return quantized, loss, tokens

    def embed_code(self, embed_id: Tensor) -> Tensor:
        """Codes [..., D] of tokens [...]."""
        return F.embedding(embed_id, self.vq.codebook).to(self.like.dtype)

    @property
    def embed(self) -> Tensor:
        return self.vq.codebook.T

    def restored(self) -> nn.Module:
        codes_KD, sums_KD, counts_K = export_statistics(self.vq.codebook_of(0))
        tensors = {"embed": codes_KD.T.contiguous(), "embed_avg": sums_KD.T.contiguous(), "cluster_size": counts_K}
        return self.remembered().filled(tensors, self.like, self.training)


def _is_rosinalitys(module: nn.Module) -> bool:
    return holds(
        module, ("dim", "n_embed", "decay", "eps", "embed", "embed_avg", "cluster_size"), methods=("embed_code",)
    )


LIBRARIES = (Library("Quantize of rosinality's VQ-VAE-2", "Quantize", _is_rosinalitys, RosinalityReplacement),)
