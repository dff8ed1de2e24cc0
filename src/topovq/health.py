"""How a codebook does, from the running use of its codes and from how far they moved: on plain tensors.

    usage       share of the codes chosen lately: once in the last 1 / (1 - decay) updates, whatever was before
    perplexity  exp(entropy) of the running use: from 1 (one code) to K (all alike)
    dead_codes  how many codes were not chosen lately
    drift       RMS distance of the codes to where they were when last asked, over their RMS distance to their mean:
                0.01 is a codebook that hardly moves. nan where there is nothing to compare: the first time, or where
                all codes are the same
    tokens      how many tokens the figures rest on: those of the last 1 / (1 - decay) updates

`hits` is the running mean of how often each code is chosen per batch, `idle` the number of updates since it last was.
`decay` is that of `hits`. Nothing here waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Health(NamedTuple):
    """What `vq.health()` returns; over several codebooks `dead_codes` is the sum, the others are means."""

    usage: float
    """Share of the codes chosen in the last 1 / (1 - decay) updates."""
    perplexity: float
    """exp(entropy) of the running use of the codes."""
    dead_codes: int
    """Codes that were not chosen lately."""
    drift: float
    """How far the codes moved since health was last asked, in units of their spread; nan the first time."""
    tokens: int
    """Tokens that usage, perplexity and dead codes rest on."""


def used(idle_K: Tensor, decay: float) -> Tensor:
    """Which codes were chosen in the last 1 / (1 - decay) updates, bool [K]."""
    return (idle_K >= 0) & (idle_K < round(1 / (1 - decay)))  # below 0: what a loader that knew no `idle` left there


def usage(idle_K: Tensor, decay: float) -> Tensor:
    return used(idle_K, decay).float().mean()


def chosen_by_hits(hits_K: Tensor, decay: float) -> Tensor:
    """Which codes were chosen lately, as well as `hits` alone can tell, bool [K]: for states without `idle`."""
    once = (1 - decay) * decay ** (1 / (1 - decay))
    return hits_K > once * (1 - 1e-3) if decay else hits_K > 0


def perplexity(hits_K: Tensor) -> Tensor:
    share_K = hits_K / hits_K.sum().clamp(min=torch.finfo(hits_K.dtype).tiny)
    return torch.exp(torch.special.entr(share_K).sum())


def drift(codes_KD: Tensor, before_KD: Tensor | None) -> Tensor:
    codes_KD = codes_KD.float()
    if before_KD is None:
        return codes_KD.new_full((), math.nan)
    moved = (codes_KD - before_KD.to(codes_KD)).square().sum(1).mean().sqrt()
    spread = (codes_KD - codes_KD.mean(0)).square().sum(1).mean().sqrt()
    return torch.where(spread > 0, moved / spread, math.nan)


@torch.no_grad()
def figures(hits_K: Tensor, idle_K: Tensor, decay: float, codes_KD: Tensor, before_KD: Tensor | None) -> Tensor:
    """The figures of one codebook, float32 [5] on its device, in the order of `Health`."""
    used_K = used(idle_K, decay)
    return torch.stack(
        [
            used_K.float().mean(),
            perplexity(hits_K).float(),
            (~used_K).sum().float(),
            drift(codes_KD, before_KD),
            hits_K.sum().float() / (1 - decay),
        ]
    )


def together(several: Sequence[Tensor]) -> Tensor:
    """The figures of several codebooks as those of one, float32 [5]."""
    stacked_B5 = torch.stack(list(several))
    means_5, dead = stacked_B5.mean(0), stacked_B5[:, 2].sum(0, keepdim=True)
    return torch.cat([means_5[:2], dead, means_5[3:]])


def as_health(values: Sequence[float]) -> Health:
    """Figures that have arrived on the host."""
    share, perplexed, dead, moved, tokens = values
    return Health(share, perplexed, round(dead), moved, round(tokens))
