"""Choices drawn from logits, and what is refused before and after."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def choose(logits: Tensor, uniform: Tensor, temperature: float, top_p: float) -> Tensor:
    """Choices int64 [...] from logits [..., n], by the uniform numbers [...]."""
    if temperature == 0:
        return logits.argmax(-1)
    probs = (logits / temperature).softmax(-1)
    if top_p == 1:
        return inverse(probs, uniform)
    probs, order = probs.sort(dim=-1, descending=True, stable=True)
    probs = torch.where(probs.cumsum(-1) - probs < top_p, probs, 0.0)
    return order.gather(-1, inverse(probs, uniform)[..., None]).squeeze(-1)


def inverse(probs: Tensor, uniform: Tensor) -> Tensor:
    """The choices int64 [...] at which the running sums of probs [..., n] pass the uniform numbers [...]."""
    sums = probs.cumsum(-1)
    return (sums <= uniform[..., None] * sums[..., -1:]).sum(-1).clamp(max=probs.shape[-1] - 1)


def check_drawing(temperature: float, top_p: float, guidance: float) -> None:
    """Refuse values of `Head.sample` with which nothing can be drawn."""
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature={temperature!r} must be a finite number of at least 0")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p!r} must be above 0 and at most 1")
    if not 0 <= guidance < math.inf:
        raise ValueError(f"guidance={guidance!r} must be a finite number of at least 0; 1 leaves it out")


def check_drawn(tokens: Tensor) -> None:
    """Refuse tokens of which some could not be drawn; only on the CPU, where looking costs nothing."""
    if torch.compiler.is_compiling() or tokens.device.type != "cpu":
        return
    bad = int((tokens < 0).sum())
    if bad:
        raise ValueError(
            f"the logits of {bad:,} of {tokens.numel():,} tokens are NaN or infinite, so that nothing can be drawn: "
            "look for NaN in the hidden states and in the head's weights, and for a guidance that is too large"
        )
