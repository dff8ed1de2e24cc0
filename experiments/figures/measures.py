"""Measures of models, and how they are drawn: images from moved tokens, and the order of codes on the map."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.figures.style import INK, PALE, TEXT, canvas, draw_seeds, style
from experiments.tables import lines_as_csv
from topovq.grid import Grid
from topovq.metrics import BLOCK, not_neighbors, to_psnr, topographic_error
from topovq.storage import write_atomic
from topovq.tokenizer.atlas import LEVEL_NAMES, charts
from topovq.tokenizer.models import Tokenizer, Tokens, as_levels
from topovq.view.pictures import COLORS, moved

NEAR, WIDE = range(-3, 4), range(-10, 11)  # offsets
PIXELS = 2**19  # decoded at a time


@dataclass(frozen=True)
class Measured:
    """What was measured of one run; `facts` (its data set, steps, seed, id) begin each row of the CSV."""

    method: str
    facts: Mapping[str, Any]
    results: Sequence[Any]  # ShiftScore or Topography


def write_rows(measured: Sequence[Measured], path: Path) -> Path:
    """One row a result, numbers in full; infinity is `inf`."""
    rows = [{"method": m.method, **m.facts, **asdict(result)} for m in measured for result in m.results]
    write_atomic(path, lines_as_csv(rows).encode())
    return path


def _by_method(measured: Sequence[Measured]) -> dict[str, list[Measured]]:
    methods: dict[str, list[Measured]] = {}
    for run in measured:
        methods.setdefault(run.method, []).append(run)
    return methods


# Moved tokens


@dataclass(frozen=True)
class ShiftScore:
    """PSNR in dB, over all pixels of all images, of what the moved tokens decode to."""

    moved: str  # which tokens: a key of `level_choices`
    offset: int  # places along every axis of the map
    to_reconstruction: float  # infinity where nothing moved
    to_original: float
    images: int


def level_choices(model: Tokenizer) -> dict[str, tuple[int, ...]]:
    """Which tokens may be moved: all of them and, where there are several levels, each level alone."""
    every = tuple(range(len(model.quantizers)))
    if len(every) == 1:
        return {"all tokens": every}
    names = LEVEL_NAMES.get(len(every), tuple(f"level {level}" for level in every))
    together = "both levels" if len(every) == 2 else "all levels"
    return {together: every} | {f"{name} alone": (level,) for level, name in enumerate(names)}


def moved_by_index(model: Tokenizer, tokens: Tokens, offset: int, levels: Sequence[int]) -> Tokens:
    """Tokens of `levels` whose numbers are `offset` higher, as if codes lay on a line; those at its ends stay there."""
    parts = list(as_levels(tokens))
    for level in levels:
        parts[level] = (parts[level] + offset).clamp(0, model.quantizers[level].codebook_size - 1)
    return parts[0] if len(parts) == 1 else tuple(parts)


def shift_scores(
    model: Tokenizer,
    images_BCHW: Tensor,
    offsets: Iterable[int],
    advance: Callable[[], object] = lambda: None,
    moved: Callable[[Tokenizer, Tokens, int, Sequence[int]], Tokens] = moved,
) -> list[ShiftScore]:
    """Scores of uint8 images for every choice of levels and every offset, each image encoded once.

    `moved` gives the tokens at an offset: on the map, or `moved_by_index`. `advance` is called after every choice and
    offset of every batch: see `batches`.
    """
    offsets, choices = list(offsets), level_choices(model)
    device = model.mean_C11.device
    errors = torch.zeros(len(choices), len(offsets), 2, dtype=torch.float64)
    for batch in batches(images_BCHW):
        batch = batch.to(device)
        tokens = model.encode(batch)
        plain = model.decode(tokens)
        for row, levels in enumerate(choices.values()):
            for column, offset in enumerate(offsets):
                ours = (model.decode(moved(model, tokens, offset, levels)) if offset else plain).double()
                for which, theirs in enumerate((plain, batch)):
                    errors[row, column, which] += float((ours - theirs).square().sum())
                advance()
    errors /= images_BCHW.numel()
    scores = []
    for row, name in enumerate(choices):
        for column, offset in enumerate(offsets):
            to_reconstruction, to_original = map(to_psnr, errors[row, column].tolist())
            scores.append(ShiftScore(name, offset, to_reconstruction, to_original, len(images_BCHW)))
    return scores


def batches(images_BCHW: Tensor) -> Sequence[Tensor]:
    """The images in as many parts as `shift_scores` takes them in."""
    return images_BCHW.split(max(1, PIXELS // images_BCHW[0, 0].numel()))


def draw_shift_scores(measured: Sequence[Measured], caption: str) -> Any:
    """PSNR over the offset, a panel for each choice of levels."""
    from matplotlib.ticker import MaxNLocator

    choices = list(dict.fromkeys(score.moved for score in measured[0].results))
    title = "How much an image changes when its tokens are moved on the map"
    with style():
        figure, axes = canvas(len(choices), title, caption)
        for ax, choice in zip(axes, choices):
            for method, runs in _by_method(measured).items():
                for field, dash, what in (
                    ("to_reconstruction", "-", "the reconstruction"),
                    ("to_original", (0, (3, 2)), "the image"),
                ):
                    scores = [[s for s in run.results if s.moved == choice] for run in runs]
                    values = np.array([[getattr(s, field) for s in row] for row in scores])
                    values[~np.isfinite(values)] = np.nan
                    offsets = [s.offset for s in scores[0]]
                    color = COLORS.get(method, INK)
                    draw_seeds(ax, offsets, values, color=color, linestyle=dash)
                    label = f"{method}\nagainst {what}"
                    ax.plot(offsets, values.mean(0), color=color, linestyle=dash, marker="o", markersize=3, label=label)
            ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
            ax.axvline(0, color=PALE, linewidth=0.8, zorder=0)
            ax.set(title=f"{choice} moved", xlabel="places moved along each axis")
        low = min(ax.get_ylim()[0] for ax in axes)
        high = max(ax.get_ylim()[1] for ax in axes)
        for ax in axes:
            ax.set_ylim(low, high)
        axes[0].set_ylabel("PSNR (dB)")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center")
    return figure


# Order on the map


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


def draw_topography(measured: Sequence[Measured], caption: str) -> Any:
    """Bars of both measures, a group a level; a dotted line is what codes in no order would have."""
    levels = [result.level for result in measured[0].results]
    with style():
        figure, (errors, ratios) = canvas(2, "How well the codes are ordered on the map", caption)
        _bars(errors, measured, levels, "topographic_error")
        chance = [result.chance_error for result in measured[0].results]
        _levels_without_order(errors, chance)
        errors.set(title="topographic error: the two closest codes are no neighbors", ylabel="share of vectors")
        _bars(ratios, measured, levels, "neighbor_ratio")
        _levels_without_order(ratios, [1.0] * len(levels))
        ratios.set(title="distance of neighboring codes over that of any two", ylabel="ratio")
        figure.legend(*errors.get_legend_handles_labels(), loc="outside right center")
    return figure


def _bars(ax: Any, measured: Sequence[Measured], levels: Sequence[str], field: str) -> None:
    methods = _by_method(measured)
    width = 0.8 / len(methods)
    for number, (method, runs) in enumerate(methods.items()):
        values = np.array([[getattr(result, field) for result in run.results] for run in runs])
        places = np.arange(len(levels)) + (number - (len(methods) - 1) / 2) * width
        bars = ax.bar(places, values.mean(0), width * 0.92, color=COLORS.get(method, INK), label=method)
        white = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # over the dotted line
        shown = [f"{value:.3f}" for value in values.mean(0)]
        ax.bar_label(bars, shown, padding=4, fontsize=TEXT - 0.5, bbox=white)
        if len(values) > 1:
            for row in values:
                ax.plot(places, row, "o", color="white", markeredgecolor=INK, markersize=3, markeredgewidth=0.6)
    ax.set_xticks(range(len(levels)), levels if len(levels) > 1 else [""])
    ax.set_xlim(-0.6, len(levels) - 0.4)
    ax.set_ylim(0, max(1.15, ax.get_ylim()[1]))
    ax.grid(False, axis="x")
    ax.tick_params(axis="x", length=0)


def _levels_without_order(ax: Any, values: Sequence[float]) -> None:
    for level, value in enumerate(values):
        label = "codes in no order" if level == 0 else None
        ax.plot([level - 0.5, level + 0.5], [value, value], color=INK, linestyle=":", linewidth=1.2, label=label)
