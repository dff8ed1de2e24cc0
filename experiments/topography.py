"""How well the codes of a model are ordered on their maps, measured for every level."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from experiments.shifts import batches
from topovq.grid import Grid
from topovq.metrics import BLOCK, not_neighbors, topographic_error
from topovq.tokenizer.atlas import charts
from topovq.tokenizer.models import Tokenizer


@dataclass(frozen=True)
class Topography:
    """The order of one map; neighbors are those of the paper's hard neighborhood (the eight around a place in 2-D)."""

    level: str
    topographic_error: float  # share of encoder outputs whose two closest codes are not neighbors
    chance_error: float  # its value where codes lie on the map in any order
    neighbor_ratio: float  # mean distance of the codes of neighbors over that of any two codes: 1 without order
    vectors: int


def topographies(model: Tokenizer, images_BCHW: Tensor) -> list[Topography]:
    """The order of each of a model's maps, for the encoder outputs of uint8 images."""
    found = []
    for chart, x_ND in zip(charts(model), encoder_outputs(model, images_BCHW), strict=True):
        error = float(topographic_error(x_ND, chart.codes_KD.float(), chart.grid))
        ratio, near = neighbor_ratio(chart.codes_KD, chart.grid)
        found.append(Topography(chart.name, error, 1 - near, ratio, len(x_ND)))
    return found


@torch.no_grad()
def encoder_outputs(model: Tokenizer, images_BCHW: Tensor) -> list[Tensor]:
    """float32 [N, D] a level, coarsest first: the vectors that the quantizers see for these images."""
    quantizers: Any = model.quantizers
    for quantizer in quantizers:
        if getattr(quantizer, "heads", 0) != 1:
            raise ValueError(f"{type(quantizer).__name__} has several codes a place; only one can be looked at here")
    seen: list[list[Tensor]] = [[] for _ in quantizers]

    def keep(level: int) -> Any:
        def hook(quantizer: Any, inputs: tuple[Tensor, ...]) -> None:
            seen[level].append(quantizer.project_in(inputs[0].movedim(1, -1)).flatten(0, -2).float())

        return hook

    hooks = [quantizer.register_forward_pre_hook(keep(level)) for level, quantizer in enumerate(quantizers)]
    try:
        for batch in batches(images_BCHW):
            model.encode(batch.to(model.mean_C11.device))
    finally:
        for hook in hooks:
            hook.remove()
    return [torch.cat(parts) for parts in seen]


def neighbor_ratio(codes_KD: Tensor, grid: Grid) -> tuple[float, float]:
    """(Mean distance of the codes of neighbors over that of any two codes, share of any two that are neighbors)."""
    size = len(codes_KD)
    if size < 2:
        raise ValueError(f"{size} codes have no neighbors: expected at least 2")
    codes_KD, every = codes_KD.double(), torch.arange(size, device=codes_KD.device)
    near_total = all_total = 0.0
    near_number = 0
    for rows in every.split(max(1, BLOCK // size)):
        apart = torch.cdist(codes_KD[rows], codes_KD, compute_mode="donot_use_mm_for_euclid_dist")
        near = ~not_neighbors(rows[:, None], every[None], grid) & (rows[:, None] != every)
        near_total += float(apart[near].sum())
        near_number += int(near.sum())
        all_total += float(apart.sum())  # a code is at distance 0 from itself
    pairs = size * (size - 1)
    return (near_total / near_number) / (all_total / pairs), near_number / pairs
