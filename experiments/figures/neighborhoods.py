"""The figure of neighborhoods, from the formulas."""

from __future__ import annotations

from typing import Any

import torch

from experiments.figures.style import DPI, PALE, TEXT, WIDTH, style, wrapped
from topovq.grid import Grid
from topovq.neighborhood import Neighborhood, Schedule
from topovq.view.pictures import COLORS

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
