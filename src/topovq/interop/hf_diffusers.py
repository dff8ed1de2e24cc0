"""diffusers' `VectorQuantizer`, which its VQModel holds."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from topovq.interop.library import Library, Options, Original, Replacement, package
from topovq.interop.states import with_codes


class DiffusersReplacement(Replacement, nn.Module):
    """KohonenVQ (`.vq`) behind the interface of diffusers' VectorQuantizer.

    The loss is the commitment term alone: the codebook term of theirs moved the codes, which now Kohonen's rule does.
    """

    like: Tensor

    def __init__(self, theirs: nn.Module, options: Options) -> None:
        super().__init__()
        found: Any = theirs
        if found.remap is not None:
            raise TypeError(f"VectorQuantizer: remap={found.remap!r} is not supported; replace it without a remap")
        weight: Tensor = found.embedding.weight
        settings = {
            "accept_image_fmap": True,
            # "legacy" has beta on the codebook term, where it does not reach the encoder.
            "commitment_weight": 1.0 if found.legacy else found.beta,
            "freeze_codebook": not weight.requires_grad,
        }
        self.vq = with_codes(weight.detach(), None, None, {**settings, **options})
        self.n_e: int = found.n_e
        self.vq_embed_dim: int = found.vq_embed_dim
        self.sane_index_shape: bool = found.sane_index_shape
        # Follows .half() and the like, which the codes do not.
        self.register_buffer("like", weight.detach().new_empty(0), persistent=False)
        self.original = Original(theirs)
        self.train(theirs.training)

    def forward(self, z_BCHW: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, None, Tensor]]:
        """(quantized [B, C, H, W], loss, (perplexity, None, tokens)): tokens flat, or [B, H, W] if sane_index_shape."""
        quantized, tokens_BHW, loss = self.vq(z_BCHW)
        tokens = tokens_BHW if self.sane_index_shape else tokens_BHW.flatten()
        return quantized.contiguous(), loss, (self.vq.perplexity, None, tokens)

    def get_codebook_entry(self, indices: Tensor, shape: tuple[int, ...] | None = None) -> Tensor:
        """Codes [..., C] of tokens; with shape = (B, H, W, C) as a feature map [B, C, H, W]."""
        codes = self.vq.get_codes_from_indices(indices.flatten()).to(self.like.dtype)
        if shape is None:
            return codes.view(*indices.shape, self.vq_embed_dim)
        return codes.view(shape).permute(0, 3, 1, 2).contiguous()

    def restored(self) -> nn.Module:
        return self.remembered().filled({"embedding.weight": self.vq.codebook}, self.like, self.training)


def matches(module: nn.Module) -> bool:
    return package(module) == "diffusers"


LIBRARIES = (Library("VectorQuantizer of diffusers", "VectorQuantizer", matches, DiffusersReplacement),)
