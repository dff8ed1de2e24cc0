"""The study `clients` as data: its cells, its quantizers by name (METHODS), and those of others that are written here.

    Expiring    the rule of vector-quantize-pytorch at its best recipe, so that a step fits into a CUDA graph: the
                package asks the device in each forward whether it has begun, and which codes have expired
    IBQ         index backpropagation (Shi et al. 2025), after its paper
    Bridge      the network between the codes as they are learned and as they are used in FVQ (Chang et al. 2025);
                the package takes any module for it

Legend: N vectors, K codes of D dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from experiments.peers import Peer, PeerFSQ, PeerLFQ, PeerSimVQ, PeerVQ
from experiments.records import digest
from topovq import KohonenVQ
from topovq.ops.accumulate import accumulate
from topovq.ops.search import nearest
from topovq.quantizers import Quantizer

COMMITMENT = 0.25
LARGEST = 2**26  # entries of an N x K matrix that IBQ makes at a time


def as_rows(x_BCHW: Tensor) -> Tensor:
    return x_BCHW.movedim(1, -1).reshape(-1, x_BCHW.shape[1])


def as_map(rows_ND: Tensor, x_BCHW: Tensor) -> Tensor:
    b, _, h, w = x_BCHW.shape
    return rows_ND.view(b, h, w, -1).movedim(-1, 1)


class Expiring(Peer):
    """Running means (decay 0.99) from a k-means start; codes whose running count is below `threshold` start anew at
    vectors of the batch, drawn without replacement, as many as there are."""

    codes: Tensor  # [K, D]
    counts: Tensor  # [K], running means of how many vectors chose each
    sums: Tensor  # [K, D], and of what these add up to
    eps = 1e-5

    def __init__(
        self, dim: int, codebook_size: int, metric: str = "euclidean", threshold: float = 2.0, kmeans_iters: int = 10
    ) -> None:
        super().__init__(dim, nn.Identity(), codebook_size, accept_image_fmap=True)
        self.metric, self.threshold, self.kmeans_iters = metric, threshold, kmeans_iters
        self.started = False
        for name, shape in (("codes", (codebook_size, dim)), ("counts", (codebook_size,))):
            self.register_buffer(name, torch.zeros(shape))
        self.register_buffer("sums", torch.zeros(codebook_size, dim))

    @property
    def codebook(self) -> Tensor:
        return self.codes

    def _output(self, indices: Tensor) -> Tensor:
        return self.codes[indices]

    def _quantize(self, x_BCHW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x_ND = self._scaled(as_rows(x_BCHW))
        if self.training and not self.started:
            self._start(x_ND.detach())
        index_N = nearest(x_ND.detach(), self.codes, self.metric)
        q_ND = self.codes[index_N]
        loss = COMMITMENT * F.mse_loss(x_ND, q_ND) if self.training else x_ND.new_zeros(())
        if self.training:
            self._learn(x_ND.detach(), index_N)
        through_ND = x_ND + (q_ND - x_ND).detach()
        return as_map(through_ND, x_BCHW), index_N.view(x_BCHW.shape[0], *x_BCHW.shape[2:]), loss

    def _scaled(self, rows_ND: Tensor) -> Tensor:
        return F.normalize(rows_ND, dim=-1) if self.metric == "cosine" else rows_ND

    @torch.no_grad()
    def _start(self, x_ND: Tensor) -> None:
        n, k, device = len(x_ND), self.codebook_size, x_ND.device
        drawn = torch.randperm(n, device=device)[:k] if n >= k else torch.randint(0, n, (k,), device=device)
        codes_KD, counts_K = x_ND[drawn].clone(), x_ND.new_zeros(k)
        for _ in range(self.kmeans_iters):
            sums_KD, counts_K = accumulate(x_ND, nearest(x_ND, codes_KD, self.metric), k)
            means_KD = self._scaled(sums_KD / counts_K.clamp(min=1)[:, None])
            codes_KD = torch.where((counts_K > 0)[:, None], means_KD, codes_KD)
        self.counts.copy_(counts_K)
        self.sums.copy_(codes_KD * counts_K[:, None])
        self._move()
        self.started = True

    @torch.no_grad()
    def _learn(self, x_ND: Tensor, index_N: Tensor) -> None:
        sums_KD, counts_K = accumulate(x_ND, index_N, self.codebook_size)
        self.counts.lerp_(counts_K, 1 - self.decay)
        self.sums.lerp_(sums_KD, 1 - self.decay)
        self._move()
        dead_K = self.counts < self.threshold
        order_K = torch.where(dead_K, torch.rand_like(self.counts), 2.0).argsort().argsort()  # the dead ones first
        again_K = dead_K & (order_K < len(x_ND))
        shuffled_N = torch.rand(len(x_ND), device=x_ND.device).argsort()
        drawn_KD = x_ND[shuffled_N[order_K.clamp(max=len(x_ND) - 1)]]
        self.codes.copy_(torch.where(again_K[:, None], drawn_KD, self.codes))
        self.counts.masked_fill_(again_K, self.threshold)
        self.sums.copy_(torch.where(again_K[:, None], drawn_KD * self.threshold, self.sums))

    def _move(self) -> None:
        total = self.counts.sum()
        smoothed_K = (self.counts + self.eps) / (total + self.codebook_size * self.eps) * total
        self.codes.copy_(self._scaled(self.sums / smoothed_K[:, None]))


class IBQ(Peer):
    """All codes get a gradient: q = (onehot - sg(p) + p) codes with p = softmax(x . codes) over all codes.

    Its loss is |q - x|^2 + |x - sg(w)|^2 + 0.25 |sg(x) - w|^2, w the chosen code, and an entropy term that wants each
    vector sure and all codes used. The N x K matrices are made in blocks, and once more in the backward pass.
    """

    def __init__(
        self, dim: int, codebook_size: int, entropy_weight: float = 0.05, entropy_temperature: float = 0.01
    ) -> None:
        super().__init__(dim, nn.Embedding(codebook_size, dim), codebook_size, accept_image_fmap=True)
        nn.init.uniform_(self.inner.weight, -1 / codebook_size, 1 / codebook_size)
        self.entropy_weight, self.entropy_temperature = entropy_weight, entropy_temperature

    @property
    def codebook(self) -> Tensor:
        return self.inner.weight

    def _output(self, indices: Tensor) -> Tensor:
        return self.codebook[indices]

    def _quantize(self, x_BCHW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x_ND, codes_KD = as_rows(x_BCHW), self.codebook
        blocks = x_ND.split(max(1, LARGEST // len(codes_KD)))
        if not self.training:
            index_N = torch.cat([(x @ codes_KD.T).argmax(1) for x in blocks])
            return x_BCHW, index_N.view(x_BCHW.shape[0], *x_BCHW.shape[2:]), x_ND.new_zeros(())
        parts = [checkpoint(self._block, x, codes_KD, use_reentrant=False, preserve_rng_state=False) for x in blocks]
        q_ND, index_N = (torch.cat(part) for part in list(zip(*parts))[:2])
        unsure, mean_K = (torch.stack(part).sum(0) / len(x_ND) for part in list(zip(*parts))[2:])
        entropy = unsure + (mean_K * (mean_K + 1e-5).log()).sum()
        chosen_ND = codes_KD[index_N]
        loss = F.mse_loss(q_ND, x_ND) + F.mse_loss(x_ND, chosen_ND.detach())
        loss = loss + COMMITMENT * F.mse_loss(chosen_ND, x_ND.detach()) + self.entropy_weight * entropy
        return as_map(q_ND, x_BCHW), index_N.view(x_BCHW.shape[0], *x_BCHW.shape[2:]), loss

    def _block(self, x_ND: Tensor, codes_KD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(q, index, the entropies of each vector added up, the probabilities of each code added up)."""
        logits_NK = x_ND @ codes_KD.T
        soft_NK = logits_NK.softmax(1)
        index_N = logits_NK.argmax(1)
        hard_NK = torch.zeros_like(soft_NK).scatter_(1, index_N[:, None], 1.0)
        q_ND = (hard_NK - soft_NK.detach() + soft_NK) @ codes_KD
        log_NK = (logits_NK / self.entropy_temperature).log_softmax(1)
        sharp_NK = log_NK.exp()
        return q_ND, index_N, -(sharp_NK * log_NK).sum(), sharp_NK.sum(0)


class Bridge(nn.Module):
    """Codes [1, K, D] -> [1, K, D]: they are joined to `tokens` rows, which are compressed to `width` numbers each, go
    through `layers` transformer blocks and come back as what is added to the codes (nothing at first)."""

    def __init__(self, dim: int, codebook_size: int, tokens: int = 256, width: int = 256, layers: int = 2) -> None:
        super().__init__()
        while codebook_size % tokens:
            tokens //= 2
        self.joined = codebook_size // tokens * dim
        self.compress, self.recover = nn.Linear(self.joined, width), nn.Linear(width, self.joined)
        self.place = nn.Parameter(torch.randn(tokens, width) * 0.02)
        block = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.process = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        nn.init.zeros_(self.recover.weight)
        nn.init.zeros_(self.recover.bias)

    def forward(self, codes_1KD: Tensor) -> Tensor:
        rows = codes_1KD.reshape(1, -1, self.joined)
        return codes_1KD + self.recover(self.process(self.compress(rows) + self.place)).view_as(codes_1KD)


def build(method: str, dim: int, codebook_size: int, metric: str, steps: int) -> Quantizer:
    """A quantizer of METHODS for feature maps, for a training of so many steps."""
    return METHODS[method](dim, codebook_size, metric, steps)


def ours(dim: int, codebook_size: int, metric: str, length: int, **options: Any) -> Quantizer:
    return KohonenVQ(dim, codebook_size, metric=metric, commitment_weight=COMMITMENT, accept_image_fmap=True, **options)


def theirs(dim: int, codebook_size: int, metric: str, steps: int, **options: Any) -> Quantizer:
    """VectorQuantize of vector-quantize-pytorch from a k-means start, straight-through."""
    cosine = metric == "cosine"
    return PeerVQ(dim, codebook_size, rotation_trick=False, kmeans_init=True, use_cosine_sim=cosine, **options)


# DiVeQ's codes restart when their running count is below 0.02: after about 400 batches without a vector. The commitment
# of FVQ has the package's own weight, since its codes learn by it.
METHODS: dict[str, Callable[[int, int, str, int], Quantizer]] = {
    "recommended": ours,
    "former": lambda *cell: ours(*cell, neighborhood="narrowing", steps=cell[3]),  # what was recommended before
    "ema": lambda *cell: ours(*cell, neighborhood="none"),
    "vqp": lambda *cell: theirs(*cell, threshold_ema_dead_code=2),
    "vqp-rewritten": lambda dim, size, metric, steps: Expiring(dim, size, metric),
    "simvq": lambda dim, size, metric, steps: PeerSimVQ(dim, size),
    "fvq": lambda dim, *cell: theirs(dim, *cell, vq_bridge=Bridge(dim, cell[0]), commitment_weight=1.0),
    "diveq": lambda *cell: theirs(*cell, directional_reparam=True, threshold_ema_dead_code=0.02),
    "fsq": lambda dim, size, metric, steps: PeerFSQ(dim, size),
    "lfq": lambda dim, size, metric, steps: PeerLFQ(dim, size),
    "ibq": lambda dim, size, metric, steps: IBQ(dim, size),
}
UNORDERED = ("fsq", "lfq", "ibq")  # they do not choose the closest code: no topographic error


ALONE = ("vqp", "fvq", "diveq", "ibq", "lfq")  # no CUDA graph takes them, or they fill the device


@dataclass(frozen=True)
class Cell:
    """One run. What identifies it is all of these."""

    data: str = "imagenet160"
    K: int = 16_384
    d: int = 8
    metric: str = "euclidean"
    method: str = "recommended"
    steps: int = 1_500
    seed: int = 0
    stride: int = 8
    crop: int = 64
    hidden: int = 64
    light: bool = True
    batch: int = 64
    learning_rate: float = 1e-4

    @property
    def id(self) -> str:
        return digest(asdict(self))[:12]

    @property
    def name(self) -> str:
        return f"{self.data} K={self.K} d={self.d} {self.metric} {self.method} {self.steps} steps seed {self.seed}"


def cells() -> list[Cell]:
    """The study, the most telling runs first."""
    main = [Cell(d=d, steps=5_000) for d in (8, 64)]
    best = ("recommended", "vqp-rewritten", "ema")
    other = [Cell(K=size) for size in (65_536, 262_144, 1_024)] + [Cell(K=65_536, d=64)]
    other += [Cell(metric="cosine"), Cell(d=32), Cell(d=256), Cell(data="faces256"), Cell(stride=16, crop=128)]
    found = [replace(cell, method=method, seed=0) for cell in main for method in best]
    found += [replace(cell, method=method) for cell in other for method in best]
    found += [replace(cell, method=method, seed=seed) for cell in main for seed in (1, 2) for method in best]
    found += [Cell(method=method) for method in METHODS]
    found += [Cell(K=size, method="former") for size in (1_024, 65_536, 262_144)]
    found += [Cell(d=64, method=method) for method in METHODS]
    found += [replace(cell, method="former") for cell in main]
    return found


QUICK_CELL = Cell(data="photos", K=64, d=8, steps=40, crop=16, hidden=16, batch=8)
