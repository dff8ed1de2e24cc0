"""What the pictures suggest, as numbers: plots of `shifts` and `topography` for several models, and their rows."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.canvas import INK, PALE, TEXT, canvas, style
from topovq.storage import write_atomic
from topovq.view.pictures import COLORS


@dataclass(frozen=True)
class Measured:
    """What was measured of one run; `facts` (its data set, steps, seed, id) begin each row of the CSV."""

    method: str
    facts: Mapping[str, Any]
    results: Sequence[Any]  # ShiftScore or Topography


def write_rows(measured: Sequence[Measured], path: Path) -> Path:
    """One row a result, numbers in full; infinity is `inf`."""
    rows = [{"method": m.method, **m.facts, **asdict(result)} for m in measured for result in m.results]
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomic(path, buffer.getvalue().encode())
    return path


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
                    for row in values if len(values) > 1 else ():
                        ax.plot(offsets, row, color=color, linewidth=0.6, alpha=0.35, linestyle=dash)
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


def _by_method(measured: Sequence[Measured]) -> dict[str, list[Measured]]:
    methods: dict[str, list[Measured]] = {}
    for run in measured:
        methods.setdefault(run.method, []).append(run)
    return methods
