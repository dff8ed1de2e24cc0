"""What goes in: missing values, weights, sparse matrices, tensors, frames, batches, and what is refused."""

import numpy as np
import pytest
import scipy.sparse
import torch
from sklearn.datasets import load_digits, load_iris, load_wine
from sklearn.metrics.pairwise import nan_euclidean_distances

from topovq.som import GrowingNeuralGas, NeuralGas, SelfOrganizingMap
from topovq.som.tables import DenseTable, MissingTable, SparseTable

ESTIMATORS = {
    "batch": lambda: SelfOrganizingMap((3, 4), max_iter=4),
    "minibatch": lambda: SelfOrganizingMap((3, 4), rule="minibatch", batch_size=50, max_iter=4, random_state=0),
    "online": lambda: SelfOrganizingMap((3, 4), rule="online", max_iter=2, random_state=0),
    "gas": lambda: NeuralGas(12, max_iter=5),
    "growing": lambda: GrowingNeuralGas(12, max_iter=3, random_state=0),
}
every_estimator = pytest.mark.parametrize("make", ESTIMATORS.values(), ids=ESTIMATORS)


@pytest.fixture(scope="module")
def wine():
    x = load_wine().data
    return (x - x.mean(0)) / x.std(0)


def with_holes(x, share=0.2, seed=0):
    x = x.copy()
    x[np.random.default_rng(seed).random(x.shape) < share] = np.nan
    return x[~np.isnan(x).all(1)]


@pytest.mark.parametrize("metric", ["euclidean", "cosine", "dot"])
def test_tables_agree_with_each_other(wine, metric):
    codes = torch.from_numpy(np.random.default_rng(0).standard_normal((9, 13)))
    dense = DenseTable(torch.from_numpy(wine))
    for table in (MissingTable(torch.from_numpy(wine)), SparseTable(scipy.sparse.csr_matrix(wine))):
        torch.testing.assert_close(table.distances(codes, metric), dense.distances(codes, metric))
        index, distance = table.closest(codes, metric)
        torch.testing.assert_close(distance, dense.closest(codes, metric)[1])
        assert (index == dense.closest(codes, metric)[0]).all()
        assert (table.closest_two(codes, metric) == dense.closest_two(codes, metric)).all()
        torch.testing.assert_close(table.distance_to(codes, index, metric), distance)
        weight = torch.rand(len(wine), dtype=torch.float64)
        expected = dense.statistics(index, weight, 9)
        stats = table.statistics(index, weight, 9)
        torch.testing.assert_close(stats[:, :14], expected)
        torch.testing.assert_close(table.mean(weight), dense.mean(weight))


@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_distances_keep_their_digits_far_from_the_origin(offset, dtype):
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(500, 5, generator=generator, dtype=torch.float64) + offset).to(dtype)
    codes = (torch.randn(40, 5, generator=generator, dtype=torch.float64) + offset).to(dtype)
    exact = (x.double()[:, None] - codes.double()).norm(dim=2)
    table = DenseTable(x)
    torch.testing.assert_close(table.distances(codes, "euclidean").double(), exact, rtol=1e-5, atol=1e-5)
    index, distance = table.closest(codes, "euclidean")
    torch.testing.assert_close(distance.double(), exact.amin(1), rtol=1e-3, atol=1e-3)
    assert (exact.gather(1, index[:, None])[:, 0] - exact.amin(1)).abs().max() < 1e-4


@pytest.mark.parametrize("shift", [0.0, 300.0])
@pytest.mark.parametrize("table", [DenseTable, MissingTable])
def test_codes_far_away_from_the_others_cost_them_nothing(table, shift):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2000, 3, generator=generator) + shift
    codes = torch.randn(64, 3, generator=generator) + shift
    codes[5], codes[9] = 1e6, -1e5
    expected = torch.cdist(x.double(), codes.double(), compute_mode="donot_use_mm_for_euclid_dist")
    index, distance = table(x).closest(codes, "euclidean")
    chosen = expected.gather(1, index[:, None])[:, 0]
    assert torch.allclose(chosen, expected.amin(1), rtol=1e-4, atol=1e-3)
    assert torch.allclose(distance.double(), chosen, rtol=1e-3, atol=2e-2)


def test_missing_values_by_hand():
    # The first feature of the last sample is missing: it is closest to code 1 by the second feature alone,
    # and code 1 then has the mean 4 of one value there, and 11 of two values here.
    x = np.array([[0.0, 0.0], [2.0, 2.0], [4.0, 10.0], [np.nan, 12.0]])
    som = SelfOrganizingMap(2, init=[[0.0, 0.0], [4.0, 10.0]], neighborhood="none", max_iter=1).fit(x)
    assert som.codes_.tolist() == [[1.0, 1.0], [4.0, 11.0]]
    assert som.predict([[np.nan, 9.0], [1.5, np.nan]]).tolist() == [1, 0]
    # One of two features seen: the squared distance counts twice.
    assert som.transform([[np.nan, 9.0]])[0].tolist() == pytest.approx([8 * 2**0.5, 2 * 2**0.5])


def test_distances_with_missing_values_are_those_of_scikit_learn(wine):
    x = with_holes(wine, 0.4)
    for estimator in (SelfOrganizingMap((3, 4)), NeuralGas(12)):
        estimator.fit(x)
        np.testing.assert_allclose(estimator.transform(x), nan_euclidean_distances(x, estimator.codes_), atol=1e-7)


@every_estimator
def test_missing_values_cost_little(wine, make):
    full, holes = make().fit(wine), make().fit(with_holes(wine))
    assert np.isfinite(holes.codes_).all()
    assert holes.score(wine) > 1.25 * full.score(wine)  # scores are negative
    assert holes.predict(with_holes(wine, seed=1)).shape == (len(wine),)


@every_estimator
def test_sparse_data_gives_what_dense_data_gives(make):
    x = load_digits().data[:300]
    dense, sparse = make().fit(x), make().fit(scipy.sparse.csr_array(x))
    np.testing.assert_allclose(sparse.codes_, dense.codes_, atol=1e-6)
    np.testing.assert_allclose(sparse.transform(scipy.sparse.csc_matrix(x)), dense.transform(x), atol=1e-5)
    assert sparse.quantization_error_ == pytest.approx(dense.quantization_error_)


def test_wide_sparse_data_is_never_made_dense():
    # 400 x 200,000: 640 MB if it were dense.
    generator = np.random.default_rng(0)
    place = (np.repeat(np.arange(400), 20), generator.integers(0, 200_000, 8000))
    x = scipy.sparse.csr_matrix((generator.random(8000), place), shape=(400, 200_000))
    som = SelfOrganizingMap((2, 2), init="sample", random_state=0, max_iter=2).fit(x)
    assert som.predict(x).shape == (400,)


def test_principal_components_of_wide_data():
    generator = np.random.default_rng(0)
    x = generator.standard_normal((200, 2)) * [10, 5] @ np.linalg.qr(generator.standard_normal((400, 2)))[0].T
    x = x + 0.01 * generator.standard_normal(x.shape)
    mean, (_, _, axes) = x.mean(0), np.linalg.svd(x - x.mean(0), full_matrices=False)
    start = SelfOrganizingMap((3, 3), max_iter=1, neighborhood="none").fit(x)
    # Codes that nothing reached stay on the plane of the first two components; means of members are near it.
    off = (start.codes_ - mean) - (start.codes_ - mean) @ axes[:2].T @ axes[:2]
    assert np.abs(off).max() < 0.05


@every_estimator
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tensors_in_tensors_out(wine, make, dtype):
    x = torch.from_numpy(wine).to(dtype).requires_grad_()
    from_tensor, from_array = make().fit(x), make().fit(x.detach().numpy())
    np.testing.assert_array_equal(from_tensor.codes_, from_array.codes_)
    winners, distances = from_tensor.predict(x), from_tensor.transform(x)
    assert isinstance(winners, torch.Tensor)
    assert winners.dtype == torch.int64
    assert distances.dtype == dtype
    np.testing.assert_array_equal(winners.numpy(), from_array.predict(x.detach().numpy()))
    assert isinstance(make().fit_predict(x), torch.Tensor)


def test_half_precision_tensors_are_learned_from_in_float32(wine):
    som = SelfOrganizingMap((3, 3)).fit(torch.from_numpy(wine).bfloat16())
    assert som.codes_.dtype == np.float32


@every_estimator
def test_frames_name_their_features(make):
    pandas = pytest.importorskip("pandas", reason="frames need pandas")
    frame = load_iris(as_frame=True).data
    estimator = make().set_output(transform="pandas").fit(frame)
    assert estimator.feature_names_in_.tolist() == list(frame.columns)
    out = estimator.transform(frame)
    assert isinstance(out, pandas.DataFrame)
    assert list(out.columns) == list(estimator.get_feature_names_out())
    assert len(out.columns) == len(estimator.codes_)
    np.testing.assert_array_equal(make().fit(frame.to_numpy()).codes_, estimator.codes_)


# Batches


@every_estimator
def test_partial_fit_takes_any_iterable_of_batches(wine, make):
    by_hand = make()
    for start in range(0, 150, 50):
        by_hand.partial_fit(wine[start : start + 50])
    at_once = make().partial_fit(wine[start : start + 50] for start in range(0, 150, 50))
    np.testing.assert_array_equal(at_once.codes_, by_hand.codes_)
    assert at_once.n_iter_ == 3
    batches = torch.utils.data.DataLoader(torch.from_numpy(wine[:150]), batch_size=50)
    np.testing.assert_array_equal(make().partial_fit(batches).codes_, by_hand.codes_)
    labelled = torch.utils.data.TensorDataset(torch.from_numpy(wine[:150]), torch.arange(150))
    labelled = torch.utils.data.DataLoader(labelled, batch_size=50)
    np.testing.assert_array_equal(make().partial_fit(labelled).codes_, by_hand.codes_)
    with pytest.raises(ValueError, match="empty"):
        make().partial_fit(iter([]))


def test_partial_fit_goes_on_with_the_schedule(wine):
    som = SelfOrganizingMap((4, 4), max_iter=10, radius=4, radius_end=1)
    for _ in range(12):
        som.partial_fit(wine)
    expected = [4 * (1 / 4) ** min(1, t / 9) for t in range(12)]
    np.testing.assert_allclose(som.radii_, expected)


def test_partial_fit_comes_to_where_fit_does(wine):
    som = SelfOrganizingMap((4, 4), max_iter=50)
    som.partial_fit(wine[start::3] for start in list(range(3)) * 20)
    assert som.quantization_error_ < 1.05 * SelfOrganizingMap((4, 4)).fit(wine).quantization_error_


def test_partial_fit_after_fit_stays_near(wine):
    som = SelfOrganizingMap((4, 4)).fit(wine)
    before = som.codes_.copy()
    som.partial_fit(wine)
    # After its last pass the radius is at its end, where the map has settled.
    assert np.abs(som.codes_ - before).max() < 0.2


def test_batches_with_and_without_missing_values(wine):
    som = SelfOrganizingMap((3, 4), max_iter=6)
    for x in (wine, with_holes(wine), wine, with_holes(wine, seed=2)):
        som.partial_fit(x)
    assert np.isfinite(som.codes_).all()
    assert som.score(wine) > 1.25 * SelfOrganizingMap((3, 4)).fit(wine).score(wine)


# Weights


@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
def test_weights_are_repetitions(wine, metric):
    weight = np.random.default_rng(0).integers(0, 4, len(wine))
    for make in (lambda: SelfOrganizingMap(metric=metric), lambda: NeuralGas(10, metric=metric)):
        weighted = make().fit(wine, sample_weight=weight)
        repeated = make().fit(np.repeat(wine, weight, axis=0))
        np.testing.assert_allclose(weighted.codes_, repeated.codes_, atol=1e-9)
        assert weighted.quantization_error_ == pytest.approx(repeated.quantization_error_)
        scaled = make().fit(wine, sample_weight=weight / 100)
        np.testing.assert_allclose(scaled.codes_, weighted.codes_, atol=1e-9)


# What is refused, and what is not


@every_estimator
def test_constant_data_gives_that_constant(make, recwarn):
    x = np.full((50, 3), 2.5)
    estimator = make().fit(x)
    np.testing.assert_allclose(estimator.codes_, 2.5)
    assert estimator.quantization_error_ == pytest.approx(0, abs=1e-7)
    assert not [w for w in recwarn if issubclass(w.category, RuntimeWarning)]


@every_estimator
def test_bad_data_is_refused(wine, make):
    for bad, message in (
        (np.empty((0, 3)), "0 sample"),
        (np.array([[1.0, np.inf], [0.0, 1.0]]), "infinity"),
        (torch.tensor([[1.0, torch.inf]]), "infinity"),
        (torch.zeros(3), "expected \\[samples, features\\]"),
        (torch.zeros(0, 3), "not empty"),
        (np.array([[1.0, np.nan], [0.0, np.nan]]), "features \\[1\\] have no values"),
        (np.array([[1.0, 2.0], [np.nan, np.nan]]), "sample 1 has no values"),
        (scipy.sparse.csr_matrix([[1.0, np.nan]]), "NaN"),
    ):
        with pytest.raises(ValueError, match=message):
            make().fit(bad)
    fitted = make().fit(wine)
    for method in ("predict", "transform", "score"):
        for x in (wine[:, :3], torch.from_numpy(wine[:, :3])):
            with pytest.raises(ValueError, match=r"3 features, but .* expecting 13"):
                getattr(fitted, method)(x)
    with pytest.raises(ValueError, match="at least one non-zero"):
        fitted.score(wine, sample_weight=np.zeros(len(wine)))


@every_estimator
def test_large_numbers_are_learned_from_like_small_ones_or_refused(wine, make):
    small = wine.astype(np.float32)
    fitted, large = make().fit(small), make().fit(small * np.float32(2.0**50))
    assert large.quantization_error_ == pytest.approx(fitted.quantization_error_ * 2.0**50, rel=1e-3)
    assert np.isfinite(make().fit(wine * 1e20).codes_).all()  # float64
    too_large = small * np.float32(1e20)
    holed = too_large.copy()
    holed[0, 0] = np.nan
    for x in (too_large, -too_large, holed, torch.from_numpy(too_large), scipy.sparse.csr_matrix(too_large)):
        with pytest.raises(ValueError, match=r"the data holds .*e\+20, but at most 9e\+15 .*, or give it as float64"):
            make().fit(x)
        with pytest.raises(ValueError, match="the data holds"):
            fitted.predict(x)
    with pytest.raises(ValueError, match=r"divide the data by a constant$"):
        make().fit(wine * 1e160)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rule": "lazy"}, "rule='lazy' is unknown; choose one of 'batch'"),
        ({"neighborhood": "cube"}, "neighborhood='cube' is unknown"),
        ({"metric": "l1"}, "metric='l1' is unknown"),
        ({"init": "zeros"}, "init='zeros' is unknown"),
        ({"init": np.zeros((3, 2))}, r"init of shape \(3, 2\) must be finite numbers of shape \(100, 13\)"),
        ({"topology": "triangular"}, "topology='triangular' is unknown"),
        ({"schedule": "steps"}, "schedule='steps' is unknown"),
        ({"max_iter": 0}, "max_iter=0 must be an int of at least 1"),
        ({"max_iter": 2.5}, "max_iter=2.5 must be an int"),
        ({"learning_rate": 2.0}, "learning_rate=2.0 must be a number of at least 0 and at most 1"),
        ({"learning_rate": 0.05}, "must be at least learning_rate_end"),
        ({"radius": 0.5}, "radius=0.5 must be at least radius_end=1.0"),
        ({"tol": -1}, "tol=-1 must be"),
        ({"n_jobs": 0}, "n_jobs=0 must be"),
        ({"n_codes": 7}, "both given"),
        ({"shape": (0, 3)}, "grid shape"),
        ({"shape": (20, 20), "init": "sample"}, "takes 400 different samples, but n_samples=178"),
        ({"shape": (20, 20), "init": "kmeans++"}, "use fewer codes"),
        ({"shape": (100_000, 100_000)}, "GiB, but .* use a smaller shape"),
        ({"device": "nowhere"}, "nowhere"),
    ],
)
def test_bad_parameters_are_refused_by_fit(wine, parameters, message):
    som = SelfOrganizingMap(**({"shape": (10, 10)} | parameters))  # constructors only store
    with pytest.raises((ValueError, RuntimeError), match=message):
        som.fit(wine)


def test_weights_do_not_go_with_an_iterable(wine):
    with pytest.raises(ValueError, match="goes with one batch"):
        SelfOrganizingMap((2, 2)).partial_fit(iter([wine]), sample_weight=np.ones(len(wine)))
