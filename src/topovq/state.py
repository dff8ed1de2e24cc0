"""The state of a codebook, and what it stays through casting, saving and loading, whoever does them.

Statistics are float32 at least: half precision would round slow averages away. Loaders differ in what they call
(`load_state_dict` with all tensors or one at a time, `assign=True`, or nothing at all: they may write into a module's
dictionaries), so that what a loader may leave behind is looked at again where training or evaluation begins.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Self

import torch
from torch import Tensor, nn

from topovq import metrics
from topovq.neighborhood import Neighborhood
from topovq.ops.direct import plain
from topovq.ops.use import NEVER

HALF = (torch.float16, torch.bfloat16)
WHOLE = ("codes", "hits", "step")  # what every state has, but not one that a loader hands over tensor by tensor


class CodebookState(nn.Module):
    """The tensors of K codes of D dimensions on a map."""

    codes: Tensor  # [K, D]
    sums: Tensor  # [K, D], m
    counts: Tensor  # [K], N
    hits: Tensor  # [K], running mean of how often each code is chosen per batch
    idle: Tensor  # int32 [K], updates since each code was last chosen; NEVER or more: never
    step: Tensor  # int64: updates so far
    skipped: Tensor  # int64: vectors seen in training that do not count (ops/bound.py)
    frozen: Tensor  # bool [K]
    initialized: Tensor  # bool
    grid_shape: Tensor  # int64 [grid axes]: what the order of the codes means
    received: Tensor | None  # [K], running mean of each code's weight per batch, where `counts` is another thing
    pending: Tensor | None  # statistics of forwards that are still to be learned from
    drawn: Tensor | None  # [K], where data is to replace codes that are parameters: their first dimension, as drawn

    def __init__(
        self,
        codes_KD: Tensor,
        neighborhood: Neighborhood,
        *,
        count_init: float,
        learnable: bool,
        memory: float,
        initialized: bool,
        follow_weight: bool,
    ) -> None:
        """`memory` is the decay of `hits`; `follow_weight` asks for `received`."""
        super().__init__()
        self.neighborhood = neighborhood
        self.learnable = learnable
        self.memory = memory
        size, dtype = codes_KD.shape[0], codes_KD.dtype
        counts = torch.full((size,), float(count_init), dtype=dtype)
        if learnable:
            self.codes = nn.Parameter(codes_KD)
        else:
            self.register_buffer("codes", codes_KD)
            self.register_buffer("sums", codes_KD.clone())
            self.register_buffer("counts", counts)
        self.register_buffer("hits", torch.zeros(size, dtype=dtype))
        self.register_buffer("idle", torch.full((size,), NEVER, dtype=torch.int32))
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))
        self.register_buffer("skipped", torch.zeros((), dtype=torch.int64))
        self.register_buffer("frozen", torch.zeros(size, dtype=torch.bool))
        self.register_buffer("initialized", torch.tensor(initialized))
        self.register_buffer("grid_shape", torch.tensor(neighborhood.grid.shape))
        self.register_buffer("received", counts.clone() if follow_weight else None)
        self.register_buffer("drawn", codes_KD[:, 0].clone() if learnable and not initialized else None)
        self.register_buffer("pending", None, persistent=False)
        # On the host, so that no step asks the device: whether the codes have their start, whether anything is pending.
        self.starts = not initialized  # from the first batch
        self.is_initialized = initialized
        self.is_pending = False

    @property
    def size(self) -> int:
        return self.codes.shape[0]

    def new_pending(self) -> Tensor:
        """Zeros for a batch's sums, counts and skipped vectors, side by side: [K * D + K + 1]."""
        return self.codes.new_zeros(self.codes.numel() + self.size + 1)

    # What loaders that write into a module's dictionaries leave behind

    def settle(self) -> None:
        """Statistics become float32 again, and a start that the loaded codes had is known. Cheap once that is so."""
        if torch.compiler.is_exporting():
            return
        if self.codes.dtype in HALF or self._buffers["hits"].dtype in HALF:  # type: ignore[union-attr]
            evaluates = not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
            with torch.inference_mode(False) if evaluates else nullcontext():  # what is made within cannot be trained
                self._make_float32()
        if not self.is_initialized and self._has_values(self.initialized):
            self.is_initialized = bool(self.initialized) or not self.starts

    def _make_float32(self) -> None:
        for name, buffer in list(self._buffers.items()):
            if buffer is not None and buffer.dtype in HALF:
                setattr(self, name, buffer.float())
        if not self.learnable:  # rounded on their own, sums and counts would pull the codes away
            self.sums = self.codes * self.counts[:, None]
        elif not torch.compiler.is_compiling():  # the compiler takes no parameter that changes its type
            self.codes.data = self.codes.data.float()

    def was_filled(self) -> Tensor:
        """Whether codes that may move are others than those drawn at random, which equal their sums and never moved.

        bool, 0-dim, on the device. For those who copied codes, but not `initialized`.
        """
        if not self.learnable:
            others_K = (self.codes != self.sums).any(1)
        elif self.drawn is not None:
            others_K = self.codes[:, 0] != self.drawn
        else:
            others_K = torch.zeros_like(self.frozen)
        return (others_K & ~self.frozen).any() | (self.step > 0)

    def _has_values(self, tensor: Tensor) -> bool:
        """Whether a value may be asked for: not while something is traced, and not while a CUDA graph is recorded."""
        if not plain(tensor) or tensor.is_meta:
            return False
        return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())

    def train(self, mode: bool = True) -> Self:
        self.settle()
        return super().train(mode)

    # Casting

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def keep_precision(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            lower = tensor.is_floating_point() and moved.dtype in HALF
            return tensor.to(moved.device) if lower else moved

        self.settle()
        super()._apply(keep_precision, recurse)  # type: ignore[no-untyped-call]  # of torch
        return self

    # Saving and loading

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.is_pending and self.pending is not None:  # only then: a state has the same keys at every other time
            destination[f"{prefix}pending"] = self.pending if keep_vars else self.pending.detach()

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
        # A layer under two names is saved under one: of the other nothing is there, and that is what must be reported.
        if any(name.startswith(prefix) for name in state):
            self._complete(state, prefix, errors)
        super()._load_from_state_dict(state, prefix, metadata, strict, missing, unexpected, errors)
        if self._has_values(self.initialized):
            self.is_initialized = bool(self.initialized) or not self.starts

    def _complete(self, state: dict[str, Any], prefix: str, errors: list[str]) -> None:
        """Make of a stored state one of this codebook: from before a buffer existed, in half precision, on a map."""
        key, shape = f"{prefix}grid_shape", self.neighborhood.grid.shape
        stored = tuple(state[key].tolist()) if key in state else shape  # other libraries know no map
        if stored != shape and self.neighborhood.kind != "none":
            grid = stored if math.prod(stored) == self.size else f"Grid({stored}, size={self.size})"
            errors.append(
                f"the codes of {prefix or 'this state'} lie on a map of shape {stored}, this codebook's is {shape}: "
                f"build it with grid={grid}, or leave {key!r} out of the state to give the codes other places"
            )
        whole = all(prefix + name in state for name in WHOLE)
        if whole or key in state:
            state[key] = torch.tensor(shape, device=state[key if key in state else f"{prefix}codes"].device)
        if whole:
            self._round_together(state, prefix)
            hits_K = state[f"{prefix}hits"]
            state.setdefault(f"{prefix}idle", torch.where(metrics.chosen_by_hits(hits_K, self.memory), 0, NEVER).int())
            self._load_pending(state.pop(f"{prefix}pending", None), prefix, errors)
            if self.received is not None:
                state.setdefault(f"{prefix}received", state.get(f"{prefix}counts", self.received))
            if self.drawn is not None:
                state.setdefault(f"{prefix}drawn", state[f"{prefix}codes"][:, 0].clone())
        for name in ("received", "drawn"):  # of a codebook that revives codes, or takes its start from data
            if getattr(self, name) is None:
                state.pop(prefix + name, None)

    def _round_together(self, state: dict[str, Any], prefix: str) -> None:
        """As `settle`, before tensors of half precision are copied into those of float32, which it would not see."""
        rounded = state[f"{prefix}codes"].dtype in HALF
        for name, tensor in list(state.items()):
            if name.startswith(prefix) and tensor.dtype in HALF:
                state[name] = tensor.float()
        if rounded and not self.learnable and f"{prefix}counts" in state:
            state[f"{prefix}sums"] = state[f"{prefix}codes"] * state[f"{prefix}counts"][:, None]

    def _load_pending(self, stored: Tensor | None, prefix: str, errors: list[str]) -> None:
        self.is_pending = stored is not None
        if stored is None:
            if self.pending is not None:
                self.pending.zero_()
            return
        expected = self.new_pending() if self.pending is None else self.pending
        if stored.shape != expected.shape:
            errors.append(
                f"{prefix}pending of shape {tuple(stored.shape)} does not fit: expected {tuple(expected.shape)}"
            )
            return
        self.pending = expected
        self.pending.copy_(stored)
