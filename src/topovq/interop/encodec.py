"""EnCodec: the codebooks inside facebook's `encodec` (and audiocraft) and inside transformers' EncodecModel.

Legend: K codes, D dimensions.
Replaced is the codebook inside each layer, `EuclideanCodebook` and `EncodecEuclideanCodebook`: the choice of the number
of quantizers by bandwidth, the residuals, the projections, the straight-through gradient and the commitment loss are
the model's own code around it and stay what they are.
It keeps embed [K, D], embed_avg [K, D], cluster_size [K] and inited [1]; facebook's also its settings. In facebook's
model codes learn in `forward`, in training mode, as they did; its `threshold_ema_dead_code` stays an absolute count.
transformers' model has no `forward` of the quantizer and its codes never learned: there they learn where it encodes in
training mode, which `replace_quantizers(model, freeze_codebook=True)` prevents. No gradient reaches its encoder, as
before.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from topovq.interop.library import Library, Options, Replacement, holds
from topovq.interop.states import export_statistics, fill
from topovq.quantizers.kohonen import KohonenVQ

BUFFERS = ("embed", "embed_avg", "cluster_size", "inited")
SETTINGS = ("decay", "epsilon", "kmeans_iters", "threshold_ema_dead_code")


class EncodecReplacement(Replacement, nn.Module):
    """KohonenVQ (`.vq`) behind the interface of facebook's EuclideanCodebook."""

    like: Tensor

    def __init__(self, theirs: nn.Module, options: Options) -> None:
        super().__init__()
        found: Any = theirs
        names = dict(zip(SETTINGS, ("decay", "eps", "kmeans_iters", "threshold_ema_dead_code")))
        settings = {ours: getattr(found, name) for name, ours in names.items() if hasattr(found, name)}
        started = bool(found.inited)
        size, dim = found.embed.shape
        self.vq = KohonenVQ(dim, size, **{**settings, "kmeans_init": not started, **options}).to(found.embed)
        if started:
            fill(self.vq.codebook_of(0), found.embed, found.embed_avg, found.cluster_size)
        self.codebook_size: int = found.codebook_size
        self.remember(theirs, found.embed)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(codes [..., D], tokens [...]) of vectors [..., D]; in training mode the codes learn from them.

        No gradient passes: the layer around this lets it past.
        """
        quantized, tokens, _ = self.vq(x.detach())
        return quantized, tokens

    def encode(self, x: Tensor) -> Tensor:
        """Tokens [...] of vectors [..., D]; nothing learns."""
        return self.vq.codebook_of(0).search(x.flatten(0, -2)).view(x.shape[:-1])

    def decode(self, embed_ind: Tensor) -> Tensor:
        """Codes [..., D] of tokens [...]."""
        return F.embedding(embed_ind, self.embed).to(self.like.dtype)

    @property
    def embed(self) -> Tensor:
        return self.vq.codebook

    @property
    def embed_avg(self) -> Tensor:
        return export_statistics(self.vq.codebook_of(0))[1]

    @property
    def cluster_size(self) -> Tensor:
        return export_statistics(self.vq.codebook_of(0))[2]

    @property
    def inited(self) -> Tensor:
        return self.vq.codebook_of(0).initialized.to(self.like.dtype).view(1)

    def restored(self) -> nn.Module:
        tensors = {name: getattr(self, name) for name in BUFFERS}
        return self.remembered().filled(tensors, self.like, self.training)


class TransformersEncodecReplacement(EncodecReplacement):
    """The same behind transformers' EncodecEuclideanCodebook, which is only ever asked to encode and decode."""

    def encode(self, x: Tensor) -> Tensor:
        """Tokens [...] of vectors [..., D]; in training mode the codes learn from them."""
        return self(x)[1]


def _is_facebooks(module: nn.Module) -> bool:
    return holds(module, (*BUFFERS, *SETTINGS, "codebook_size"), methods=("encode", "decode"))


def _is_transformers(module: nn.Module) -> bool:
    return holds(module, (*BUFFERS, "codebook_size"), methods=("encode", "decode"))


LIBRARIES = (
    Library("EuclideanCodebook of encodec", "EuclideanCodebook", _is_facebooks, EncodecReplacement),
    Library(
        "EncodecEuclideanCodebook of transformers",
        "EncodecEuclideanCodebook",
        _is_transformers,
        TransformersEncodecReplacement,
    ),
)
