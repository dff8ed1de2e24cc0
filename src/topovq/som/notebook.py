"""What a notebook shows of a SelfOrganizingMap: where it is fitted the map, then scikit-learn's diagram."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from sklearn.utils import estimator_html_repr

from topovq.drawing import code_colors, draw_colors, value_colors
from topovq.metrics import neighbor_distances
from topovq.panel import panel, picture

if TYPE_CHECKING:
    from topovq.som.estimator import SelfOrganizingMap


def html(som: SelfOrganizingMap) -> str:
    diagram: str = estimator_html_repr(som)
    if not hasattr(som, "codes_"):
        return diagram
    grid, codes_KD = som.grid_, torch.from_numpy(som.codes_)
    facts = {
        "map": f"{' x '.join(map(str, grid.shape))} {grid.topology}, {som.n_features_in_} features",
        "fitted": f"{som.n_iter_} passes",
    }
    views = {
        "codes, colored by principal components": code_colors(codes_KD),
        "U-matrix: distance to neighboring codes": value_colors(neighbor_distances(codes_KD, grid).numpy()),
    }
    if hasattr(som, "labels_"):
        facts["fitted"] += f", the last over {len(som.labels_):,} samples"
    if hasattr(som, "quantization_error_"):  # not while `update` moves the codes
        facts["quantization error"] = f"{som.quantization_error_:.4g}"
        facts["topographic error"] = f"{som.topographic_error_:.1%}"
        hits_K = np.bincount(som.labels_, minlength=grid.size) if hasattr(som, "labels_") else som.hits_
        views["samples per code"] = value_colors(np.log1p(hits_K.astype(float)))
    pictures = [picture(draw_colors(colors_K3, grid), title) for title, colors_K3 in views.items()]
    return panel(type(som).__name__, facts, [pictures]) + diagram
