"""Figures of numbers: the style all figures share, curves over training, measures of models, neighborhoods."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from topovq.grid import Grid
from topovq.neighborhood import Neighborhood, Schedule
from topovq.storage import write_atomic
from topovq.view.pictures import COLORS

DPI = 150
TEXT = 9.0  # points
LINE = round(TEXT * DPI / 72 * 1.45)  # pixels a line of text takes
LETTER = TEXT * DPI / 72 * 0.53  # pixels a letter takes, about
MARGIN = 24
WIDTH = 11.0  # inches, of plots
INK, PALE = "#222222", "#777777"
# Text stays text in an SVG, and the same figure gives the same file.
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "topovq",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": TEXT,
    "axes.titlesize": TEXT + 1,
    "axes.labelsize": TEXT,
    "legend.fontsize": TEXT - 0.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": PALE,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.grid": True,
    "grid.color": "#e4e4e0",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "legend.frameon": False,
}


def style() -> Any:
    """The context in which figures are made and saved."""
    import matplotlib

    return matplotlib.rc_context(STYLE)


def canvas(panels: int, title: str, caption: str) -> tuple[Any, list[Any]]:
    """A figure with so many axes side by side, a title above and a caption below; within `style`."""
    from matplotlib.figure import Figure

    width = WIDTH if panels > 1 else WIDTH * 0.8
    figure = Figure(figsize=(width, 5.0), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=TEXT + 2.5, weight="bold")
    figure.supxlabel(wrapped(caption, width * DPI - 2 * MARGIN), x=0.01, ha="left", fontsize=TEXT, color=PALE)
    return figure, list(figure.subplots(1, panels, squeeze=False)[0])


def wrapped(caption: str, pixels: float) -> str:
    """A caption in lines of at most so many pixels."""
    return textwrap.fill(caption, max(40, int(pixels / LETTER)))


def save(figure: Any, out: Path, name: str) -> list[Path]:
    """Write the figure as out/name.png and out/name.svg."""
    paths = []
    for kind, metadata in (("png", {}), ("svg", {"Date": None})):
        buffer = io.BytesIO()
        with style():
            figure.savefig(buffer, format=kind, dpi=DPI, metadata=metadata)
        path = out / f"{name}.{kind}"
        write_atomic(path, buffer.getvalue())
        paths.append(path)
    return paths


# Curves from records


@dataclass(frozen=True)
class Look:
    """How a curve is drawn."""

    label: str
    color: str
    dash: str = "-"


@dataclass(frozen=True)
class Curve:
    """The same quantity of several runs that differ in the seed alone: values [seeds, steps], NaN where not finite."""

    look: Look
    steps_T: np.ndarray
    values_ST: np.ndarray

    @property
    def label(self) -> str:
        number = len(self.values_ST)
        return f"{self.look.label} ({number} seed{'s' * (number > 1)})"


def curve(look: Look, records: Sequence[Sequence[Mapping[str, Any]]], key: str) -> Curve:
    """The validated `key` of every record; they must have been validated at the same steps."""
    if not records:
        raise ValueError(f"the curve {look.label!r} has no records: expected at least one")
    rows: list[list[float]] = []
    steps: list[int] = []
    for record in records:
        lines = [line for line in record if line["event"] == "validation"]
        own = [int(line["step"]) for line in lines]
        if rows and own != steps:
            raise ValueError(
                f"the runs of {look.label!r} were validated at different steps ({_some(steps)} and {_some(own)}): "
                "they are not one experiment"
            )
        if lines and key not in lines[0]:
            raise ValueError(f"the records of {look.label!r} hold no {key!r}; they hold {', '.join(lines[0])}")
        steps = own
        rows.append([float("nan") if line[key] is None else float(line[key]) for line in lines])
    return Curve(look, np.array(steps), np.array(rows))


def draw_losses(panels: Mapping[str, Sequence[Curve]], title: str, caption: str, whose: str = "validation") -> Any:
    """Losses on a logarithmic scale that the panels share."""
    with style():
        figure, axes = canvas(len(panels), title, caption)
        values = [c.values_ST * 1e3 for curves in panels.values() for c in curves]
        low, high = (f(np.nanquantile(v, q) for v in values) for f, q in ((min, 0), (max, 1)))
        for ax, (name, curves) in zip(axes, panels.items()):
            for c in curves:
                _lines(ax, c, 1e3)
            ax.set_yscale("log")
            ax.set(title=name, xlabel="training steps", ylim=(low * 0.9, high * 1.15))
            _plain_ticks(ax, low, high)
            _legend(ax)
        axes[0].set_ylabel(f"{whose} reconstruction loss (1e-3)")
        for ax in axes[1:]:
            ax.tick_params(labelleft=False)
    return figure


def draw_perplexities(panels: Mapping[str, Sequence[Curve]], codes: int, title: str, caption: str) -> Any:
    """Perplexity from 0 to the number of codes."""
    with style():
        figure, axes = canvas(len(panels), title, caption)
        for ax, (name, curves) in zip(axes, panels.items()):
            for c in curves:
                _lines(ax, c, 1)
            ax.axhline(codes, color=PALE, linewidth=1, linestyle=":")
            ax.set(title=name, xlabel="training steps", ylim=(0, codes * 1.06))
            ax.annotate(
                f"all {codes} codes alike",
                (1, codes),
                (0, 3),
                xycoords=("axes fraction", "data"),
                ha="right",
                textcoords="offset points",
                fontsize=TEXT - 1,
                color=PALE,
                annotation_clip=False,
            )
            _legend(ax)
        axes[0].set_ylabel("perplexity")
    return figure


def _lines(ax: Any, c: Curve, scale: float) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    color, marker = c.look.color, "o" if len(c.steps_T) == 1 else ""
    if len(c.values_ST) > 1:
        for values_T in c.values_ST:
            ax.plot(c.steps_T, values_T * scale, color=color, linewidth=0.6, alpha=0.35, linestyle=c.look.dash)
    mean_T = c.values_ST.mean(0) * scale
    ax.plot(c.steps_T, mean_T, color=color, marker=marker, linewidth=1.8, linestyle=c.look.dash, label=c.label)


def _legend(ax: Any) -> None:
    """Below the axes, where no curve can run through it."""
    ax.legend(loc="upper left", bbox_to_anchor=(0, -0.16), ncols=2, borderaxespad=0, handlelength=2.4)


def _plain_ticks(ax: Any, low: float, high: float) -> None:
    """A logarithmic axis with numbers as people write them."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

    ticks = [m * 10.0**e for e in range(-3, 7) for m in (1, 2, 5) if low * 0.9 <= m * 10.0**e <= high * 1.15]
    if len(ticks) < 3:
        ticks = [float(f"{v:.2g}") for v in np.geomspace(low, high, 4)]
    ax.yaxis.set_major_locator(FixedLocator(ticks))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())


def _some(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps[:4])) + (", ..." if len(steps) > 4 else "") if steps else "none"


# Measures of models


@dataclass(frozen=True)
class Measured:
    """What was measured of one run; `facts` (its data set, steps, seed, id) begin each row of the CSV."""

    method: str
    facts: Mapping[str, Any]
    results: Sequence[Any]  # ShiftScore or Topography


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


# Neighborhoods, from the formulas


SHAPE = (7, 11)
STEPS = (0, 5, 20, 100)
TAU = 0.1
KINDS = {
    "hard": "hard: the eight around the winner, ever more weakly",
    "gaussian": "Gaussian: exp(−dist² (1 + t τ)), the paper's formula",
    "exponential": "exponential: exp(−dist (1 + t τ) / 10), the authors' code",
}


def weights(kind: str, step: int) -> torch.Tensor:
    """float64 of SHAPE: how strongly each place is updated when the place in the middle wins at `step`."""
    grid = Grid(SHAPE)
    every = torch.arange(grid.size)
    return (
        Neighborhood(kind, grid, schedule=Schedule.harmonic(TAU))
        .weight(grid.distance(every, grid.size // 2), step)
        .view(SHAPE)
    )


def draw_neighborhoods() -> Any:
    """A row a kind of neighborhood: the map at each of STEPS, and the weight over the distance."""
    from matplotlib.figure import Figure

    colors = _colors()
    with style():
        figure = Figure(figsize=(WIDTH, 6.2), layout="constrained")
        panels: Any = figure.subfigures(len(KINDS), 1, hspace=0.03)
        for panel, (kind, title) in zip(panels, KINDS.items()):
            panel.suptitle(title, x=0.01, ha="left", fontsize=TEXT + 1.5, weight="bold")
            *maps, profile = panel.subplots(1, len(STEPS) + 1)
            for step, axes in zip(STEPS, maps):
                image = axes.imshow(weights(kind, step).numpy(), vmin=0, vmax=1, cmap=colors, interpolation="none")
                _cells(axes)
                axes.set_title(f"t = {step}", fontsize=TEXT)
            panel.colorbar(image, ax=maps, ticks=[0, 0.5, 1], aspect=12, pad=0.02)
            _profiles(profile, kind)
        caption = (
            "How strongly each place of the map is updated when the one with the dot wins, at four training steps t "
            f"with τ = {TAU}, and the same over the distance on the map."
        )
        figure.supxlabel(wrapped(caption, WIDTH * DPI), x=0.01, ha="left", fontsize=TEXT, color=PALE)
    return figure


def _colors() -> Any:
    """From no update at all to the winner's."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("weight", ["#f1f1ec", "#8fc4ae", COLORS["KSOM"], "#0b3326"])


def _cells(axes: Any) -> None:
    """Thin lines between places, a dot on the winner."""
    rows, columns = SHAPE
    axes.set_xticks([x - 0.5 for x in range(1, columns)], minor=True)
    axes.set_yticks([y - 0.5 for y in range(1, rows)], minor=True)
    axes.grid(False)
    axes.grid(True, which="minor", color="white", linewidth=1.0)
    axes.tick_params(which="both", length=0, labelbottom=False, labelleft=False)
    axes.set_frame_on(False)
    axes.plot(columns // 2, rows // 2, "o", color="white", markersize=3)


def _profiles(axes: Any, kind: str) -> None:
    """Weight over distance at each of the steps."""
    distance = torch.linspace(0.0, SHAPE[1] // 2, 401, dtype=torch.float64)[1:]
    neighborhood = Neighborhood(kind, Grid(SHAPE), schedule=Schedule.harmonic(TAU))
    colors = _colors()
    for number, step in enumerate(STEPS):
        shade = colors(1 - 0.7 * number / (len(STEPS) - 1))
        axes.plot(distance.numpy(), neighborhood.weight(distance, step).numpy(), color=shade, label=f"t = {step}")
    axes.set(xlim=(0, float(distance[-1])), ylim=(0, 1.04), xlabel="distance", ylabel="weight", yticks=[0, 0.5, 1])
    if kind != "exponential":  # there the curves fill the corner
        axes.legend(loc="upper right", handlelength=1.2)
