"""GasCodebook: a codebook whose codes learn by their rank among all codes, and not by their place on a map.

The running means are EMA-VQ's; what a batch gives to them is weighted by rank (ops/ranks.py). The weight of rank r is
that of the exponential neighborhood at distance r: exp(-r / lambda), lambda = radius / (1 + t * tau). The radius
is half the number of codes if not given, as in topovq.som.NeuralGas.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from topovq.codebook import Codebook, Turn
from topovq.neighborhood import Neighborhood
from topovq.ops.bound import counted
from topovq.ops.ranks import by_rank

GAS = "gas"
KERNEL = "exponential"  # the neighborhood whose distances are ranks


class GasCodebook(Codebook):
    def __init__(self, dim: int, neighborhood: Neighborhood, **options: Any) -> None:
        super().__init__(dim, Neighborhood("none", neighborhood.grid), **options)
        self.ranks = neighborhood

    def finish(
        self,
        turn: Turn,
        x_ND: Tensor,
        sums_KD: Tensor,
        counts_K: Tensor,
        skipped: Tensor,
        share_K: Tensor | None = None,
    ) -> None:
        if turn.moves and self.ema_update:
            valid_N = counted(x_ND, turn.codes_KD, turn.learns)
            valid_N = valid_N if turn.keep_N is None else valid_N & turn.keep_N
            codes_KD, x_ND = turn.codes_KD.detach(), x_ND.detach()
            sums_KD, counts_K = by_rank(x_ND, codes_KD, valid_N, self.ranks, turn.step, self.metric)
        super().finish(turn, x_ND, sums_KD, counts_K, skipped, share_K)

    def extra_repr(self) -> str:
        return f"{self.size} codes of {self.codes.shape[1]} dimensions, gas, {self.ranks.schedule}"
