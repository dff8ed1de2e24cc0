"""The learning rules of the map: by hand, against the plain rules of the library, and against other libraries."""

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans
from sklearn.datasets import load_breast_cancer, load_digits, load_wine

from topovq import rules
from topovq.grid import Grid
from topovq.neighborhood import Neighborhood, Schedule
from topovq.som import SelfOrganizingMap, learn
from topovq.som.learn import Online
from topovq.som.passes import TablePasses
from topovq.som.questions import Members
from topovq.som.start import initial_codes, map_places
from topovq.som.tables import DenseTable


@pytest.fixture(scope="module")
def wine():
    x = load_wine().data
    return (x - x.mean(0)) / x.std(0)


def random_start(size, dim, seed=0):
    return np.random.default_rng(seed).standard_normal((size, dim))


def test_one_batch_step_by_hand():
    # Codes 0 and 10; 1 and 2 choose the first, 9 the second. Hard neighborhood of radius 0.5: no neighbors.
    x = np.array([[1.0], [2.0], [9.0]])
    som = SelfOrganizingMap(2, init=[[0.0], [10.0]], max_iter=1, neighborhood="hard", radius=0.5, radius_end=0.5)
    assert som.fit(x).codes_.tolist() == [[1.5], [9.0]]
    assert som.labels_.tolist() == [0, 0, 1]
    assert som.quantization_errors_.tolist() == pytest.approx([(1 + 2 + 1) / 3])  # of the codes it started from
    assert som.quantization_error_ == pytest.approx((0.5 + 0.5 + 0) / 3)
    assert som.topographic_error_ == 0
    # Gaussian of radius r: the neighbor's weight is exp(-1 / (2 r^2)); with r = 1/sqrt(2 ln 2) it is 1/2.
    # Sums 3 and 9, counts 2 and 1: (3 + 4.5) / (2 + 0.5) = 3 and (9 + 1.5) / (1 + 1) = 5.25.
    radius = 1 / np.sqrt(2 * np.log(2))
    som = SelfOrganizingMap(2, init=[[0.0], [10.0]], max_iter=1, radius=radius, radius_end=radius)
    np.testing.assert_allclose(som.fit(x).codes_, [[3.0], [5.25]], rtol=1e-12)
    # Weights count as repetitions: 9 twice gives counts 2 and 2, sums 3 and 18.
    som.fit(x, sample_weight=[1, 1, 2])
    np.testing.assert_allclose(som.codes_, [[(3 + 9) / 3], [(18 + 1.5) / 3]], rtol=1e-12)


def test_one_online_step_by_hand():
    # 4 is closest to code 3; rate 1/2, the neighbor's weight is 1/2: 3 -> 3.5, 0 -> 0 + 1/4 * 4 = 1.
    radius = 1 / np.sqrt(2 * np.log(2))
    som = SelfOrganizingMap(
        2, init=[[0.0], [3.0]], rule="online", max_iter=1, radius=radius, radius_end=radius, learning_rate_end=0.5
    )
    np.testing.assert_allclose(som.fit([[4.0]]).codes_, [[1.0], [3.5]], rtol=1e-12)
    # A weight of 2 is two presentations: 1 - (1 - 1/2)^2 = 3/4, and 1 - (1 - 1/4)^2 = 7/16.
    som.fit([[4.0]], sample_weight=[2])
    np.testing.assert_allclose(som.codes_, [[7 / 16 * 4], [3 + 3 / 4]], rtol=1e-12)


@pytest.mark.parametrize("metric", ["euclidean", "cosine", "dot"])
@pytest.mark.parametrize("kind", ["none", "hard", "gaussian", "exponential"])
@pytest.mark.parametrize("layout", [{}, {"wrap": True}, {"topology": "hexagonal"}])
def test_batch_agrees_with_the_plain_rule(wine, kind, metric, layout):
    grid = Grid((4, 5), **layout)
    start = random_start(20, 13)
    som = SelfOrganizingMap(
        (4, 5), **layout, init=start, max_iter=3, radius=2.0, radius_end=0.5, metric=metric, neighborhood=kind
    )
    factor = 2**0.5 if kind == "gaussian" else 1
    neighborhood = Neighborhood(kind, grid, schedule=Schedule.exponential(2 * factor, 0.5 * factor, 2))
    codes = torch.from_numpy(start)
    for step in range(3):
        codes = rules.batch(codes, torch.from_numpy(wine), neighborhood, step=step, metric=metric)
    np.testing.assert_allclose(som.fit(wine).codes_, codes, rtol=0, atol=1e-11)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("metric", ["euclidean", "cosine", "dot"])
@pytest.mark.parametrize("kind", ["none", "hard", "gaussian", "exponential"])
@pytest.mark.parametrize("layout", [{}, {"wrap": True}, {"topology": "hexagonal", "wrap": True}])
def test_online_agrees_with_the_plain_rule(wine, kind, metric, layout, dtype):
    grid = Grid((4, 5), **layout)
    start, x = random_start(20, 13).astype(dtype), wine[:40].astype(dtype)
    neighborhood = Neighborhood(kind, grid, schedule=Schedule.exponential(2.5, 0.7, 39))
    online = Online(start, grid, kind, metric)
    width = neighborhood.schedule(torch.arange(40)).numpy()
    online.learn(x, np.ones(40), width, np.full(40, 0.3))
    expected = rules.online(torch.from_numpy(start), torch.from_numpy(x), neighborhood, beta=0.3, metric=metric)
    np.testing.assert_allclose(online.w_DK.T, expected, rtol=0, atol=1e-12 if dtype == np.float64 else 1e-4)


def test_online_says_how_far_each_sample_was(wine):
    start = random_start(6, 13)
    for metric in ("euclidean", "cosine", "dot"):
        distance = Online(start, Grid((2, 3)), "none", metric).learn(wine[:1], np.ones(1), np.ones(1), np.zeros(1))
        assert distance[0] == pytest.approx(float(DenseTable(torch.from_numpy(wine[:1])).closest(
            torch.from_numpy(start), metric)[1]))  # fmt: skip


def test_no_neighborhood_is_lloyds_k_means():
    x = load_breast_cancer().data  # numbers without ties: which code wins one is nobody's rule
    x = (x - x.mean(0)) / x.std(0)
    start = x[np.random.default_rng(1).choice(len(x), 30, replace=False)]
    som = SelfOrganizingMap(30, init=start, neighborhood="none", max_iter=8).fit(x)
    kmeans = KMeans(30, init=start, n_init=1, max_iter=8, tol=0, algorithm="lloyd").fit(x)
    np.testing.assert_allclose(som.codes_, kmeans.cluster_centers_, rtol=0, atol=1e-12)
    assert (som.labels_ == kmeans.labels_).all()
    assert (som.transform(x).min(1) ** 2).sum() == pytest.approx(kmeans.inertia_, rel=1e-12)


def test_batch_agrees_with_minisom(wine):
    minisom = pytest.importorskip("minisom", reason="the oracle, `pip install minisom`")
    start = random_start(30, 13)
    # MiniSom's offline batch rule at learning rate 1 puts codes at the weighted means, as the batch rule here does.
    other = minisom.MiniSom(5, 6, 13, sigma=1.5, learning_rate=1.0, sigma_decay_function="inverse_decay_to_one")
    other._sigma_decay_function = lambda sigma, t, maximum: sigma
    other._learning_rate_decay_function = lambda rate, t, maximum: rate
    other._weights = start.reshape(5, 6, 13).copy()
    other.train_batch_offline(wine, 4)
    som = SelfOrganizingMap((5, 6), init=start, radius=1.5, radius_end=1.5, max_iter=4).fit(wine)
    np.testing.assert_allclose(som.codes_, other.get_weights().reshape(30, 13), rtol=0, atol=1e-12)
    assert som.quantization_error_ == pytest.approx(other.quantization_error(wine), rel=1e-12)


def test_minibatch_of_everything_at_rate_one_is_batch(wine):
    options = {"shape": (4, 4), "max_iter": 5, "random_state": 0}
    batch = SelfOrganizingMap(**options).fit(wine)
    mini = SelfOrganizingMap(
        **options, rule="minibatch", batch_size=1000, learning_rate=1.0, learning_rate_end=1.0
    ).fit(wine)
    np.testing.assert_allclose(mini.codes_, batch.codes_, rtol=0, atol=1e-10)


@pytest.mark.parametrize("rule", ["batch", "minibatch", "online"])
def test_every_rule_orders_real_data(rule):
    x = load_digits().data
    som = SelfOrganizingMap((8, 8), rule=rule, random_state=0, batch_size=128, max_iter=15).fit(x)
    assert som.quantization_error_ < 0.8 * np.linalg.norm(x - x.mean(0), axis=1).mean()
    assert som.topographic_error_ < 0.2
    assert len(np.unique(som.labels_)) > 50


def test_a_search_along_few_axes_is_the_search():
    x = torch.from_numpy(load_digits().data).float()
    x -= x.mean(0)
    som = SelfOrganizingMap((9, 9), max_iter=10, init="pca")
    for passes, rank in ((0, 2), (1, 30), (2, 38)):
        table, weight = DenseTable(x), torch.ones(len(x))
        start = TablePasses([table], [weight])
        codes = initial_codes("pca", start, map_places(Grid((9, 9))), np.random.RandomState(0))
        neighborhood = Neighborhood("gaussian", Grid((9, 9)), schedule=Schedule.linear(9.0, 9.0, 1))
        for _ in range(passes):
            codes = learn.batch(Members(codes, "euclidean")(table, weight), codes, neighborhood, 0)
        axes = table._few_axes(codes)
        assert axes.shape[1] <= rank
        index, distance = table._closest_along(codes, axes)
        exact = torch.cdist(x.double(), codes.double())
        torch.testing.assert_close(distance.double(), exact.amin(1), rtol=1e-5, atol=1e-4)
        assert (exact.gather(1, index[:, None])[:, 0] - exact.amin(1)).max() < 1e-4  # but for ties
    # A map that is done needs all axes; so does one far from the origin, or in float64.
    done = torch.from_numpy(som.set_params(radius_end=0.5).fit(x.numpy()).codes_)
    assert DenseTable(x)._few_axes(done) is None
    assert DenseTable(x + 1000)._few_axes(codes + 1000) is None
    assert DenseTable(x.double())._few_axes(codes.double()) is None
