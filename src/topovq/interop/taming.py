"""taming-transformers (VQGAN): `VectorQuantizer` and `VectorQuantizer2`, also as latent diffusion uses them.

GumbelQuantize is left alone: it draws codes from logits and compares no distances. So is EMAVectorQuantizer, whose
constructor fails.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from topovq.interop.embedding import EmbeddingReplacement, LegacyReplacement, has_embedding
from topovq.interop.library import Library, Options, holds


class VectorQuantizerReplacement(EmbeddingReplacement):
    """KohonenVQ (`.vq`) behind the interface of taming's first VectorQuantizer.

    The loss is the commitment term alone, and the choices as one-hot vectors [N, K] are None, as in VectorQuantizer2.
    """

    def __init__(self, theirs: nn.Module, options: Options) -> None:
        # beta is on the codebook term, where it does not reach the encoder.
        super().__init__(theirs, {"commitment_weight": 1.0}, options)

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, None, Tensor]]:
        """(quantized [B, C, H, W], loss, (perplexity of the batch, None, tokens [N, 1]))."""
        quantized, tokens_BHW, loss = self.vq(z)
        tokens_N = tokens_BHW.flatten()
        share_K = z.new_zeros(self.vq.codebook_size).index_add_(0, tokens_N, z.new_ones(1).expand(len(tokens_N)))
        share_K = share_K / len(tokens_N)
        perplexity = torch.exp(-(share_K * (share_K + 1e-10).log()).sum())
        return quantized.contiguous(), loss, (perplexity, None, tokens_N[:, None])


class VectorQuantizer2Replacement(LegacyReplacement):
    """KohonenVQ (`.vq`) behind the interface of taming's VectorQuantizer2."""


FIRST = ("n_e", "e_dim", "beta", "embedding")
SECOND = (*FIRST, "legacy", "remap", "re_embed", "sane_index_shape")
REMAPPED = ("used", "unknown_index")


def is_first(module: nn.Module) -> bool:
    return holds(module, FIRST, methods=["get_codebook_entry"]) and has_embedding(module)


def is_second(module: nn.Module) -> bool:
    methods = ["get_codebook_entry", "remap_to_used", "unmap_to_all"]
    return holds(module, SECOND, optional=REMAPPED, methods=methods) and has_embedding(module)


LIBRARIES = (
    Library("VectorQuantizer of taming-transformers", "VectorQuantizer", is_first, VectorQuantizerReplacement),
    Library("VectorQuantizer2 of taming-transformers", "VectorQuantizer2", is_second, VectorQuantizer2Replacement),
)
