"""Curves as inline SVG: drawn by matplotlib, colored by the page's style sheet, read without a script."""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Sequence

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter, StrMethodFormatter

Points = Sequence[tuple[float, float | None]]
# What matplotlib draws with -> the style sheet's name for it, which is another color by day than by night.
INK, SOFT, LINE = "#000001", "#000002", "#000003"
RUNS = [f"#00010{n}" for n in range(6)]
NAMES = {INK: "ink", SOFT: "soft", LINE: "line", **{color: f"run{n}" for n, color in enumerate(RUNS)}}
DASHES: list[tuple[float, ...]] = [(), (7, 3), (2, 3), (9, 3, 2, 3), (12, 4), (4, 2)]
STYLE = {
    "svg.fonttype": "none",  # text stays text
    "font.size": 8,
    "axes.edgecolor": LINE,
    "axes.titleweight": "bold",
    "axes.titlesize": 9.5,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlepad": 9,
    "lines.linewidth": 1.6,
    "lines.scale_dashes": False,
    "text.color": SOFT,
    "axes.labelcolor": SOFT,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "grid.color": LINE,
}


def curves(title: str, runs: Sequence[tuple[str, Points]], percent: bool = False) -> str:
    """One chart: a line a run, `runs` being (name, [(step, value), ...]); values that are not finite are left out."""
    drawn = [(name, [(x, y) for x, y in points if y is not None and math.isfinite(y)]) for name, points in runs]
    if not any(points for _, points in drawn):
        return f'<p class="note">{html.escape(title)}: no finite value was recorded.</p>'
    told: dict[str, str] = {}  # what a point says when it is pointed at, by its id
    with rc_context({**STYLE, "svg.hashsalt": title}):
        figure = Figure(figsize=(3.75, 2.5), layout="constrained")
        axes = figure.add_subplot()
        for number, (name, points) in enumerate(drawn):
            color, dash = RUNS[number % 6], DASHES[number % 6]
            axes.plot([x for x, _ in points], [y for _, y in points], color=color, dashes=dash or (None, None))
            for step, value in points:
                dot = f"point{len(told)}"
                told[dot] = f"{name}, step {step:,.0f}: {value:{'.1%' if percent else '.6g'}}"
                size = 5 if len(points) < 40 else 2.5
                axes.plot(step, value, "o", color=color, markersize=size, clip_on=False, zorder=3, gid=dot)
        limits = axes.dataLim
        axes.set(title=title, xlabel="step", xlim=(0, max(limits.x1, 1)), axisbelow=True)
        axes.set_ylim(min(0, limits.y0), 1 if percent else max(0, limits.y1) or 1)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.6g}"))
        axes.yaxis.set_major_formatter(PercentFormatter(1, 0) if percent else StrMethodFormatter("{x:,.6g}"))
        axes.grid(axis="y")
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(length=0)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return _inline(file.getvalue(), title, told)


def _inline(svg: str, title: str, told: dict[str, str]) -> str:
    """A figure's SVG file as a part of a page."""
    for color, name in NAMES.items():
        svg = svg.replace(color, f"var(--{name})")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r' (?:width|height)="[\d.]+pt"', "", svg, count=2)
    for dot, text in told.items():
        svg = svg.replace(f'<g id="{dot}">', f"<g><title>{html.escape(text)}</title>")
    used = set(re.findall(r"#(\w+)", svg))
    svg = re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in used else "", svg)  # unique on a page
    return svg.replace("<svg ", f'<svg class="chart" role="img" aria-label="{html.escape(title)}" ', 1)


def legend(names: Sequence[str]) -> str:
    """The runs' names beside the strokes of their curves: HTML, so that long names wrap."""
    items = (
        f'<li><svg class="key" viewBox="0 0 28 10" aria-hidden="true"><path d="M0 5H28" stroke-width="2" '
        f'stroke="var(--run{number % 6})" stroke-dasharray="{" ".join(map(str, DASHES[number % 6]))}"/></svg>'
        f"{html.escape(name)}</li>"
        for number, name in enumerate(names)
    )
    return f'<ul class="legend">{"".join(items)}</ul>'
