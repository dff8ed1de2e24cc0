"""SEED-Voken: `IndexPropagationQuantize` (IBQ) and its `VectorQuantizer2`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from topovq.interop.embedding import EmbeddingReplacement, LegacyReplacement, entropies, has_embedding
from topovq.interop.library import Library, Options, holds
from topovq.interop.taming import REMAPPED, SECOND
from topovq.ops.snapshot import snapshot


class IBQReplacement(EmbeddingReplacement):
    """KohonenVQ (`.vq`) behind the interface of IBQ's IndexPropagationQuantize.

    As there, codes are chosen by the inner product, and the gradient to the encoder goes through the softmax over all
    codes, which takes an [N, K] tensor in training. The loss has no codebook term: Kohonen's rule moves the codes.
    """

    use_entropy_loss: bool
    entropy_temperature: float
    sample_minimization_weight: float
    batch_maximization_weight: float

    def __init__(self, theirs: nn.Module, options: Options) -> None:
        found: Any = theirs
        if found.remap is not None:
            raise TypeError(f"IndexPropagationQuantize: remap={found.remap!r} is not supported; leave it out")
        super().__init__(theirs, {"commitment_weight": 1.0, "metric": "dot"}, options)

    def forward(
        self, z: Tensor, temp: float | None = None, return_logits: bool = False
    ) -> tuple[Tensor, Tensor | tuple[Tensor, Tensor, Tensor, Tensor], tuple[None, None, Tensor]]:
        """(quantized [B, C, H, W], loss, (None, None, tokens [N])).

        With use_entropy_loss the loss is (loss, entropy of a choice, entropy of the mean choice, entropy loss).
        """
        soft_q = logits_NK = None
        if torch.is_grad_enabled() or self.use_entropy_loss:
            codes_KC = snapshot(self.vq.codebook).to(z.dtype)  # as they are before they learn from this batch
            z_BHWC = z.movedim(1, -1)
            logits_NK = z_BHWC.flatten(0, -2) @ codes_KC.T
            soft_q = (logits_NK.softmax(1) @ codes_KC).view(z_BHWC.shape).movedim(-1, 1)
        quantized, tokens_BHW, commitment = self.vq(z)
        quantized = quantized.detach()
        if soft_q is not None:
            quantized = quantized + (soft_q - soft_q.detach())
        loss = F.mse_loss(quantized, z) + commitment
        info = None, None, tokens_BHW.flatten()
        if not self.use_entropy_loss or logits_NK is None:
            return quantized, loss, info
        sample, mean = entropies(logits_NK, self.entropy_temperature)
        entropy = self.sample_minimization_weight * sample - self.batch_maximization_weight * mean
        return quantized, (loss, sample, mean, entropy), info


class SeedVokenReplacement(LegacyReplacement):
    """KohonenVQ (`.vq`) behind the interface of SEED-Voken's VectorQuantizer2.

    With l2_normalize codes are chosen by their direction and keep their length.
    """

    def __init__(self, theirs: nn.Module, options: Options) -> None:
        found: Any = theirs
        super().__init__(theirs, options, {"use_cosine_sim": found.l2_normalize}, unit_length=False)


IBQ = (
    *("n_e", "e_dim", "beta", "embedding", "remap", "re_embed", "use_entropy_loss", "cosine_similarity"),
    *("entropy_temperature", "sample_minimization_weight", "batch_maximization_weight"),
)
METHODS = ("get_codebook_entry", "remap_to_used", "unmap_to_all")


def is_ibq(module: nn.Module) -> bool:
    return holds(module, IBQ, REMAPPED, METHODS) and has_embedding(module)


def is_second(module: nn.Module) -> bool:
    return holds(module, (*SECOND, "l2_normalize"), REMAPPED, METHODS) and has_embedding(module)


LIBRARIES = (
    Library("IndexPropagationQuantize (IBQ) of SEED-Voken", "IndexPropagationQuantize", is_ibq, IBQReplacement),
    Library("VectorQuantizer2 of SEED-Voken", "VectorQuantizer2", is_second, SeedVokenReplacement),
)
