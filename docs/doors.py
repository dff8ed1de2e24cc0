"""The picture of how-to/beyond-one-machine.md, docs/doors.png: which door for which size, and how Ray works.

python docs/doors.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

BLUE, ORANGE, RED, GRAY, PALE, LIGHT = "#0b5cad", "#b25e00", "#c1272d", "#555555", "#e8f1fa", "#fff3e0"
COLUMNS = ("one process", "several GPUs, one machine", "several machines")
MAP = "topovq map, place"
DOORS = {
    "train a tokenizer": (
        "topovq train", "torchrun --nproc-per-node 8\n-m topovq train", "torchrun --nnodes 4 ...\nor Ray Train",
    ),
    "images to tokens\nand back": (
        "topovq encode, decode", "torchrun --nproc-per-node 8\n-m topovq encode",
        "topovq encode, decode\n--engine ray",
    ),
    "a map of a table": (f"{MAP}\n(larger than memory, too)", f"{MAP}\n--engine ray", f"{MAP}\n--engine ray"),
}  # fmt: skip


def box(axes: Axes, x: float, y: float, width: float, height: float, text: str, color: str, fill: str, **how) -> None:
    style = FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=0.012", fc=fill, ec=color, lw=1.2)
    axes.add_patch(style)
    axes.text(
        x + width / 2, y + height / 2, text, ha="center", va="center", **{"fontsize": 9, "color": "#111111", **how}
    )


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str, line: str = "-") -> None:
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=11, color=color, lw=1.4, ls=line))


def draw_doors(axes: Axes) -> None:
    left, wide, high = 0.155, 0.262, 0.2
    for column, title in enumerate(COLUMNS):
        axes.text(left + (wide + 0.02) * column + wide / 2, 0.87, title, ha="center", fontsize=10.5, weight="bold")
    for row, (task, commands) in enumerate(DOORS.items()):
        y = 0.62 - row * 0.27
        axes.text(0.0, y + high / 2, task, va="center", fontsize=10, weight="bold")
        for column, command in enumerate(commands):
            on_ray = "ray" in command.lower()
            color, fill = (ORANGE, LIGHT) if on_ray else (BLUE, PALE)
            box(
                axes, left + (wide + 0.02) * column, y, wide, high, command, color, fill, family="monospace", fontsize=8
            )


def draw_ray(axes: Axes) -> None:
    axes.text(0.0, 0.93, "On Ray: a machine dies", fontsize=10.5, weight="bold")
    box(axes, 0.0, 0.3, 0.17, 0.36, "your command\n\na list of parts:\nshards, or rows\nof the table", GRAY, "#f4f4f4")
    for number, (y, text) in enumerate(((0.64, "machine 1"), (0.355, "machine 2"), (0.07, "machine 3"))):
        dead = number == 1
        color = RED if dead else ORANGE
        box(
            axes,
            0.39,
            y,
            0.16,
            0.2,
            f"{text}\n{'is lost' if dead else 'holds the model'}",
            color,
            "#fbe9e9" if dead else LIGHT,
        )
        arrow(axes, (0.175, 0.48), (0.385, y + 0.1), color)
        arrow(axes, (0.555, y + 0.1), (0.725, y + 0.1), color, "--" if dead else "-")
    axes.text(0.275, 0.80, "part 1", fontsize=8.5, color=ORANGE, ha="center")
    axes.text(0.285, 0.505, "part 2", fontsize=8.5, color=RED, ha="center")
    axes.text(0.245, 0.175, "part 3, then\npart 2 again", fontsize=8.5, color=ORANGE, ha="center", va="center")
    box(axes, 0.73, 0.64, 0.27, 0.2, "tokens-00000-of-00003.parquet", ORANGE, LIGHT, family="monospace", fontsize=7.5)
    box(axes, 0.73, 0.355, 0.27, 0.2, "half a file:\nit never gets its name", RED, "#fbe9e9", fontsize=8.5)
    box(axes, 0.73, 0.07, 0.27, 0.2, "tokens-00002-of-00003.parquet\ntokens-00001-of-00003.parquet", ORANGE, LIGHT,
        family="monospace", fontsize=7.5)  # fmt: skip


def main() -> None:
    figure, (above, below) = plt.subplots(2, 1, figsize=(10, 7.4), height_ratios=(1, 0.9))
    for axes in (above, below):
        axes.set_xlim(-0.004, 1.004)
        axes.set_ylim(0, 1)
        axes.axis("off")
    draw_doors(above)
    draw_ray(below)
    figure.subplots_adjust(0.02, 0.01, 0.985, 0.99, hspace=0.06)
    figure.savefig(Path(__file__).parent / "doors.png", dpi=110)


if __name__ == "__main__":
    main()
