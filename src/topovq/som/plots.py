"""Pictures of a fitted SelfOrganizingMap; each returns its axes. Hexagons are drawn as hexagons.

Each takes `ax`, the axes to draw on (new ones otherwise); those of many small pictures make a figure of their own.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.patches import Patch

from topovq.drawing import cells, frame
from topovq.metrics import not_neighbors
from topovq.som.passes import TablePasses
from topovq.som.start import principal_axes
from topovq.som.tables import DenseTable

if TYPE_CHECKING:
    from topovq.som.estimator import SelfOrganizingMap

KINDS = ("u_matrix", "component_planes", "hit_map", "label_map", "code_images", "code_projection", "training_curves")
EMPTY = (0.93, 0.93, 0.93, 1.0)  # cells without samples


def u_matrix(som: SelfOrganizingMap, ax: Axes | None = None, cmap: str = "gray_r") -> Axes:
    """Mean distance of each code to those of its neighbors: dark ridges part the clusters."""
    return _cells(som, u_heights(som), ax, cmap, title="U-matrix: distance to neighboring codes")


def u_heights(som: SelfOrganizingMap) -> np.ndarray:
    """Mean Euclidean distance of each code to the codes of neighboring places, [K]."""
    _check_map(som)
    codes = torch.from_numpy(som.codes_).double()
    heights = torch.zeros(len(codes), dtype=torch.float64)
    every = torch.arange(len(codes))
    for k in every:
        near = ~not_neighbors(k, every, som.grid_) & (every != k)
        if near.any():
            heights[k] = torch.linalg.vector_norm(codes[near] - codes[k], dim=1).mean()
    return heights.numpy()


def component_planes(som: SelfOrganizingMap, features: Any = None, cmap: str = "viridis") -> np.ndarray:
    """One map per feature, colored by the codes' values: an array of axes.

    features  names or column numbers; None draws all (at most 64)
    """
    _check_map(som)
    names = list(getattr(som, "feature_names_in_", [f"x{i}" for i in range(som.n_features_in_)]))
    features = range(len(names)) if features is None else features
    columns = [names.index(f) if isinstance(f, str) and f in names else f for f in features]
    for column in columns:
        if not isinstance(column, (int, np.integer)) or not 0 <= column < len(names):
            raise ValueError(f"feature {column!r} is unknown; choose names or numbers of: {', '.join(names[:20])}")
    if not 1 <= len(columns) <= 64:
        raise ValueError(f"{len(columns)} component planes make no picture: choose 1 to 64 features with features=")
    axes = _small_multiples(len(columns), 2.4)
    values_KD = som.codes_ * som.scale_ + som.mean_ if hasattr(som, "scale_") else som.codes_
    for column, ax in zip(columns, axes):
        _cells(som, values_KD[:, column], ax, cmap, title=str(names[column]))
    return axes


def hit_map(som: SelfOrganizingMap, X: Any = None, ax: Axes | None = None, cmap: str = "Blues") -> Axes:
    """How many samples of X (default: those of the fit) each code is closest to."""
    _check_map(som)
    if X is None and not hasattr(som, "labels_"):  # it was fitted to a table that was read
        if not hasattr(som, "hits_"):
            raise ValueError("no rows were counted for these codes, which update moved: give the rows, as X=")
        hits = som.hits_
    else:
        index = som.labels_ if X is None else np.asarray(som.predict(X))
        hits = np.bincount(index, minlength=som.grid_.size).astype(float)
    texts = [f"{int(h)}" if h else "" for h in hits] if som.grid_.size <= 400 else None
    return _cells(som, hits, ax, cmap, title="samples per code", texts=texts)


def label_map(
    som: SelfOrganizingMap, X: Any = None, y: Any = None, ax: Axes | None = None, cmap: str = "tab10"
) -> Axes:
    """The majority class of each code, paler the less pure it is; labels the map with X and y where they are given."""
    _check_map(som)
    if X is not None:
        som.label(X, y)
    if not hasattr(som, "class_shares_"):
        raise ValueError("the map has no labels: give X and y, or call label(X, y) first")
    purity, winner = som.class_shares_.max(1), som.class_shares_.argmax(1)
    colors = plt.get_cmap(cmap)
    number = len(som.classes_)
    palette = np.array([colors(i % colors.N if colors.N < 256 else i / number) for i in range(number)])
    faces = palette[winner]
    faces[:, :3] = 1 - (1 - faces[:, :3]) * purity[:, None] ** 2
    faces[purity == 0] = EMPTY
    texts = None
    if som.grid_.size <= 400:
        texts = [str(som.classes_[w]) if p else "" for w, p in zip(winner, purity)]
    ax = _cells(som, faces, ax, cmap, title="majority class per code", texts=texts)
    handles = [Patch(color=color, label=str(name)) for color, name in zip(palette, som.classes_)]
    ax.legend(handles=handles, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    return ax


def code_images(som: SelfOrganizingMap, shape: Any, ax: Axes | None = None, cmap: str = "gray") -> Axes:
    """Codes as pictures at their places: shape (height, width), or (height, width, 3) for colors from 0 to 1."""
    _check_map(som)
    shape = tuple(shape)
    if len(shape) not in (2, 3) or math.prod(shape) != som.n_features_in_ or (len(shape) == 3 and shape[2] != 3):
        raise ValueError(f"shape={shape} does not fit {som.n_features_in_} features: expected (height, width[, 3])")
    ax = _axes(ax, som)
    low, high = float(som.codes_.min()), float(som.codes_.max())
    xy = _centers(som)
    for (x, y), code in zip(xy, som.codes_):
        picture = code.reshape(shape).clip(0, 1) if len(shape) == 3 else code.reshape(shape)
        half = 0.47
        ax.imshow(picture, cmap=cmap, vmin=low, vmax=high, extent=(x - half, x + half, y + half, y - half))
    frame(ax, xy, "codes")
    return ax


def code_projection(som: SelfOrganizingMap, X: Any = None, ax: Axes | None = None) -> Axes:
    """Codes on their first two principal components, joined as on the map, over the samples of X where given."""
    _check_map(som)
    data = som.codes_ if X is None else som._fitted_table(X).dense(slice(None))
    data = np.where(np.isnan(data), np.nanmean(data, axis=0), data)
    table = DenseTable(torch.from_numpy(data).double())
    plane, _ = principal_axes(TablePasses([table], [torch.ones(table.n, dtype=torch.float64)]), 2)

    def project(points: torch.Tensor) -> np.ndarray:
        flat = ((points.double() - plane.mean_D) @ plane.axes_MD.T).numpy()
        return flat if flat.shape[1] == 2 else np.pad(flat, ((0, 0), (0, 1)))

    ax = plt.subplots(figsize=(6, 5))[1] if ax is None else ax
    if X is not None:
        samples = project(table.x_ND)
        ax.scatter(samples[:, 0], samples[:, 1], s=8, color="0.6", linewidths=0, label="samples")
    codes = project(torch.from_numpy(som.codes_))
    ax.add_collection(LineCollection([codes[[i, j]] for i, j in grid_lines(som)], colors="tab:blue", linewidths=0.7))
    ax.scatter(codes[:, 0], codes[:, 1], s=12, color="tab:red", zorder=3, label="codes")
    ax.set(xlabel="first component", ylabel="second component", title="the map in the data")
    ax.autoscale_view()
    ax.legend(frameon=False)
    return ax


def grid_lines(som: SelfOrganizingMap) -> np.ndarray:
    """Pairs of places one step apart, int64 [E, 2]: the lines of the map."""
    every = torch.arange(som.grid_.size)
    pairs = []
    for k in every:
        later = every[k + 1 :]
        pairs += [(int(k), int(j)) for j in later[som.grid_.distance(k, later) <= 1 + 1e-9]]
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def training_curves(som: SelfOrganizingMap, ax: Axes | None = None) -> Axes:
    """Quantization error of each pass, and the radius it was made with."""
    if not len(getattr(som, "quantization_errors_", ())):
        raise ValueError("there is nothing to draw: fit the map first")
    ax = plt.subplots(figsize=(6, 3.5))[1] if ax is None else ax
    passes = np.arange(1, len(som.quantization_errors_) + 1)
    ax.plot(passes, som.quantization_errors_, "o-", color="tab:blue", label="quantization error")
    ax.set(xlabel="pass", ylabel="quantization error", title="training")
    other = ax.twinx()
    other.plot(passes, som.radii_, "s--", color="tab:orange", label="radius")
    other.set(ylabel="radius, cells")
    ax.legend(handles=[*ax.get_lines(), *other.get_lines()], frameon=False)
    return ax


def _check_map(som: SelfOrganizingMap) -> None:
    if not hasattr(som, "grid_"):
        raise ValueError(f"{type(som).__name__} has no map to draw: fit a SelfOrganizingMap first")
    if som.grid_.ndim > 2:
        raise ValueError(f"a map of shape {som.grid_.shape} has {som.grid_.ndim} axes: pictures have at most 2")


def _centers(som: SelfOrganizingMap) -> np.ndarray:
    """Where cells are drawn, [K, 2] as (x, y): columns to the right, rows downward; a line of codes is one row."""
    positions = som.grid_.positions().numpy()
    return positions[:, ::-1] if som.grid_.ndim == 2 else np.column_stack([positions[:, 0], np.zeros(som.grid_.size)])


def _cells(
    som: SelfOrganizingMap,
    values: np.ndarray,
    ax: Axes | None,
    cmap: str,
    *,
    title: str,
    texts: list[str] | None = None,
) -> Axes:
    """Cells colored by values [K] with a color bar, or by colors [K, 4]."""
    _check_map(som)
    ax = _axes(ax, som)
    xy = _centers(som)
    drawn = cells(ax, xy, som.grid_.topology == "hexagonal", values, cmap)
    if texts:
        shades = drawn.to_rgba(values)[:, :3] if values.ndim == 1 else values[:, :3]
        for (x, y), text, shade in zip(xy, texts, shades):
            color = "black" if shade @ (0.299, 0.587, 0.114) > 0.5 else "white"
            ax.text(x, y, text, ha="center", va="center", fontsize=7, color=color)
    frame(ax, xy, title)
    return ax


def _axes(ax: Axes | None, som: SelfOrganizingMap) -> Axes:
    if ax is not None:
        return ax
    rows, columns = som.grid_.shape if som.grid_.ndim == 2 else (1, som.grid_.size)
    width = 6.0
    return plt.subplots(figsize=(width, min(12.0, max(1.6, width * 0.85 * rows / columns))))[1]


def _small_multiples(count: int, size: float) -> np.ndarray:
    columns = min(count, math.ceil(math.sqrt(count)))
    rows = math.ceil(count / columns)
    _, axes = plt.subplots(rows, columns, figsize=(size * columns, size * rows), squeeze=False, layout="constrained")
    for ax in axes.flat[count:]:
        ax.remove()
    return axes.flatten()[:count]
