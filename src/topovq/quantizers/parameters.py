"""Codebooks whose codes are parameters and that keep running statistics all the same.

Legend: K codes w, D dimensions, m sums, N counts (codebook.py).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from topovq.codebook import Codebook
from topovq.ops.starts import sample_rows


class PenalizedCodebook(Codebook):
    """Codes that follow the running means and, between two updates, an optimizer: for penalties on them.

    Where the optimizer moved a code, its sum moves along, so that the next update goes on from there.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        codes_KD = self.codes
        del self.codes
        self.codes = nn.Parameter(codes_KD)

    def _make_float32(self) -> None:
        self.codes.data = self.codes.data.float()
        super()._make_float32()

    @torch.no_grad()
    def learn(self, sums_KD: Tensor, counts_K: Tensor, skipped: Tensor) -> None:
        if self.ema_update and not self.accumulating:
            if self.unit_length:
                moved_KD = F.normalize(self.codes, dim=1) * self.sums.norm(dim=1, keepdim=True)
            else:
                moved_KD = self.codes * self.divisor()[:, None]
            self.sums.copy_(torch.where(self.counts[:, None] > 0, moved_KD, self.sums))
        super().learn(sums_KD, counts_K, skipped)


class RevivingCodebook(Codebook):
    """Codes that follow the gradient, with running counts that say which to revive."""

    counts: Tensor

    def __init__(self, *arguments: Any, dead_threshold: float, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if not 0 <= dead_threshold < float("inf"):
            raise ValueError(f"threshold_ema_dead_code={dead_threshold!r} must be a finite number of at least 0")
        self.dead_threshold = dead_threshold
        self.register_buffer("counts", torch.ones(self.size))

    @torch.no_grad()
    def learn(self, sums_KD: Tensor, counts_K: Tensor, skipped: Tensor) -> None:
        hits_K, step = self.hits.clone(), self.step.clone()
        super().learn(sums_KD, counts_K, skipped)
        # The hits are a running mean over all ranks that starts at 0. What is new in them goes to the counts.
        new_K = self.hits - self.memory * hits_K
        self.counts.copy_(torch.where(self.step > step, self.memory * self.counts + new_K, self.counts))

    @torch.no_grad()
    def revive(self, x_ND: Tensor, valid_N: Tensor) -> None:
        candidates_KD, any_valid = sample_rows(x_ND, valid_N, self.size, self.sync)
        mean = self.counts.mean()
        relative = self.dead_threshold < 1
        dead_K = (self.counts < (self.dead_threshold * mean if relative else self.dead_threshold)) & any_valid
        dead_K &= ~self.frozen
        self.codes.copy_(torch.where(dead_K[:, None], candidates_KD, self.codes))
        self.counts.copy_(torch.where(dead_K, mean if relative else self.dead_threshold, self.counts))
