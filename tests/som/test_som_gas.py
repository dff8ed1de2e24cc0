"""Neural gas and growing neural gas: steps by hand, then what they find."""

import numpy as np
import pytest
from sklearn.cluster import KMeans
from sklearn.datasets import load_digits, load_wine

from topovq.som import GrowingNeuralGas, NeuralGas
from topovq.som.growing import NO_EDGE, _Graph


def test_one_step_of_neural_gas_by_hand():
    # lambda = 1 / ln 2: the closest code has weight 1, the next 1/2. Samples 1 and 9, codes 0 and 10.
    reach = 1 / np.log(2)
    gas = NeuralGas(2, init=[[0.0], [10.0]], range=reach, range_end=reach, max_iter=1).fit([[1.0], [9.0]])
    np.testing.assert_allclose(gas.codes_, [[(1 + 4.5) / 1.5], [(0.5 + 9) / 1.5]], rtol=1e-12)
    assert gas.edges_.tolist() == [[0, 1]]
    assert gas.quantization_errors_.tolist() == [1.0]
    gas.fit([[1.0], [9.0]], sample_weight=[1, 3])
    np.testing.assert_allclose(gas.codes_, [[(1 + 13.5) / 2.5], [(0.5 + 27) / 3.5]], rtol=1e-12)


def test_neural_gas_of_no_range_is_k_means():
    x = load_wine().data
    x = (x - x.mean(0)) / x.std(0)
    gas = NeuralGas(8, init=x[::20][:8], range=1e-3, range_end=1e-3, max_iter=6).fit(x)
    kmeans = KMeans(8, init=x[::20][:8], n_init=1, max_iter=6, tol=0).fit(x)
    np.testing.assert_allclose(gas.codes_, kmeans.cluster_centers_, atol=1e-12)


def test_neural_gas_is_near_the_best_k_means_from_any_start():
    x = load_digits().data
    best = KMeans(20, n_init=10, random_state=0).fit(x).inertia_
    for init in ("pca", "random", "sample"):
        gas = NeuralGas(20, init=init, random_state=0, max_iter=40).fit(x)
        assert (gas.transform(x).min(1) ** 2).sum() < 1.03 * best


def test_one_sample_of_growing_neural_gas_by_hand():
    graph = _Graph(np.array([[0.0, 0.0], [4.0, 0.0], [0.0, 8.0]]), 5)
    graph.age[0, 2] = graph.age[2, 0] = 3
    # (1, 0) is closest to code 0, then to 1: they are joined; the edge 0-2 is a sample older, and 2 follows a little.
    assert graph.learn(np.array([1.0, 0.0]), rate=0.5, neighbor_rate=0.1, max_age=5) == 1
    assert graph.age[:3, :3].tolist() == [[NO_EDGE, 0, 4], [0, NO_EDGE, NO_EDGE], [4, NO_EDGE, NO_EDGE]]
    np.testing.assert_allclose(graph.codes[:3], [[0.5, 0.0], [3.7, 0.0], [0.1, 7.2]])
    assert graph.error[:3].tolist() == [1, 0, 0]
    # The new code goes between code 0, the worst, and its worst neighbor; errors are halved.
    graph.error[:3] = [4, 1, 2]
    graph.insert(split=0.5)
    np.testing.assert_allclose(graph.codes[3], [0.3, 3.6])
    assert graph.error[:4].tolist() == [2, 1, 1, 2]
    assert graph.age[0, 2] == NO_EDGE
    assert graph.age[3, [0, 2]].tolist() == [0, 0]
    # Two more samples: the edge 0-3 grows too old, and what has no edge goes.
    graph = _Graph(np.array([[0.0], [1.0], [9.0]]), 3)
    graph.age[0, 2] = graph.age[2, 0] = 1
    graph.learn(np.array([0.2]), 0.0, 0.0, max_age=1)
    assert graph.size == 2
    np.testing.assert_allclose(graph.codes[:2], [[0.0], [1.0]])


def test_growing_neural_gas_finds_the_parts():
    generator = np.random.default_rng(0)
    parts = [generator.standard_normal((300, 2)) + center for center in ([0, 0], [30, 0], [0, 30])]
    gas = GrowingNeuralGas(30, random_state=0, max_iter=10).fit(np.concatenate(parts))
    assert len(gas.codes_) == 30
    codes = [set(gas.predict(part).tolist()) for part in parts]
    assert not codes[0] & codes[1]
    assert not codes[0] & codes[2]
    # No edge goes from one part to another.
    home = np.array([int(np.argmin([np.linalg.norm(c - center) for center in ([0, 0], [30, 0], [0, 30])]))
                     for c in gas.codes_])  # fmt: skip
    assert (home[gas.edges_[:, 0]] == home[gas.edges_[:, 1]]).all()
    assert gas.quantization_error_ < 0.6


def test_it_grows_from_batch_to_batch():
    x = load_digits().data
    gas = GrowingNeuralGas(40, insert_every=50, random_state=0)
    sizes = [len(gas.partial_fit(batch).codes_) for batch in np.array_split(x, 6)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]
    assert gas.n_iter_ == 6
    # In one go it is the same: ages, errors and the count of samples are kept between calls.
    whole = GrowingNeuralGas(40, insert_every=50, random_state=0).partial_fit(x[:300])
    start = whole.codes_.copy()
    whole.partial_fit(x[300:])
    parts = GrowingNeuralGas(40, insert_every=50, random_state=0).partial_fit(x[:300])
    np.testing.assert_array_equal(parts.codes_, start)
    parts.partial_fit([*x[300:700]]).partial_fit(x[700:])
    np.testing.assert_array_equal(parts.codes_, whole.codes_)
    np.testing.assert_array_equal(parts.edges_, whole.edges_)


@pytest.mark.parametrize(
    ("estimator", "message"),
    [
        (GrowingNeuralGas(1), "max_codes=1 must be an int of at least 2"),
        (GrowingNeuralGas(fading=2.0), "fading=2.0 must be"),
        (NeuralGas(0), "n_codes=0 must be an int of at least 1"),
        (NeuralGas(4, range=0.01), "range=0.01 must be a number of at least 0.1"),
    ],
)
def test_bad_parameters(estimator, message):
    with pytest.raises(ValueError, match=message):
        estimator.fit(np.eye(5))
