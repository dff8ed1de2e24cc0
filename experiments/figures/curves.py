"""Curves over training: losses and perplexities, of validations and of single batches, from records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.figures.style import PALE, TEXT, canvas, draw_seeds, style
from experiments.records import Record


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


def course(look: Look, runs: Sequence[Record], level: int | None, until: int | None = None) -> Curve:
    """The loss of single batches, or the perplexity of a level's codes in them."""
    rows, steps = [], np.array([])
    for run in runs:
        lines = run.traces()
        steps = np.concatenate([line["first"] + line["every"] * np.arange(len(line["losses"])) for line in lines])
        values = [
            value for line in lines for value in (line["losses"] if level is None else line["perplexities"][level])
        ]
        rows.append([float("nan") if value is None else value for value in values])
    kept = steps <= (until or steps.max())
    return Curve(look, steps[kept], np.array(rows)[:, kept])


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
    draw_seeds(ax, c.steps_T, c.values_ST, scale, color=color, linestyle=c.look.dash)
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
