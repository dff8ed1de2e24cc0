"""The codebook: its state, and Kohonen's mini-batch rule that moves it.

Legend: N vectors, K codes w, D dimensions; m sums, N_k counts (running); S, c the sums and counts of one batch;
A the neighborhood matrix at step t; beta = 1 - decay.

    m <- decay * m + beta * A^T S        N <- decay * N + beta * A^T c        w = m / N

With A = I this is EMA-VQ. Two details decide how it behaves (see docs/learning-rules.md):
    update_empty     True: every m and N decays at every step, and N is smoothed additively:
                     N~ = (N + eps) / (sum N + K eps) * sum N.
                     False: a code that receives no weight in this batch keeps m, N and w, and nothing is smoothed.
    count_smoothing  "carried": N~ replaces N (the paper's numbers); "copy": N~ only divides m.

Statistics stay float32 through .half(), .bfloat16() and autocast, and are changed in place: their addresses never
change. Nothing here waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from topovq import health, ranks
from topovq.neighborhood import Neighborhood
from topovq.ops.accumulate import accumulate
from topovq.ops.nearest import nearest
from topovq.ops.update import update

COUNT_SMOOTHINGS = ("carried", "copy")


class Codebook(nn.Module):
    """K codes of D dimensions on a map, with the running statistics that move them."""

    codes: Tensor  # [K, D]
    sums: Tensor  # [K, D], m
    counts: Tensor  # [K], N
    hits: Tensor  # [K], running mean of how often each code is chosen per batch
    step: Tensor  # int64: updates so far
    skipped: Tensor  # int64: vectors with NaN or infinity seen in training
    frozen: Tensor  # bool [K]
    initialized: Tensor  # bool
    grid_shape: Tensor  # int64 [grid axes]: what the order of the codes means
    pending: Tensor | None  # statistics of forwards that are still to be learned from
    codes_before: Tensor | None  # [K, D], the codes before the last update
    step_before: Tensor | None  # int64, its number

    def __init__(
        self,
        dim: int,
        neighborhood: Neighborhood,
        *,
        metric: str = "euclidean",
        precision: str = "exact",
        decay: float = 0.99,
        eps: float = 1e-5,
        count_init: float = 1.0,
        update_empty: bool = True,
        count_smoothing: str = "carried",
        dead_threshold: float = 0.0,
        kmeans_init: bool = False,
        kmeans_iters: int = 10,
        learnable: bool = False,
        ema_update: bool = True,
        sync: bool = True,
    ) -> None:
        super().__init__()
        if not 0 <= decay < 1:
            raise ValueError(f"decay={decay!r} must be at least 0 and below 1 (0.99 is usual)")
        if not 0 < eps < math.inf:
            raise ValueError(f"eps={eps!r} must be above 0 (1e-5 is usual)")
        if not 0 <= count_init < math.inf:
            raise ValueError(f"count_init={count_init!r} must be at least 0 (1 is right, 0 reproduces a common fault)")
        if count_smoothing not in COUNT_SMOOTHINGS:
            choices = ", ".join(map(repr, COUNT_SMOOTHINGS))
            raise ValueError(f"count_smoothing={count_smoothing!r} is unknown; choose one of {choices}")
        if not 0 <= dead_threshold < 1:
            raise ValueError(
                f"threshold_ema_dead_code={dead_threshold!r} must be at least 0 and below 1: it is a share of the mean "
                "count (a code chosen less than that often is revived), not an absolute count"
            )
        if dead_threshold and (learnable or not ema_update):
            raise ValueError(
                f"threshold_ema_dead_code={dead_threshold!r} needs running counts, which codes that follow the "
                "gradient, or nothing (ema_update=False), do not have: leave it out"
            )
        if kmeans_iters < 0:
            raise ValueError(f"kmeans_iters={kmeans_iters!r} must be at least 0 (0 starts from vectors of the data)")
        self.neighborhood = neighborhood
        self.metric = metric
        # Cosine's codes and vectors have length one; a layer whose codes keep their lengths sets this to False.
        self.unit_length = metric == "cosine"
        self.precision = precision
        self.decay = decay
        self.eps = eps
        self.count_init = count_init
        self.update_empty = update_empty
        self.count_smoothing = count_smoothing
        self.dead_threshold = dead_threshold
        self.kmeans_iters = kmeans_iters
        self.ema_update = ema_update
        self.sync = sync
        self.accumulating = False
        # The codes when their health was last read. No buffer: it is nobody's state but this process's.
        self.codes_read: Tensor | None = None

        size = neighborhood.grid.size
        codes = torch.randn(size, dim)
        if self.unit_length:
            codes = F.normalize(codes, dim=1)
        if learnable:
            self.codes = nn.Parameter(codes)
        else:
            self.register_buffer("codes", codes)
            self.register_buffer("sums", codes.clone())
            self.register_buffer("counts", torch.full((size,), float(count_init)))
        self.learnable = learnable
        self.register_buffer("hits", torch.zeros(size))
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))
        self.register_buffer("skipped", torch.zeros((), dtype=torch.int64))
        self.register_buffer("frozen", torch.zeros(size, dtype=torch.bool))
        self.register_buffer("initialized", torch.tensor(not kmeans_init))
        self.register_buffer("grid_shape", torch.tensor(neighborhood.grid.shape))
        # On the host, so that no step asks the device whether the codebook has been initialized.
        self.is_initialized = not kmeans_init
        self.register_buffer("pending", None, persistent=False)
        self.register_buffer("codes_before", None, persistent=False)
        self.register_buffer("step_before", None, persistent=False)

    @property
    def size(self) -> int:
        return self.codes.shape[0]

    # Using the codes

    def search(self, x_ND: Tensor, codes_KD: Tensor | None = None) -> Tensor:
        """Index int64 [N] of the closest code."""
        return nearest(x_ND, self.codes if codes_KD is None else codes_KD, self.metric, self.precision)

    def free_codes(self) -> Tensor:
        """The codes, of which the frozen ones pass no gradient on."""
        return torch.where(self.frozen[:, None], self.codes.detach(), self.codes)

    @torch.no_grad()
    def set_codes(self, codes_KD: Tensor) -> None:
        """Put these codes in place, with sums and counts that agree, so that learning goes on from them."""
        if codes_KD.shape != self.codes.shape:
            raise ValueError(f"codes of shape {tuple(codes_KD.shape)} do not fit: expected {tuple(self.codes.shape)}")
        self.codes.copy_(F.normalize(codes_KD, dim=1) if self.unit_length else codes_KD)
        if not self.learnable:
            self.counts.fill_(self.count_init or 1.0)
            self.sums.copy_(self.codes * self.counts[:, None])
        self.initialized.fill_(True)
        self.is_initialized = True

    # Learning

    @torch.no_grad()
    def learn(self, sums_KD: Tensor, counts_K: Tensor, skipped: Tensor) -> None:
        """One update from this rank's sums and counts of the vectors that chose each code, over all ranks.

        Where no rank has a vector to learn from, nothing changes. `skipped` is the number of vectors that were left
        out for NaN or infinity.
        """
        distributed = self.sync and ranks.world_size() > 1
        if distributed or self.pending is not None:
            # One buffer, one all-reduce.
            stats = torch.cat([sums_KD.flatten(), counts_K, skipped.to(sums_KD.dtype).view(1)])
            if self.pending is not None:
                if self.accumulating:
                    self.pending.add_(stats)
                    return
                stats = stats + self.pending
                self.pending.zero_()
            if distributed:
                stats = ranks.sum_over_ranks(stats)
            sums_KD = stats[: sums_KD.numel()].view_as(sums_KD)
            counts_K, skipped = stats[sums_KD.numel() : -1], stats[-1].long()
        self.skipped += skipped
        if self.learnable or not self.ema_update:
            live = counts_K.sum() > 0
            self.hits.copy_(torch.where(live, self.decay * self.hits + (1 - self.decay) * counts_K, self.hits))
            self.step += live
            return
        update(
            self.codes,
            self.sums,
            self.counts,
            self.hits,
            self.step,
            self.frozen,
            sums_KD,
            counts_K,
            self.neighborhood.grid,
            self.neighborhood.course,
            decay=self.decay,
            eps=self.eps,
            update_empty=self.update_empty,
            carried=self.count_smoothing == "carried",
            cosine=self.unit_length,
        )

    @torch.no_grad()
    def revive(self, x_ND: Tensor, valid_N: Tensor) -> None:
        """Codes whose count is under `dead_threshold` of the mean start anew at vectors of this batch.

        They get the mean count, with a sum to match: a revived code has as long to prove itself as any other.
        """
        candidates_KD, any_valid = sample_rows(x_ND, valid_N, self.size, self.sync)
        mean = self.counts.mean()
        dead_K = (self.counts < self.dead_threshold * mean) & any_valid & ~self.frozen
        self.codes.copy_(torch.where(dead_K[:, None], candidates_KD, self.codes))
        self.sums.copy_(torch.where(dead_K[:, None], candidates_KD * mean, self.sums))
        self.counts.copy_(torch.where(dead_K, mean, self.counts))

    @torch.no_grad()
    def initialize(self, x_ND: Tensor, valid_N: Tensor) -> None:
        """Start from the first batch: vectors drawn from it, then `kmeans_iters` steps of Lloyd's algorithm.

        An empty batch is none: the next one starts the codes. One without a valid vector counts, since only the device
        knows, but leaves the codes as they are. Frozen codes stay where they are.
        """
        if not x_ND.shape[0] and not (self.sync and ranks.world_size() > 1):
            return
        codes_KD, any_valid = sample_rows(x_ND, valid_N, self.size, self.sync)
        for _ in range(self.kmeans_iters):
            index_N = torch.where(valid_N, self.search(x_ND, codes_KD), -1)
            sums_KD, counts_K = accumulate(x_ND, index_N, self.size)
            stats = torch.cat([sums_KD, counts_K[:, None]], 1)
            stats = ranks.sum_over_ranks(stats) if self.sync else stats
            counts_K1 = stats[:, -1:]
            codes_KD = torch.where(counts_K1 > 0, stats[:, :-1] / counts_K1.clamp(min=1), codes_KD)
        self.set_codes(torch.where(any_valid & ~self.frozen[:, None], codes_KD, self.codes))

    @contextmanager
    def accumulate_updates(self) -> Iterator[None]:
        """Within, statistics are gathered and no code moves; the first update outside uses all of them."""
        if self.pending is None:
            self.pending = self.codes.new_zeros(self.codes.numel() + self.size + 1)
        self.accumulating = True
        try:
            yield
        finally:
            self.accumulating = False

    def remember(self) -> None:
        """Keep codes and step as they are now, for a forward that will be run once more in the backward pass."""
        if self.codes_before is None or self.step_before is None:
            self.codes_before, self.step_before = self.codes.detach().clone(), self.step.clone()
        else:
            self.codes_before.copy_(self.codes.detach())
            self.step_before.copy_(self.step)

    def remembered(self) -> tuple[Tensor, Tensor]:
        """(codes, step) as they were kept; as they are, where nothing was."""
        if self.codes_before is None or self.step_before is None:
            return self.codes, self.step
        return self.codes_before, self.step_before

    # Reading how it goes

    def perplexity(self) -> Tensor:
        """exp(entropy) of the running use of the codes: from 1 (one code) to K (all alike)."""
        return health.perplexity(self.hits)

    def usage(self) -> Tensor:
        """Share of the codes chosen lately: once in the last 1 / (1 - decay) updates is enough."""
        return health.usage(self.hits, self.decay)

    def read_health(self) -> Tensor:
        """The figures of `health.Health`, float32 [5]; drift is since the last call."""
        before_KD, self.codes_read = self.codes_read, self.codes.detach().clone()
        return health.figures(self.hits, self.decay, self.codes, before_KD)

    # Keeping the state what it is

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Codebook:
        def keep_precision(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            lower = tensor.is_floating_point() and moved.dtype in (torch.float16, torch.bfloat16)
            return tensor.to(moved.device) if lower else moved

        return super()._apply(keep_precision, recurse)

    def _load_from_state_dict(
        self,
        state: dict[str, Any],
        prefix: str,
        metadata: Any,
        strict: bool,
        missing: Any,
        unexpected: Any,
        errors: Any,
    ) -> None:
        key, shape = f"{prefix}grid_shape", self.neighborhood.grid.shape
        stored = tuple(state[key].tolist()) if key in state else shape  # other libraries know no map
        if stored != shape and self.neighborhood.kind != "none":
            grid = stored if math.prod(stored) == self.size else f"Grid({stored}, size={self.size})"
            errors.append(
                f"the codes of {prefix or 'this state'} lie on a map of shape {stored}, this codebook's is {shape}: "
                f"build it with grid={grid}, or leave {key!r} out of the state to give the codes other places"
            )
        state[key] = torch.tensor(shape)
        super()._load_from_state_dict(state, prefix, metadata, strict, missing, unexpected, errors)
        self.is_initialized = bool(self.initialized)

    def extra_repr(self) -> str:
        return f"{self.size} codes of {self.codes.shape[1]} dimensions, {self.neighborhood}"


def sample_rows(x_ND: Tensor, valid_N: Tensor, count: int, sync: bool) -> tuple[Tensor, Tensor]:
    """(rows [count, D] float32, whether there was any): valid vectors of all ranks, the same on each rank.

    Vectors repeat only where there are fewer than `count`. A rank without a valid vector adds nothing and waits for
    nobody; no rank asks its device anything.
    """
    n = x_ND.shape[0]
    distributed = sync and ranks.world_size() > 1
    share_R = valid_N.new_zeros(ranks.world_size() if distributed else 1, dtype=torch.int64)
    here = ranks.rank() if distributed else 0
    share_R[here] = valid_N.sum()
    if distributed:
        share_R = ranks.sum_over_ranks(share_R)
    total = share_R.sum()
    start = share_R[:here].sum()
    slot = torch.arange(count, device=x_ND.device)
    # Spread evenly over the vectors of all ranks, of which this rank holds those from `start` on.
    place = torch.where(total > count, slot * total // count, slot % total.clamp(min=1)) - start
    mine = (place >= 0) & (place < share_R[here])
    rows = x_ND.new_zeros(count, x_ND.shape[1], dtype=torch.promote_types(x_ND.dtype, torch.float32))
    if n:
        order_N = torch.where(valid_N, torch.rand(n, device=x_ND.device), 2.0).argsort()
        rows = torch.where(mine[:, None], x_ND[order_N[place.clamp(0, n - 1)]].to(rows.dtype), 0)
    return (ranks.sum_over_ranks(rows) if distributed else rows), total > 0
