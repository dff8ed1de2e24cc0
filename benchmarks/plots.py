"""The pictures of the page on speed, docs/speed_*.png, from the CSV files in benchmarks/results.

python -m benchmarks.plots
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from benchmarks.measured import FIRST, PEERS, ROOT, SHAPES, SMALL, Results
from topovq.storage import atomic_file

DOCS = ROOT / "docs"
BLUE, SKY, ORANGE, GREEN, RED, GRAY = "#0b5cad", "#56b4e9", "#e69f00", "#009e73", "#c1272d", "#8a8a8a"
COLORS = {"plain-torch": ORANGE, "authors-formulation": GREEN, "vector-quantize-pytorch": RED}
LEAST_MIB = 0.05  # what the files write as 0.0


def draw_layers(results: Results) -> Figure:
    """Time and peak memory of the layer against K and against N."""
    over_k, over_n = [shape for shape in SHAPES if shape[0] == 65_536], [SMALL, FIRST]
    figure, axes = plt.subplots(2, 2, figsize=(9.6, 7.6), sharex="col", sharey="row", width_ratios=(1.5, 1))
    for column, (shapes, axis) in enumerate(((over_k, 1), (over_n, 0))):
        x = [shape[axis] for shape in shapes]
        time, memory = axes[0, column], axes[1, column]
        for mode, run, color, style in (
            ("exact", "eager", BLUE, "--"),
            ("exact", "graph", BLUE, "-"),
            ("fast", "graph", SKY, "-"),
        ):
            time.plot(x, [results.ours(mode, run, "hard", shape) for shape in shapes], style, color=color, marker="o")
        flash = [results.search("flash-kmeans", "fast", "tf32", shape) for shape in shapes]
        time.plot(x, [float("nan") if value is None else value for value in flash], ":", color=GRAY, marker="d")
        time.plot(x, [results.ours("exact", "graph", "hard", s, "roofline_ms") for s in shapes], color="0.3", lw=1)
        for kind, style in (("hard", "-"), ("gaussian", "--"), ("exponential", ":")):
            peaks = [max(LEAST_MIB, results.ours("exact", "eager", kind, shape, "peak_mib")) for shape in shapes]
            memory.plot(x, peaks, style, color=BLUE, marker="o", ms=5)
            if axis:  # they may lie close together: the lowest, `hard`, is named below its point, the highest above
                side = {"hard": "top", "gaussian": "center", "exponential": "bottom"}[kind]
                memory.text(x[-1] * 1.15, peaks[-1], kind, color=BLUE, va=side, fontsize=9)
            elif peaks[0] == LEAST_MIB and kind == "hard":
                memory.text(x[0] * 1.2, peaks[0], f"below {LEAST_MIB}", color=BLUE, va="top", fontsize=9)
        for place, (library, color) in enumerate(COLORS.items()):
            for ax, name in ((time, "median_ms"), (memory, "peak_mib")):
                figures = [results.peer(library, shape, name) for shape in shapes]
                ax.plot(x, [float("nan") if value is None else value for value in figures], color=color, marker="o")
                absent = [at for at, value in zip(x, figures) if value is None]
                height = 0.96 - 0.055 * place  # of the axes: above all figures
                ax.plot(
                    absent, [height] * len(absent), "x", color=color, ms=8, mew=2, transform=ax.get_xaxis_transform()
                )
        log_axis(memory, x, room=2.6 if axis else 1.6)
        time.set_title(
            f"{'K' if axis else 'N'} grows: {f'N = {over_k[0][0]:,}' if axis else 'K = 512'}, d = 64", fontsize=11
        )
        memory.set_xlabel("codes K" if axis else "vectors N")
    axes[0, 0].set(ylabel="ms for forward + backward + update", yscale="log", ylim=(0.004, 4000))
    axes[1, 0].set(ylabel="peak MiB beyond inputs and outputs", yscale="log", ylim=(0.02, 4e6))
    for ax in axes.flat:
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
    for ax in axes[:, 0]:
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}"))
    keys = [
        Line2D([], [], color=BLUE, marker="o", label="topovq, exact, in a graph"),
        Line2D([], [], color=BLUE, ls="--", marker="o", label="topovq, exact, eager"),
        Line2D([], [], color=SKY, marker="o", label="topovq, fast, in a graph"),
        *(Line2D([], [], color=color, marker="o", label=PEERS[library]) for library, color in COLORS.items()),
        Line2D([], [], color=GRAY, ls=":", marker="d", label="flash-kmeans tf32, search only"),
        Line2D([], [], color="0.3", lw=1, label="floor of a step"),
        Line2D([], [], color="0.3", ls="", marker="x", ms=8, mew=2, label="did not fit, or over 5 s"),
    ]
    figure.legend(handles=keys, ncol=3, loc="lower center", frameon=False, fontsize=9.5)
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    return figure


def draw_steps(results: Results) -> Figure:
    """Time and peak memory of a whole training step against K."""
    figure, axes = plt.subplots(1, 2, figsize=(9.6, 3.7))
    x = list(dict.fromkeys(int(row["codebook_size"]) for row in results.scale))
    looks = {"ema": ("EMA-VQ", ORANGE, "-", "o"), "kohonen hard": ("KSOM, hard", SKY, "--", "s"),
             "kohonen": ("KSOM, recommended", BLUE, ":", "^")}  # fmt: skip
    for name, (label, color, style, marker) in looks.items():
        rows = [row for row in results.scale if row["quantizer"] == name]
        for ax, column in zip(axes, ("ms", "peak_mib")):
            ax.plot(x, [float(row[column]) for row in rows], style, color=color, marker=marker, ms=5, label=label)
    for ax, label in zip(axes, ("ms a training step", "peak MiB of the whole training")):
        log_axis(ax, x)
        ax.set(xlabel="codes K", ylabel=label, yscale="log")
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].yaxis.set_major_locator(FixedLocator([0.5, 1, 2, 4, 8, 16]))
    axes[0].set_ylim(0.5, 16)
    axes[1].yaxis.set_major_locator(FixedLocator([125, 250, 500, 1000]))
    axes[1].set_ylim(125, 1000)
    for ax in axes:
        ax.yaxis.set_minor_locator(NullLocator())
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes[0].legend(frameon=False, fontsize=9.5, loc="upper left")
    figure.tight_layout()
    return figure


def log_axis(ax: Axes, values: Sequence[int], room: float = 1.6) -> None:
    """A logarithmic x axis that names exactly the measured values, with room to their right."""
    ax.set_xscale("log")
    ax.set_xlim(values[0] / 1.6, values[-1] * room)
    ax.xaxis.set_major_locator(FixedLocator(list(values)))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


PICTURES: dict[str, Callable[[Results], Figure]] = {"speed_layers.png": draw_layers, "speed_steps.png": draw_steps}


def main() -> None:
    results = Results.read()
    for name, draw in PICTURES.items():
        figure = draw(results)
        with atomic_file(DOCS / name) as path:
            figure.savefig(path, format="png", dpi=100, metadata={"Software": None})
        plt.close(figure)
        print(f"docs/{name}")


if __name__ == "__main__":
    main()
