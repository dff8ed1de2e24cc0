"""LlamaGen's `VectorQuantizer` (tokenizer/tokenizer_image/vq_model.py)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from topovq.interop.embedding import EmbeddingReplacement, entropies, has_embedding
from topovq.interop.library import Library, Options, holds
from topovq.ops.snapshot import snapshot

TEMPERATURE = 0.01  # of the soft choice in the entropy loss
Losses = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | int]


class LlamaGenReplacement(EmbeddingReplacement):
    """KohonenVQ (`.vq`) behind the interface of LlamaGen's VectorQuantizer.

    The codebook loss keeps its value but has no gradient: it moved the codes, which now Kohonen's rule does.
    The entropy loss is computed where its ratio is not 0, with an [N, K] tensor as theirs, and moves the encoder alone.
    """

    l2_norm: bool
    show_usage: bool
    entropy_loss_ratio: float
    codebook_used: Tensor  # the last tokens seen in training, where show_usage asks for it

    def __init__(self, theirs: nn.Module, options: Options) -> None:
        found: Any = theirs
        super().__init__(theirs, {"commitment_weight": found.beta, "use_cosine_sim": found.l2_norm}, options)

    def forward(self, z: Tensor) -> tuple[Tensor, Losses, tuple[None, None, Tensor]]:
        """(quantized [B, C, H, W], (codebook loss, commitment loss, entropy loss, usage), (None, None, tokens [N])).

        In eval mode the losses are None and the usage is 0.
        """
        if not self.training:
            quantized, tokens_BHW, _ = self.vq(z)
            return quantized, (None, None, None, 0), (None, None, tokens_BHW.flatten())
        entropy = self._entropy(z) if self.entropy_loss_ratio else z.new_zeros(())
        quantized, tokens_BHW, commitment = self.vq(z)
        tokens_N = tokens_BHW.flatten()
        with torch.no_grad():
            codebook = F.mse_loss(quantized, F.normalize(z, dim=1) if self.l2_norm else z)
        usage = self._usage(tokens_N) if self.show_usage else 0
        return quantized, (codebook, commitment, entropy, usage), (None, None, tokens_N)

    def _entropy(self, z_BCHW: Tensor) -> Tensor:
        z_NC = z_BCHW.movedim(1, -1).flatten(0, -2)
        z_NC = F.normalize(z_NC, dim=1) if self.l2_norm else z_NC
        codes_KC = snapshot(self.vq.codebook).to(z_NC.dtype)  # as they are before they learn from this batch
        affinity_NK = 2 * z_NC @ codes_KC.T - codes_KC.square().sum(1)  # |z|^2 is the same for all codes
        sample, mean = entropies(affinity_NK, TEMPERATURE)
        return self.entropy_loss_ratio * (sample - mean)

    @torch.no_grad()
    def _usage(self, tokens_N: Tensor) -> Tensor:
        """Share of the codes among the last tokens, without waiting for the device."""
        last = self.codebook_used
        last.copy_(torch.cat([last, tokens_N.to(last.dtype)])[-last.numel() :])
        return last.new_zeros(self.vq.codebook_size).index_fill_(0, last.long(), 1).mean()

    def get_codebook_entry(
        self, indices: Tensor, shape: tuple[int, ...] | None = None, channel_first: bool = True
    ) -> Tensor:
        """Codes [..., C] of tokens; with shape = (B, C, H, W) that, or (B, H, W, C) if not channel_first."""
        codes = self._codes(indices)
        if shape is None:
            return codes
        if not channel_first:
            return codes.reshape(shape)
        batch, channels, height, width = shape
        return codes.reshape(batch, height, width, channels).permute(0, 3, 1, 2).contiguous()


def matches(module: nn.Module) -> bool:
    names = ("n_e", "e_dim", "beta", "embedding", "entropy_loss_ratio", "l2_norm", "show_usage")
    return holds(module, names, ["codebook_used"], ["get_codebook_entry"]) and has_embedding(module)


LIBRARIES = (Library("VectorQuantizer of LlamaGen", "VectorQuantizer", matches, LlamaGenReplacement),)
