"""Curves as inline SVG: read without a script, printed sharp, colored by the page's style sheet."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 360, 240
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 30, 38
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Axis:
    """A linear scale from values to pixels, with round ticks."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        step = round_step((self.high - self.low) / 4)
        first = math.ceil(self.low / step - 1e-9)
        return [step * n for n in range(first, math.floor(self.high / step + 1e-9) + 1)]


def round_step(rough: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is at least `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * m for m in (1, 2, 5, 10) if power * m >= rough * (1 - 1e-9))


def curves(title: str, runs: Sequence[tuple[str, Points]], percent: bool = False) -> str:
    """One chart: a line a run, `runs` being (name, [(step, value), ...]); values that are not finite are left out."""
    drawn = [(name, [(x, y) for x, y in points if y is not None and math.isfinite(y)]) for name, points in runs]
    xs = [x for _, points in drawn for x, _ in points]
    ys = [y for _, points in drawn for _, y in points]
    if not xs:
        return f'<p class="note">{html.escape(title)}: no finite value was recorded.</p>'
    x_axis = Axis(0.0, max(*xs, 1.0), LEFT, WIDTH - RIGHT)
    highest = 1.0 if percent else max(0.0, *ys) or 1.0
    y_axis = Axis(min(0.0, *ys), highest, HEIGHT - BOTTOM, TOP)
    parts = [f'<text class="title" x="{LEFT}" y="18">{html.escape(title)}</text>']
    for value in y_axis.ticks():
        y = y_axis(value)
        label = f"{value:.0%}" if percent else f"{value:,.6g}"
        parts.append(f'<path class="rule" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for value in x_axis.ticks():
        parts.append(f'<text x="{x_axis(value):.1f}" y="{HEIGHT - 20}" text-anchor="middle">{value:,.6g}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 2}" text-anchor="end">step</text>')
    for number, (name, points) in enumerate(drawn):
        places = [(x_axis(x), y_axis(y)) for x, y in points]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<g class="run{number % 6}"><polyline points="{line}"/>')
        for (x, y), (step, value) in zip(places, points):
            shown = f"{value:.1%}" if percent else f"{value:.6g}"
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{3.5 if len(points) < 40 else 2}"><title>{html.escape(name)}, '
                f"step {step:,.0f}: {shown}</title></circle>"
            )
        parts.append("</g>")
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">{"".join(parts)}</svg>'


def legend(names: Sequence[str]) -> str:
    """The runs' names beside the strokes of their curves."""
    items = (
        f'<li><svg class="key run{number % 6}" viewBox="0 0 28 10" aria-hidden="true">'
        f'<polyline points="0,5 28,5"/></svg>{html.escape(name)}</li>'
        for number, name in enumerate(names)
    )
    return f'<ul class="legend">{"".join(items)}</ul>'
