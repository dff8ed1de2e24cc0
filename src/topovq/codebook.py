"""The codebook: its state, and the rules that move it.

Legend: N vectors, K codes w, D dimensions; m sums, N_k counts (running); S, c the sums and counts of one batch;
A the neighborhood matrix at step t; beta = 1 - decay.

Kohonen's mini-batch rule, for a neighborhood by name:
    m <- decay * m + beta * A^T S        N <- decay * N + beta * A^T c        w = m / N

With A = I this is EMA-VQ. Two details decide how it behaves (see docs/explanation/rule.md):
    update_empty     True: every m and N decays at every step, and N is smoothed additively:
                     N~ = (N + eps) / (sum N + K eps) * sum N.
                     False: a code that receives no weight in this batch keeps m, N and w, and nothing is smoothed.
    count_smoothing  "carried": N~ replaces N (the paper's numbers); "copy": N~ only divides m.

"ride", the recommended rule: each code has EMA-VQ's mean of its own vectors, and rides along with its neighbors.
    m <- decay * m + beta * S            N <- decay * N + beta * c
    u = gain * (A^T F - lam * (A^T c) * w) / max(A^T c, 1),  F = S - (1 - lam) * c * w
    w <- m / N + u                       m <- m + N * u                     m / N is w where N <= 1e-20
u_k is gain times the mean of (x - w_j) + lam * (w_j - w_k) over vectors x, whose winner is j, weighted by A_jk: how far
the vectors of the neighborhood are from their codes, and a weak pull to those. lam = 1 is Kohonen's x - w_k. It is
PULL * beta / gain / sqrt(1 + t / PULL_SPAN), at most 1, so that the pull is a share of a code's own, whatever decay is.
A reaches less than 8 cells and never narrows (ops/ride.py). A code has its start from the first batch (ops/starts.py),
and dead ones come back beside busy neighbors (ops/ride.py), unless dead_threshold asks for another way. Counts are
never smoothed: eps and count_smoothing mean nothing here, and with update_empty=False a code that no vector chose keeps
m and N but rides. neighborhood.py has the numbers.

With decay = 1 codes stay where they start. Statistics are changed in place: their addresses never change. Nothing here
waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from topovq import distributed, metrics
from topovq.neighborhood import Neighborhood
from topovq.ops.accumulate import accumulate
from topovq.ops.bound import alone, counted
from topovq.ops.direct import in_backward, may_be_recomputed
from topovq.ops.recall import Recall
from topovq.ops.search import nearest
from topovq.ops.smooth import smooth
from topovq.ops.snapshot import held, snapshot
from topovq.ops.starts import lay_map, sample_rows
from topovq.ops.update import Batch, Rule, State, update
from topovq.ops.use import follow_use
from topovq.state import CodebookState

COUNT_SMOOTHINGS = ("carried", "copy")
BUFFERS = ("sums", "counts", "hits", "idle", "step", "skipped", "frozen")  # what State has beside the codes
USUAL_DECAY = 0.99  # of the figures, where decay = 1 would never change them


class Turn(NamedTuple):
    """One batch's turn with a codebook, between `Codebook.begin` and `Codebook.finish`."""

    codes_KD: Tensor
    """The codes to search, and the step they are of."""
    step: Tensor
    learns: bool
    """Whether this batch is one to learn from, by an update or by a gradient."""
    moves: bool
    """Whether `finish` updates: not in activation checkpointing's second forward, whose first one did."""
    valid_N: Tensor | None
    """Which vectors codes may start from, where any may have to."""
    keep_N: Tensor | None = None
    """Which vectors are to be used; None: all."""
    far: Tensor | None = None
    """How many are not for being too far, beside those that the search leaves out; None: none."""


class Codebook(CodebookState):
    """K codes of D dimensions on a map, with the running statistics that move them."""

    def __init__(
        self,
        dim: int,
        neighborhood: Neighborhood,
        *,
        ride: bool = False,
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
        if not 0 <= decay <= 1:
            raise ValueError(f"decay={decay!r} must be from 0 to 1 (0.99 is usual, 1 keeps the codes where they start)")
        if not 0 < eps < math.inf:
            raise ValueError(f"eps={eps!r} must be above 0 (1e-5 is usual)")
        if not 0 <= count_init < math.inf:
            raise ValueError(f"count_init={count_init!r} must be at least 0 (1 is right, 0 reproduces a common fault)")
        if count_smoothing not in COUNT_SMOOTHINGS:
            choices = ", ".join(map(repr, COUNT_SMOOTHINGS))
            raise ValueError(f"count_smoothing={count_smoothing!r} is unknown; choose one of {choices}")
        if not 0 <= dead_threshold < math.inf:
            raise ValueError(
                f"threshold_ema_dead_code={dead_threshold!r} must be 0 (never), a share of the mean count below 1, or "
                "a count of vectors per batch of at least 1: a code chosen less than that often is revived"
            )
        moves = ema_update and decay < 1
        starts = kmeans_init or (ride and moves)
        if dead_threshold and (learnable or not moves):
            raise ValueError(
                f"threshold_ema_dead_code={dead_threshold!r} needs running counts, which codes that follow the "
                "gradient, or nothing (ema_update=False, decay=1), do not have: leave it out"
            )
        if kmeans_iters < 0:
            raise ValueError(f"kmeans_iters={kmeans_iters!r} must be at least 0 (0 starts from vectors of the data)")
        size = neighborhood.grid.size
        codes = torch.randn(size, dim, dtype=torch.promote_types(torch.get_default_dtype(), torch.float32))
        super().__init__(
            F.normalize(codes, dim=1) if metric == "cosine" else codes,
            neighborhood,
            count_init=count_init,
            learnable=learnable,
            memory=decay if decay < 1 else USUAL_DECAY,
            initialized=not starts,
            # Where empty codes keep their counts, those do not tell how much a code received lately.
            follow_weight=dead_threshold > 0 and not update_empty,
        )
        self.ride = ride
        self.kmeans_init = kmeans_init
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
        self.ema_update = moves
        self.sync = sync
        self.accumulating = False
        self.recall = Recall()
        # The codes when their health was last read. No buffer: it is nobody's state but this process's.
        self.codes_read: Tensor | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # of torch
        self.__dict__.setdefault("recall", Recall())  # a layer that was pickled before there was one

    # A batch's turn: what every quantizer does before and after its search

    def begin(self, x_ND: Tensor, keep_N: Tensor | None, learns: bool) -> Turn:
        """Before the search: codes that have no start take it from these vectors, of which `keep_N` leaves some out."""
        self.settle()
        backward = learns and in_backward()
        moves, valid_N = learns and not backward, None
        if moves:
            if not self.is_initialized:
                self.start(x_ND, keep_N)
            if self.dead_threshold:
                valid_N = counted(x_ND, held(self.codes), learns)
                valid_N = valid_N if keep_N is None else valid_N & keep_N
            if may_be_recomputed():
                self.recall.remember(self.codes, self.step, x_ND)
        again = backward and self.recall.forwards  # then it sees what the first forward saw
        codes_KD, step = self.recall.again(x_ND) if again else (self.codes, self.step)
        far = None
        if learns and self.ema_update and x_ND.shape[0] == 1:
            near_N, far = alone(x_ND, held(codes_KD), held(step) * (1 - self.decay) > 1 - 1e-6)
            keep_N = near_N if keep_N is None else near_N & keep_N
            valid_N = None if valid_N is None else valid_N & near_N
        return Turn(codes_KD, step, learns, moves, valid_N, keep_N, far)

    def finish(
        self,
        turn: Turn,
        x_ND: Tensor,
        sums_KD: Tensor,
        counts_K: Tensor,
        skipped: Tensor,
        share_K: Tensor | None = None,
    ) -> None:
        """After the search: learn from its statistics (`learn`), then revive codes that receive too little.

        `share_K` is how much of the update each code takes: 0 leaves it as it is, 1 (None) is the whole.
        """
        if not turn.moves:
            return
        skipped = skipped if turn.far is None else skipped + turn.far
        if share_K is None:
            self.learn(sums_KD, counts_K, skipped)
        else:
            self._learn_share(share_K, sums_KD, counts_K, skipped)
        if turn.valid_N is not None and self.dead_threshold and not self.accumulating:
            self.revive(x_ND.detach(), turn.valid_N)

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
        if self.received is not None:
            self.received.copy_(self.counts)
        self.initialized.fill_(True)
        self.is_initialized = True

    # Learning

    @torch.no_grad()
    def learn(self, sums_KD: Tensor, counts_K: Tensor, skipped: Tensor) -> None:
        """One update from this rank's sums and counts of the vectors that chose each code, over all distributed.

        Where no rank has a vector to learn from, nothing changes. `skipped` is the number of vectors that do not
        count (ops/bound.py).
        """
        several = self.sync and distributed.world_size() > 1
        if several or self.pending is not None:
            # One buffer, one all-reduce.
            stats = torch.cat([sums_KD.flatten(), counts_K, skipped.to(sums_KD.dtype).view(1)])
            if self.pending is not None:
                if self.accumulating:
                    self.pending.add_(stats)
                    self.is_pending = True
                    return
                stats = stats + self.pending
                self.pending.zero_()
                self.is_pending = False
            if several:
                stats = distributed.sum_over_ranks(stats)
            sums_KD = stats[: sums_KD.numel()].view_as(sums_KD)
            counts_K, skipped = stats[sums_KD.numel() : -1], stats[-1].long()
        if self.learnable or not self.ema_update:
            self.skipped += skipped
            self.step += follow_use(self.hits, self.idle, counts_K, self.memory)
            return
        if self.received is not None:
            self._follow_weight(self.received, counts_K)
        buffers = self._buffers  # an attribute that is a buffer takes the host longer
        state = State(self.codes, *[buffers[name] for name in BUFFERS])  # type: ignore[arg-type]  # none is None here
        carried = self.count_smoothing == "carried"
        revive = self.ride and not self.dead_threshold
        rule = Rule(self.decay, self.eps, self.update_empty, carried, self.unit_length, self.ride, revive)
        update(state, Batch(sums_KD, counts_K, skipped), self.neighborhood, rule)

    @torch.no_grad()
    def _learn_share(self, share_K: Tensor, sums_KD: Tensor, counts_K: Tensor, skipped: Tensor) -> None:
        share_K, share_K1 = share_K.to(self.counts), share_K.to(self.counts)[:, None]
        before_KD, before_sums_KD, before_K = map(snapshot, (self.codes, self.sums, self.counts))
        self.learn(sums_KD, counts_K, skipped)
        self.sums.copy_(before_sums_KD.lerp(self.sums, share_K1))
        self.counts.copy_(before_K.lerp(self.counts, share_K))
        between_KD = torch.where(self.counts[:, None] > 0, self.sums / self.divisor()[:, None], self.codes)
        between_KD = F.normalize(between_KD, dim=1) if self.unit_length else between_KD
        whole_KD = torch.where((share_K1 == 1) | self.frozen[:, None], self.codes, between_KD)
        self.codes.copy_(torch.where(share_K1 == 0, before_KD, whole_KD))

    def divisor(self) -> Tensor:
        """What m is divided by to give w, [K]: N, smoothed where the rule smooths a copy."""
        if self.ride or not self.update_empty or self.count_smoothing == "carried":
            return self.counts
        total = self.counts.sum()
        return (self.counts + self.eps) / (total + self.size * self.eps) * total

    def _follow_weight(self, received_K: Tensor, counts_K: Tensor) -> None:
        """Move the running weight of the codes by a batch's counts, before `update` moves the rest.

        It is at least `hits`, which are without neighbors and start from 0, and at most `counts`, which only decay in
        updates that give a code something. A loader that knew no `received` may have left anything there.
        """
        weight_K = counts_K
        if not self.ride:
            _, weight_K = smooth(counts_K[:, None], counts_K, self.neighborhood, self.step)
        sound_K = torch.maximum(self.hits, torch.minimum(received_K.nan_to_num(), self.counts))
        moved_K = self.decay * sound_K + (1 - self.decay) * weight_K
        received_K.copy_(held(torch.where(counts_K.sum() > 0, moved_K, received_K)))

    @torch.no_grad()
    def revive(self, x_ND: Tensor, valid_N: Tensor) -> None:
        """Codes that received too little lately start anew at vectors of this batch.

        A `dead_threshold` below 1 is a share of the mean count: revived codes get the mean, with a sum to match, and
        have as long to prove themselves as any other. One of at least 1 is a count of vectors per batch, which revived
        codes get.
        """
        candidates_KD, any_valid = sample_rows(x_ND, valid_N, self.size, self.sync)
        recent_K = self.counts if self.received is None else self.received
        relative = self.dead_threshold < 1
        least = self.dead_threshold * recent_K.mean() if relative else self.dead_threshold
        dead_K = (recent_K < least) & any_valid & ~self.frozen
        for running_K in (self.counts,) if self.received is None else (self.received, self.counts):
            count = running_K.mean() if relative else self.dead_threshold
            running_K.copy_(torch.where(dead_K, count, running_K))
        self.codes.copy_(torch.where(dead_K[:, None], candidates_KD, self.codes))
        self.sums.copy_(torch.where(dead_K[:, None], candidates_KD * self.counts[:, None], self.sums))

    def start(self, x_ND: Tensor, keep_N: Tensor | None) -> None:
        """`initialize`, from those of the vectors that count, of which `keep_N` leaves some out."""
        valid_N = counted(x_ND, None, learns=True)
        self.initialize(x_ND.detach(), valid_N if keep_N is None else valid_N & keep_N)

    @torch.no_grad()
    def initialize(self, x_ND: Tensor, valid_N: Tensor) -> None:
        """Start from the first batch: as a map laid over it, or with `kmeans_init` from vectors drawn from it, then
        `kmeans_iters` steps of Lloyd's algorithm.

        A batch without a valid vector is none: the next one starts the codes. Where only the device knows, in a
        compiled or captured step, such a batch counts, but leaves the codes as they are. Frozen codes stay where they
        are, and so do codes that came from elsewhere in whatever way.
        """
        if not x_ND.shape[0] and not (self.sync and distributed.world_size() > 1):
            return
        if self.kmeans_init:
            codes_KD, any_valid = self._k_means(x_ND, valid_N)
            count = torch.ones_like(any_valid, dtype=self.hits.dtype)
        else:
            grid = self.neighborhood.grid
            codes_KD, vectors = lay_map(x_ND, valid_N, grid, self.metric, self.precision, self.sync)
            any_valid, count = vectors > 0, (vectors / self.size).to(self.hits)  # as the running counts will be
        known = self.initialized | self.was_filled()
        if self.unit_length:
            codes_KD = F.normalize(codes_KD, dim=1)
        starts_K = any_valid & ~known & ~self.frozen
        self.codes.copy_(torch.where(starts_K[:, None], codes_KD, self.codes))
        if not self.learnable:  # sums to match; where only codes were filled, they are still those of other codes
            first = any_valid & ~self.initialized
            counts_K = torch.where(first & (self.counts == 0) if self.kmeans_init else starts_K, count, self.counts)
            self.counts.copy_(counts_K)
            self.sums.copy_(torch.where(first, self.codes * counts_K[:, None], self.sums))
        self.initialized.logical_or_(any_valid)
        self.is_initialized = bool(self.initialized) if self._has_values(self.initialized) else True

    def _k_means(self, x_ND: Tensor, valid_N: Tensor) -> tuple[Tensor, Tensor]:
        """(centers [K, D], whether there was any vector)."""
        codes_KD, any_valid = sample_rows(x_ND, valid_N, self.size, self.sync)
        for _ in range(self.kmeans_iters):
            index_N = torch.where(valid_N, self.search(x_ND, codes_KD), -1)
            sums_KD, counts_K = accumulate(x_ND, index_N, self.size)
            stats = torch.cat([sums_KD, counts_K[:, None]], 1)
            stats = distributed.sum_over_ranks(stats) if self.sync else stats
            counts_K1 = stats[:, -1:]
            codes_KD = torch.where(counts_K1 > 0, stats[:, :-1] / counts_K1.clamp(min=1), codes_KD)
        return codes_KD, any_valid

    @contextmanager
    def accumulate_updates(self) -> Iterator[None]:
        """Within, statistics are gathered and no code moves; the first update outside uses all of them."""
        if self.pending is None:
            self.pending = self.new_pending()
        before, self.accumulating = self.accumulating, True
        try:
            yield
        finally:
            self.accumulating = before

    # Reading how it goes

    def perplexity(self) -> Tensor:
        """exp(entropy) of the running use of the codes: from 1 (one code) to K (all alike)."""
        return metrics.perplexity(self.hits)

    def usage(self) -> Tensor:
        """Share of the codes chosen in the last 1 / (1 - decay) updates (with decay = 1: in the last 100)."""
        return metrics.usage(metrics.used_lately(self.idle, self.memory))

    def read_health(self) -> Tensor:
        """The figures of `metrics.Health`, float32 [FIGURES]; drift is since the last call."""
        before_KD, self.codes_read = self.codes_read, self.codes.detach().clone()
        return metrics.health_figures(self.hits, self.idle, self.memory, self.codes, before_KD)

    def extra_repr(self) -> str:
        how = "ride, " if self.ride else ""
        return f"{self.size} codes of {self.codes.shape[1]} dimensions, {how}{self.neighborhood}"
