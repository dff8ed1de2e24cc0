"""Pictures: what is on the axes, and that files of them have something on them."""

import matplotlib as mpl
import numpy as np
import pytest
import scipy.sparse
import torch
from sklearn.datasets import load_digits, load_iris

mpl.use("Agg")
import matplotlib.pyplot as plt

from topovq.som import NeuralGas, SelfOrganizingMap, plots


@pytest.fixture(scope="module")
def iris():
    return load_iris(return_X_y=True)


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


@pytest.fixture(params=[{}, {"topology": "hexagonal"}], ids=["squares", "hexagons"])
def som(request, iris):
    return SelfOrganizingMap((4, 5), **request.param).fit(iris[0])


def cells(ax):
    (collection,) = ax.collections
    return collection


def test_every_kind_returns_axes_with_ink(som, iris, tmp_path):
    options = {
        "label_map": {"X": iris[0], "y": iris[1]},
        "code_images": {"shape": (2, 2)},
        "code_projection": {"X": iris[0]},
    }
    for kind in plots.KINDS:
        drawn = som.plot(kind, **options.get(kind, {}))
        axes = list(np.atleast_1d(drawn))
        assert all(isinstance(ax, plt.Axes) for ax in axes), kind
        axes[0].figure.savefig(tmp_path / f"{kind}.png", dpi=40)
        assert plt.imread(tmp_path / f"{kind}.png")[..., :3].std() > 0.05, kind


def test_they_draw_where_they_are_told(som, iris):
    _, ax = plt.subplots()
    for kind in ("u_matrix", "hit_map", "code_projection", "training_curves"):
        assert som.plot(kind, ax=ax) is ax


def test_cells_are_squares_or_hexagons_side_by_side(som):
    paths = cells(som.plot("u_matrix")).get_paths()
    assert len(paths) == 20
    hexagonal = som.grid_.topology == "hexagonal"
    corners = paths[0].vertices[:-1]
    assert len(corners) == (6 if hexagonal else 4)
    sides = np.linalg.norm(np.roll(corners, 1, 0) - corners, axis=1)
    np.testing.assert_allclose(sides, 1 / 3**0.5 if hexagonal else 1)
    # The area of a cell is the area of the lattice that belongs to it: cells neither overlap nor leave gaps.
    x, y = corners.T
    area = abs((x * np.roll(y, 1) - y * np.roll(x, 1)).sum()) / 2
    assert area == pytest.approx(3**0.5 / 2 if hexagonal else 1)


def test_u_heights_by_hand():
    som = SelfOrganizingMap(3, init=[[0.0], [1.0], [5.0]], neighborhood="none", max_iter=1).fit([[0.0], [1.0], [5.0]])
    assert plots.u_heights(som).tolist() == [1, 2.5, 4]  # 1 apart; 1 and 4; 4
    assert cells(plots.u_matrix(som)).get_array().tolist() == [1, 2.5, 4]


def test_hits_and_labels(som, iris):
    x, y = iris
    assert cells(som.plot("hit_map")).get_array().sum() == 150
    assert cells(som.plot("hit_map", X=x[:10])).get_array().sum() == 10
    with pytest.raises(ValueError, match="no labels"):
        som.plot("label_map")
    names = np.array(["setosa", "versicolor", "virginica"])
    ax = som.plot("label_map", X=x, y=names[y])
    assert [text.get_text() for text in ax.get_legend().get_texts()] == names.tolist()
    faces = cells(ax).get_facecolor()
    pure = np.flatnonzero(som.class_shares_[:, 0] == 1)
    np.testing.assert_allclose(faces[pure, :3], np.tile(mpl.colormaps["tab10"](0)[:3], (len(pure), 1)))
    empty = som.class_shares_.sum(1) == 0
    assert (faces[empty] == plots.EMPTY).all()


def test_component_planes(som):
    axes = som.plot("component_planes")
    assert len(axes) == 4
    np.testing.assert_allclose(cells(axes[2]).get_array(), som.codes_[:, 2])
    assert [ax.get_title() for ax in som.plot("component_planes", features=[3, 1])] == ["x3", "x1"]
    with pytest.raises(ValueError, match="feature 7 is unknown"):
        som.plot("component_planes", features=[7])


def test_codes_as_images():
    x = load_digits().data
    som = SelfOrganizingMap((3, 4)).fit(x)
    ax = som.plot("code_images", shape=(8, 8))
    assert len(ax.images) == 12
    np.testing.assert_allclose(ax.images[5].get_array(), som.codes_[5].reshape(8, 8))
    with pytest.raises(ValueError, match=r"shape=\(8, 9\) does not fit 64 features"):
        som.plot("code_images", shape=(8, 9))


def test_grid_lines(som):
    # 4 x 5 places: 4*4 steps along rows and 3*5 along columns; hexagons have two steps down but at the ends of rows.
    assert len(plots.grid_lines(som)) == (16 + 3 * 9 if som.grid_.topology == "hexagonal" else 31)


def test_lines_and_curves(iris):
    line = SelfOrganizingMap(6).fit(iris[0])
    assert len(cells(line.plot("hit_map")).get_paths()) == 6
    ax = line.plot("training_curves")
    np.testing.assert_allclose(ax.get_lines()[0].get_ydata(), line.quantization_errors_)


def test_samples_of_any_kind_are_projected(iris):
    som = SelfOrganizingMap((3, 3)).fit(iris[0])
    missing = iris[0].copy()
    missing[0, 0] = np.nan
    for x in (iris[0], missing, scipy.sparse.csr_matrix(iris[0]), torch.from_numpy(iris[0])):
        ax = som.plot("code_projection", X=x)
        assert [len(c.get_offsets()) for c in ax.collections if len(c.get_offsets()) > 1] == [150, 9]


def test_what_cannot_be_drawn(iris):
    with pytest.raises(ValueError, match="kind='pie' is unknown"):
        SelfOrganizingMap((3, 3)).fit(iris[0]).plot("pie")
    with pytest.raises(ValueError, match="has 3 axes: pictures have at most 2"):
        SelfOrganizingMap((2, 2, 2)).fit(iris[0]).plot()
    with pytest.raises(ValueError, match="NeuralGas has no map to draw"):
        plots.u_matrix(NeuralGas(4).fit(iris[0]))
    with pytest.raises(ValueError, match="no map to draw"):
        SelfOrganizingMap().plot()
    moved = SelfOrganizingMap((3, 3)).start(iris[0])
    with pytest.raises(ValueError, match=r"no rows were counted for these codes.*: give the rows, as X="):
        moved.plot("hit_map")
    moved.plot("hit_map", X=iris[0])
