"""Quantizers of another library behind the interface of ours, so that one model, optimizer and loop train them all.

Importing this module gives them names, which configurations and run folders use:

    vqp           VectorQuantize at its best recipe: straight-through, decay 0.99, k-means start, codes that expire
    vqp-rotation  VectorQuantize as it comes, with the rotation trick, and decay 0.99
    simvq         SimVQ: the codes are a learned linear image of fixed random vectors; straight-through
    fsq           FSQ: each of a few dimensions is rounded to a few levels, as many codes as their product
    lfq           LFQ: the signs of log2(K) dimensions, with its entropy loss

All are of vector-quantize-pytorch, an optional package that is imported when one of them is built. The commitment
weighs 0.25 where there is one. They compute in float32 whatever autocast says, so that low precision is nobody's
handicap. They have codes, but no map.
"""

from __future__ import annotations

import importlib
import itertools
import math
from typing import Any

import torch
from torch import Tensor, nn

from topovq import distributed, metrics
from topovq.codebook import Codebook
from topovq.grid import check_range
from topovq.missing import MissingExtra
from topovq.ops.use import NEVER, follow_use
from topovq.quantizers import Quantized, Quantizer
from topovq.tokenizer.models import QUANTIZERS

PACKAGE = "vector-quantize-pytorch"
# Levels that the FSQ paper recommends, and those that give a power of 2 exactly.
FSQ_LEVELS = {
    256: (8, 6, 5),
    512: (8, 8, 8),
    1_024: (8, 5, 5, 5),
    4_096: (7, 5, 5, 5, 5),
    16_384: (8, 8, 8, 6, 5),
    65_536: (8, 8, 8, 5, 5, 5),
    262_144: (8, 8, 8, 8, 8, 8),
}


class MissingPackage(MissingExtra):
    """The other library is not installed; the message says how to install it."""

    def __init__(self) -> None:
        ImportError.__init__(self, f"{PACKAGE} is not installed; install it with: pip install {PACKAGE}")


def their(name: str) -> Any:
    """A class of vector-quantize-pytorch."""
    try:
        return getattr(importlib.import_module("vector_quantize_pytorch"), name)
    except ImportError as error:
        raise MissingPackage from error


class Peer(Quantizer):
    """A quantizer of theirs for feature maps [B, C, h, w], called and watched like ours.

    In evaluation `quantized` is what `get_output_from_indices` gives for the tokens, bit for bit, and the loss of all
    but SimVQ is 0.
    """

    decay = 0.99  # of `hits`
    hits: Tensor  # [K], running mean of how often each code is chosen per batch
    idle: Tensor  # int32 [K], updates since each code was last chosen
    nothing: Tensor  # int64, 0

    def __init__(self, dim: int, inner: nn.Module, codebook_size: int, accept_image_fmap: bool) -> None:
        super().__init__()
        if not accept_image_fmap:
            raise ValueError("accept_image_fmap=False is not supported: the quantizer takes feature maps [B, C, h, w]")
        self.dim = dim
        self.size = codebook_size
        self.inner: Any = inner
        self.codes_read: Tensor | None = None
        self.register_buffer("hits", torch.zeros(codebook_size))
        self.register_buffer("idle", torch.full((codebook_size,), NEVER, dtype=torch.int32))
        self.register_buffer("nothing", torch.zeros((), dtype=torch.int64), persistent=False)

    @property
    def codebook_size(self) -> int:
        return self.size

    @property
    def maps(self) -> list[Codebook]:
        """None: the codes have no places."""
        return []

    def forward(self, x_BCHW: Tensor) -> Quantized:
        """(quantized [B, C, h, w], indices int64 [B, h, w], loss); in training mode the codes learn."""
        if x_BCHW.ndim != 4 or x_BCHW.shape[1] != self.dim:
            raise ValueError(f"x of shape {tuple(x_BCHW.shape)} must be [B, C, h, w] with C = dim = {self.dim}")
        with torch.autocast(x_BCHW.device.type, enabled=False):
            quantized, indices, loss = self._quantize(x_BCHW.float())
            indices = indices.long()
            if self.training:
                self._count(indices)
            else:
                quantized = self.get_output_from_indices(indices)
        return Quantized(quantized.to(x_BCHW.dtype), indices, loss.sum())

    def _quantize(self, x_BCHW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.inner(x_BCHW)

    def _output(self, indices: Tensor) -> Tensor:
        """Tokens int64 [B, h, w] -> [B, h, w, C]."""
        raise NotImplementedError

    def get_output_from_indices(self, indices: Tensor) -> Tensor:
        """Feature maps [B, C, h, w] of tokens [B, h, w]."""
        check_range("token", indices, self.codebook_size)
        return self._output(indices.long()).movedim(-1, 1)

    def __getattr__(self, name: str) -> Any:
        if name in ("grid", "coords", "neighborhood", "codebook_of"):
            raise AttributeError(f"{type(self).__name__} has no {name!r}: its codes have no places on a map")
        return super().__getattr__(name)

    # Figures, over all ranks, without waiting for the device

    @torch.no_grad()
    def _count(self, indices: Tensor) -> None:
        index_N = indices.reshape(-1)
        counts_K = torch.zeros_like(self.hits).index_add_(0, index_N, torch.ones_like(index_N, dtype=self.hits.dtype))
        follow_use(self.hits, self.idle, distributed.sum_over_ranks(counts_K), self.decay)

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        if f"{prefix}hits" in state:  # states from before `idle` was kept
            chosen_K = metrics.chosen_by_hits(state[f"{prefix}hits"], self.decay)
            state.setdefault(f"{prefix}idle", torch.where(chosen_K, 0, NEVER).int())
        super()._load_from_state_dict(state, prefix, *rest)

    @property
    def codebook(self) -> Tensor:
        """The codes [K, D], before any projection out."""
        raise NotImplementedError

    @property
    def perplexity(self) -> Tensor:
        return metrics.perplexity(self.hits)

    @property
    def usage(self) -> Tensor:
        return metrics.usage(metrics.used_lately(self.idle, self.decay))

    @property
    def skipped(self) -> Tensor:
        """0: theirs do not look for vectors with NaN or infinity."""
        return self.nothing

    def read_health(self) -> Tensor:
        """As Quantizer.read_health. The codes of FSQ and LFQ are fixed: their drift is 0."""
        codes_KD = self.codebook.detach().clone()
        before_KD, self.codes_read = self.codes_read, codes_KD
        return metrics.health_figures(self.hits, self.idle, self.decay, codes_KD, before_KD)


class PeerVQ(Peer):
    """VectorQuantize. `threshold_ema_dead_code` is an absolute running count below which a code starts anew.

    With a `vq_bridge` (FVQ), or with `directional_reparam` (DiVeQ), the codes are parameters.
    """

    graphable = False  # it asks the device whether it has begun, and which codes have expired

    def __init__(
        self,
        dim: int,
        codebook_size: int,
        *,
        accept_image_fmap: bool = True,
        codebook_dim: int | None = None,
        decay: float = 0.99,
        kmeans_init: bool = False,
        kmeans_iters: int = 10,
        threshold_ema_dead_code: float = 0,
        rotation_trick: bool = True,
        use_cosine_sim: bool = False,
        commitment_weight: float = 0.25,
        directional_reparam: bool = False,
        vq_bridge: nn.Module | None = None,
    ) -> None:
        inner = their("VectorQuantize")(
            dim,
            codebook_size,
            codebook_dim=codebook_dim,
            decay=decay,
            kmeans_init=kmeans_init,
            kmeans_iters=kmeans_iters,
            threshold_ema_dead_code=threshold_ema_dead_code,
            rotation_trick=rotation_trick,  # False is straight-through; `straight_through` of theirs is Gumbel's
            use_cosine_sim=use_cosine_sim,
            commitment_weight=commitment_weight,
            directional_reparam=directional_reparam,
            vq_bridge=vq_bridge,
            accept_image_fmap=True,
        )
        super().__init__(dim, inner, codebook_size, accept_image_fmap)

    def _quantize(self, x_BCHW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if not self.training and not self.inner._codebook.initted:  # else it would begin with what is shown to it now
            blank = x_BCHW.new_zeros(x_BCHW.shape[0], *x_BCHW.shape[2:], dtype=torch.int64)
            return x_BCHW, blank, x_BCHW.new_zeros(())
        quantized, indices, loss = self.inner(x_BCHW)
        return quantized, indices, loss

    def _output(self, indices: Tensor) -> Tensor:
        return self.inner.project_out(self.codebook[indices])

    @property
    def codebook(self) -> Tensor:
        bridge = self.inner._codebook.vq_bridge
        return self.inner.codebook if bridge is None else bridge(self.inner._codebook.embed)[0]


class PeerSimVQ(Peer):
    """SimVQ. Its loss is |sg(x) - q|^2 + 0.25 |x - sg(q)|^2, which also moves the linear map that makes the codes."""

    def __init__(self, dim: int, codebook_size: int, *, accept_image_fmap: bool = True) -> None:
        options = {"rotation_trick": False, "input_to_quantize_commit_loss_weight": 0.25, "commitment_weight": 1.0}
        inner = their("SimVQ")(dim, codebook_size, channel_first=True, **options)
        super().__init__(dim, inner, codebook_size, accept_image_fmap)

    def _output(self, indices: Tensor) -> Tensor:
        return self.inner.code_transform(self.inner.frozen_codebook[indices])

    @property
    def codebook(self) -> Tensor:
        return self.inner.codebook


class PeerFSQ(Peer):
    """FSQ; its levels are those of its paper for this codebook_size, or those whose product is closest to it.

    `codebook_size` is their product, which may be more or fewer codes than were asked for.
    """

    def __init__(self, dim: int, codebook_size: int, *, accept_image_fmap: bool = True) -> None:
        levels = list(fsq_levels(codebook_size))
        super().__init__(dim, their("FSQ")(levels, dim=dim), math.prod(levels), accept_image_fmap)

    def _quantize(self, x_BCHW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        quantized, indices = self.inner(x_BCHW)
        return quantized, indices, x_BCHW.new_zeros(())

    def _output(self, indices: Tensor) -> Tensor:
        return self.inner.project_out(self.codebook[indices])

    @property
    def codebook(self) -> Tensor:
        return self.inner.implicit_codebook


class PeerLFQ(Peer):
    """LFQ; codebook_size must be a power of 2. Its entropy loss makes an N x K matrix."""

    def __init__(self, dim: int, codebook_size: int, *, accept_image_fmap: bool = True) -> None:
        if codebook_size < 2 or codebook_size & (codebook_size - 1):
            raise ValueError(f"lfq: codebook_size={codebook_size!r} must be a power of 2, such as 512 or 16384")
        weights = {"entropy_loss_weight": 0.1, "diversity_gamma": 1.0, "commitment_loss_weight": 0.25}
        inner = their("LFQ")(dim=dim, codebook_size=codebook_size, **weights)
        super().__init__(dim, inner, codebook_size, accept_image_fmap)

    def _output(self, indices: Tensor) -> Tensor:
        return self.inner.project_out(self.codebook[indices])

    @property
    def codebook(self) -> Tensor:
        return self.inner.codebook


def fsq_levels(codebook_size: int) -> tuple[int, ...]:
    """Levels from 3 to 8 whose product is the paper's for this number of codes, or else as close as can be."""
    if codebook_size in FSQ_LEVELS:
        return FSQ_LEVELS[codebook_size]
    if codebook_size < 3:
        raise ValueError(f"fsq: codebook_size={codebook_size!r} must be at least 3, the fewest levels of one dimension")
    most = max(1, math.ceil(math.log(codebook_size, 5)))
    found = [
        levels
        for number in range(1, most + 1)
        for levels in itertools.combinations_with_replacement((8, 7, 6, 5, 4, 3), number)
    ]
    return min(found, key=lambda levels: (abs(math.log(math.prod(levels) / codebook_size)), len(levels)))


PEERS: dict[str, tuple[type[Quantizer], dict[str, Any]]] = {
    "vqp": (PeerVQ, {"rotation_trick": False, "kmeans_init": True, "threshold_ema_dead_code": 2}),
    "vqp-rotation": (PeerVQ, {"rotation_trick": True}),
    "simvq": (PeerSimVQ, {}),
    "fsq": (PeerFSQ, {}),
    "lfq": (PeerLFQ, {}),
}
QUANTIZERS.update(PEERS)
