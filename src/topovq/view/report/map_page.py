"""`write_map_page`: a SelfOrganizingMap on one HTML page: its figures, U-matrix, hits and component planes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from topovq.drawing import draw_colors
from topovq.metrics import neighbor_distances
from topovq.storage import write_atomic
from topovq.view.report.images import colored
from topovq.view.report.page import PICTURE_BYTES, document, figure, scroller, text

if TYPE_CHECKING:
    from topovq.som import SelfOrganizingMap

MOST_PLANES = 64  # component planes on a page
DRAWN = {1: "; the line is drawn in rows, to be read as text is", 2: ""}  # by the number of axes, see drawing.places
SLICES = "; its slices are drawn below each other"


def write_map_page(som: SelfOrganizingMap, out: Path, title: str, facts: dict[str, str]) -> Path:
    """Write the page of a fitted map to `out`, whole or not at all; `facts` are what else its table says."""
    names = [str(name) for name in getattr(som, "feature_names_in_", range(som.n_features_in_))]
    budget = PICTURE_BYTES // (2 + min(len(names), MOST_PLANES))
    sections = [_facts(som, facts), _whole(som, budget), _planes(som, names, budget)]
    write_atomic(out, document(title, sections).encode())
    return out


def _facts(som: SelfOrganizingMap, facts: dict[str, str]) -> str:
    used = int((som.hits_ > 0).sum())
    told = facts | {
        "map": f"{' x '.join(map(str, som.grid_.shape))}, {som.grid_.topology}{DRAWN.get(som.grid_.ndim, SLICES)}",
        "passes": f"{som.n_iter_}, radius {som.radii_[0]:.3g} to {som.radii_[-1]:.3g} cells",
        "quantization error": f"{som.quantization_error_:.5g}"
        + " (in standard deviations)" * hasattr(som, "scale_")
        + f"; {som.quantization_errors_[0]:.5g} at the start",
        "topographic error": f"{som.topographic_error_:.4f}",
        "codes with rows": f"{used:,} of {som.grid_.size:,}",
    }
    rows = "".join(f'<tr><th scope="row">{text(name)}</th><td>{text(value)}</td></tr>' for name, value in told.items())
    return (
        scroller("Figures of the map", f"<table>{rows}</table>")
        + '\n<p class="note">The quantization error is the mean distance of a row to its closest code. The topographic '
        "error is the share of rows whose two closest codes are not neighbors on the map.</p>"
    )


def _whole(som: SelfOrganizingMap, budget: int) -> str:
    apart_K = neighbor_distances(torch.from_numpy(som.codes_), som.grid_).numpy()
    captions = {
        f"U-matrix: mean distance to the codes next door, {apart_K.min():.3g} (dark) to {apart_K.max():.3g} (bright)": (
            apart_K,
            "magma",
        ),
        f"Hits: rows for which a code is the closest, {som.hits_.min():,.6g} to {som.hits_.max():,.6g} (bright; "
        "logarithmic)": (np.log1p(som.hits_), "viridis"),
    }
    return f'<h2>The map</h2>\n<div class="row map">{_pictures(som, captions, 480, budget)}</div>'


def _planes(som: SelfOrganizingMap, names: list[str], budget: int) -> str:
    values_KD = som.codes_ * som.scale_ + som.mean_ if hasattr(som, "scale_") else som.codes_
    captions = {
        f"{name}: {value_K.min():.4g} to {value_K.max():.4g}": (value_K, "viridis")
        for name, value_K in zip(names[:MOST_PLANES], values_KD.T)
    }
    rest = f"the first {MOST_PLANES} of {len(names)} columns" if len(names) > MOST_PLANES else "every column"
    return (
        f'<h2>Component planes</h2>\n<p class="note">The value of the codes in {rest}, in the units of the table, at '
        f"their places on the map: from the lowest (dark) to the highest (bright).</p>\n"
        f'<div class="planes">{_pictures(som, captions, 240, budget)}</div>'
    )


def _pictures(som: SelfOrganizingMap, captions: dict[str, tuple[np.ndarray, str]], pixels: int, budget: int) -> str:
    return "".join(
        figure(draw_colors(colored(value_K, name)[:, :, 0, 0], som.grid_, pixels), caption, budget)
        for caption, (value_K, name) in captions.items()
    )
