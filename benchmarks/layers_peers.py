"""The layers that benchmarks/layers.py times: this library's, and others that do the same."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from topovq import KohonenVQ


class PlainVQ(nn.Module):
    """EMA-VQ as it is usually written: all N x K distances, then index_add."""

    def __init__(self, d: int, k: int) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(k, d))
        self.register_buffer("sums", self.codes.clone())
        self.register_buffer("counts", torch.ones(k))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch.no_grad():
            distance = x.square().sum(1, keepdim=True) - 2 * x @ self.codes.T + self.codes.square().sum(1)
            index = distance.argmin(1)
            q = self.codes[index]
            sums = torch.zeros_like(self.sums).index_add_(0, index, x)
            counts = torch.bincount(index, minlength=len(self.counts)).float()
            self.update(sums, counts)
        loss = (x - q).square().mean()
        return x + (q - x).detach(), index, loss

    def update(self, sums: Tensor, counts: Tensor) -> None:
        self.sums.lerp_(sums, 0.01)
        self.counts.lerp_(counts, 0.01)
        total = self.counts.sum()
        self.counts.copy_((self.counts + 1e-5) / (total + len(self.counts) * 1e-5) * total)
        self.codes.copy_(self.sums / self.counts[:, None])


class OneHotKSOM(PlainVQ):
    """KSOM as the paper's equations read: the N x K one-hot matrix times the K x K neighborhood matrix."""

    def __init__(self, d: int, k: int) -> None:
        super().__init__(d, k)
        vq = KohonenVQ(d, k, neighborhood="hard")
        self.register_buffer("near", vq.neighborhood.matrix(0).bool())
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch.no_grad():
            distance = x.square().sum(1, keepdim=True) - 2 * x @ self.codes.T + self.codes.square().sum(1)
            index = distance.argmin(1)
            q = self.codes[index]
            weight = torch.where(self.near, 1 / (1 + 0.1 * self.step), 0.0).fill_diagonal_(1.0)
            spread = nn.functional.one_hot(index, len(self.counts)).float() @ weight
            self.update(spread.T @ x, spread.sum(0))
            self.step += 1
        loss = (x - q).square().mean()
        return x + (q - x).detach(), index, loss


class Nothing(nn.Module):
    """Two operations: what it costs the host to start any layer, the compiler's own part included."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        loss = x.square().mean()
        return 2 * x, loss.detach(), loss


LIBRARIES = ("topovq", "nothing", "plain-torch", "authors-formulation", "vector-quantize-pytorch", "flash-kmeans")
NEIGHBORHOODS = ("none", "hard", "gaussian", "exponential", "ride")


def layers(k: int, d: int) -> dict[tuple[str, str, str], Callable[[], nn.Module]]:
    """(library, mode, neighborhood) -> what makes a layer. All search in float32 but for our mode "fast"."""

    def ours(neighborhood: str, precision: str) -> Callable[[], nn.Module]:
        options = {} if neighborhood == "ride" else {"tau": 0.1}
        return lambda: KohonenVQ(d, k, neighborhood=neighborhood, precision=precision, **options)

    def theirs() -> nn.Module:
        from vector_quantize_pytorch import VectorQuantize

        return VectorQuantize(dim=d, codebook_size=k)

    made = {
        ("topovq", precision, neighborhood): ours(neighborhood, precision)
        for precision in ("exact", "fast")
        for neighborhood in NEIGHBORHOODS
    }
    made["nothing", "exact", "none"] = Nothing
    made["plain-torch", "exact", "none"] = lambda: PlainVQ(d, k)
    made["authors-formulation", "exact", "hard"] = lambda: OneHotKSOM(d, k)
    made["vector-quantize-pytorch", "exact", "none"] = theirs
    return made
