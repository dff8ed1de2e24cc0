"""The map as an estimator among estimators: pipelines, searches, copies, files, clusters, labels, stopping."""

import json
import os
import pickle

import joblib
import numpy as np
import pytest
import safetensors
import torch
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_digits, load_iris, load_wine
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import adjusted_rand_score
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from topovq.grid import Grid
from topovq.som import GrowingNeuralGas, NeuralGas, SelfOrganizingMap


@pytest.fixture(scope="module")
def wine():
    x, y = load_wine(return_X_y=True)
    return StandardScaler().fit_transform(x), y


def test_fitted_attributes(wine):
    x, _ = wine
    som = SelfOrganizingMap((5, 6), topology="hexagonal").fit(x)
    assert som.codes_.shape == (30, 13)
    assert som.codes_.dtype == np.float64
    assert som.grid_ == Grid((5, 6), topology="hexagonal")
    assert som.n_iter_ == 10 == len(som.quantization_errors_) == len(som.radii_)
    assert som.radii_[0] == pytest.approx(3)  # half the longest side
    assert som.radii_[-1] == pytest.approx(1)
    assert som.n_features_in_ == 13
    distances = np.linalg.norm(x[:, None] - som.codes_, axis=2)
    np.testing.assert_array_equal(som.labels_, distances.argmin(1))
    np.testing.assert_array_equal(som.predict(x), som.labels_)
    np.testing.assert_allclose(som.transform(x), distances, rtol=1e-9)
    assert som.quantization_error_ == pytest.approx(distances.min(1).mean())
    assert som.score(x) == pytest.approx(-som.quantization_error_)
    first, second = np.argsort(distances, axis=1)[:, :2].T
    apart = som.grid_.distance(torch.from_numpy(first), torch.from_numpy(second)) > 1 + 1e-9
    assert som.topographic_error_ == pytest.approx(apart.double().mean().item())
    np.testing.assert_array_equal(som.places(x), np.stack(np.unravel_index(som.labels_, (5, 6)), 1))
    assert som.get_feature_names_out()[:2].tolist() == ["selforganizingmap0", "selforganizingmap1"]


def test_the_shape_that_is_chosen():
    x = load_iris().data  # 149 different samples: 5 sqrt(149) = 61, a square of 8 x 8
    assert SelfOrganizingMap(max_iter=1).fit(x).grid_.shape == (8, 8)
    assert SelfOrganizingMap(n_codes=12, max_iter=1).fit(x).grid_.shape == (3, 4)
    eleven = SelfOrganizingMap(n_codes=11, max_iter=1).fit(x)  # the last place is empty
    assert eleven.grid_.shape == (3, 4)
    assert eleven.codes_.shape[0] == eleven.grid_.size == 11
    assert SelfOrganizingMap(7, max_iter=1).fit(x).grid_.shape == (7,)
    assert SelfOrganizingMap((2, 3, 2), max_iter=1).fit(x).codes_.shape == (12, 4)
    assert SelfOrganizingMap(topology="hexagonal", wrap=True, max_iter=1).fit(x[:40]).grid_.shape[0] % 2 == 0
    assert SelfOrganizingMap((1, 1)).fit(x).topographic_error_ == 0


@pytest.mark.parametrize("init", ["pca", "sample", "random", "kmeans++"])
def test_every_start_leads_to_a_map(wine, init):
    som = SelfOrganizingMap((4, 4), init=init, random_state=0, max_iter=20).fit(wine[0])
    assert som.quantization_error_ < 2.6
    again = SelfOrganizingMap((4, 4), init=init, random_state=0, max_iter=20).fit(wine[0])
    np.testing.assert_array_equal(again.codes_, som.codes_)


def test_errors_and_winners_use_the_metric(wine):
    x, _ = wine
    som = SelfOrganizingMap((4, 4), metric="cosine").fit(x)
    unit = lambda v: v / np.linalg.norm(v, axis=1, keepdims=True)  # noqa: E731 (a formula)
    distance = 1 - unit(x) @ unit(som.codes_).T
    np.testing.assert_array_equal(som.predict(x), distance.argmin(1))
    assert som.quantization_error_ == pytest.approx(distance.min(1).mean())
    assert som.score(3 * x) == pytest.approx(-som.quantization_error_)  # length means nothing to it
    dot = SelfOrganizingMap((4, 4), metric="dot").fit(x)
    np.testing.assert_allclose(dot.transform(x), -x @ dot.codes_.T, atol=1e-12)


def test_a_torus_has_no_border(wine):
    som = SelfOrganizingMap((6, 6), wrap=True, max_iter=20).fit(wine[0])
    codes = som.codes_.reshape(6, 6, -1)
    seam = np.linalg.norm(codes[0] - codes[-1], axis=1).mean()
    inner = np.linalg.norm(codes[1:] - codes[:-1], axis=2).mean()
    assert seam < 2 * inner


def test_it_stops_early(wine):
    long = SelfOrganizingMap((4, 4), max_iter=200, radius=1, tol=1e-6).fit(wine[0])
    assert 2 <= long.n_iter_ < 200
    assert len(long.quantization_errors_) == long.n_iter_
    before, last = long.quantization_errors_[-2:]
    assert before - last < 1e-6 * before
    gas = NeuralGas(10, max_iter=500, range=0.5, range_end=0.5, tol=1e-6).fit(wine[0])
    assert gas.n_iter_ < 500


def test_a_progress_bar(wine, capfd):
    SelfOrganizingMap((3, 3), verbose=True).fit(wine[0])
    assert "quantization error" in capfd.readouterr().out
    SelfOrganizingMap((3, 3)).fit(wine[0])
    assert capfd.readouterr().out == ""


def test_threads_are_given_back(wine):
    before = torch.get_num_threads()
    som = SelfOrganizingMap((3, 3), n_jobs=2).fit(wine[0])
    assert torch.get_num_threads() == before
    np.testing.assert_allclose(som.codes_, SelfOrganizingMap((3, 3)).fit(wine[0]).codes_, atol=1e-12)


def test_in_a_pipeline_and_a_search(wine):
    x, y = wine
    pipeline = make_pipeline(StandardScaler(), SelfOrganizingMap((5, 5)), LogisticRegression(max_iter=2000))
    search = GridSearchCV(pipeline, {"selforganizingmap__shape": [(2, 2), (4, 4)]}, cv=3).fit(x, y)
    assert search.best_score_ > 0.9
    alone = GridSearchCV(SelfOrganizingMap(), {"shape": [(2, 2), (6, 6)]}, cv=3).fit(x)
    assert alone.best_params_ == {"shape": (6, 6)}


@pytest.mark.parametrize("estimator", [SelfOrganizingMap((3, 3)), NeuralGas(9), GrowingNeuralGas(9, random_state=0)])
def test_copies(wine, estimator, tmp_path):
    x, y = wine
    fresh = clone(estimator)
    with pytest.raises(NotFittedError):
        fresh.predict(x)
    fitted = fresh.fit(x).label(x, y)
    fitted.cluster(3)
    joblib.dump(fitted, tmp_path / "map.joblib")
    fitted.save(tmp_path / "map.safetensors")
    for other in (
        pickle.loads(pickle.dumps(fitted)),
        joblib.load(tmp_path / "map.joblib"),
        type(estimator).load(tmp_path / "map.safetensors"),
    ):
        assert str(other.get_params()) == str(fitted.get_params())
        np.testing.assert_array_equal(other.predict(x), fitted.predict(x))
        np.testing.assert_array_equal(other.predict_label(x), fitted.predict_label(x))
        np.testing.assert_array_equal(other.predict_cluster(x), fitted.predict_cluster(x))
        assert vars(other).keys() == vars(fitted).keys()
        # Learning goes on from where it was.
        expected = pickle.loads(pickle.dumps(fitted)).partial_fit(x).codes_
        np.testing.assert_array_equal(other.partial_fit(x).codes_, expected)


def test_saved_files(wine, tmp_path):
    pandas = pytest.importorskip("pandas", reason="frames need pandas")
    x, y = wine
    names = np.array(["barolo", "grignolino", "barbera"])
    frame = pandas.DataFrame(x, columns=load_wine().feature_names)
    som = (
        SelfOrganizingMap((3, 4), topology="hexagonal", wrap=(False, True), init=x[:12])
        .fit(frame)
        .label(frame, names[y])
    )
    path = tmp_path / "map.safetensors"
    som.save(path)
    assert os.listdir(tmp_path) == ["map.safetensors"]
    with safetensors.safe_open(path, framework="np") as file:  # any reader of the format finds the codes
        np.testing.assert_array_equal(file.get_tensor("fitted.codes_"), som.codes_)
        assert json.loads(file.metadata()["values"])["parameter.topology"] == "hexagonal"
    again = SelfOrganizingMap.load(path)
    assert again.grid_ == som.grid_
    assert again.wrap == (False, True)
    assert again.feature_names_in_.tolist() == list(frame.columns)
    assert again.predict_label(frame).tolist() == som.predict_label(frame).tolist()
    with pytest.raises(ValueError, match="holds a SelfOrganizingMap, not a NeuralGas"):
        NeuralGas.load(path)
    safetensors.torch.save_file({"w": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="is not a saved estimator"):
        SelfOrganizingMap.load(tmp_path / "other.safetensors")
    with pytest.raises(NotFittedError):
        SelfOrganizingMap().save(path)
    odd = SelfOrganizingMap((2, 2), random_state=np.random.RandomState(0)).fit(x)
    with pytest.raises(TypeError, match=r"random_state=.* cannot be saved.*joblib"):
        odd.save(path)
    assert os.listdir(tmp_path).count("map.safetensors") == 1
    assert SelfOrganizingMap.load(path).grid_ == som.grid_  # a failed save leaves the old file
    som.set_output(transform="pandas").save(path)
    pandas.testing.assert_frame_equal(SelfOrganizingMap.load(path).transform(frame), som.transform(frame))


# Clusters and labels


def test_clusters_by_hand():
    som = SelfOrganizingMap(4, init=[[0.0], [1.0], [10.0], [11.0]], neighborhood="none", max_iter=1)
    x = np.array([[0.0], [1.0], [10.0], [11.0], [0.2]])
    som.fit(x)
    for method in ("agglomerative", "kmeans"):
        clusters = som.cluster(2, method)
        assert clusters[0] == clusters[1] != clusters[2] == clusters[3]
        samples = som.predict_cluster(x)
        assert samples.tolist() == clusters[[0, 1, 2, 3, 0]].tolist()
    with pytest.raises(ValueError, match="n_clusters=5 must be an int from 1 to 4"):
        som.cluster(5)
    with pytest.raises(ValueError, match="method='magic' is unknown"):
        som.cluster(2, "magic")


def test_clusters_of_the_map_find_the_classes(wine):
    x, y = wine
    som = SelfOrganizingMap((6, 6)).fit(x)
    with pytest.raises(NotFittedError, match="call cluster"):
        som.predict_cluster(x)
    for method in ("agglomerative", "kmeans"):
        som.cluster(3, method)
        assert adjusted_rand_score(y, som.predict_cluster(x)) > 0.7
    cosine = SelfOrganizingMap((6, 6), metric="cosine").fit(x)
    cosine.cluster(3)
    assert adjusted_rand_score(y, cosine.predict_cluster(x)) > 0.6


def test_labels_by_hand():
    # Code 0 has a, a, b; code 1 has b; code 2 has none and is closest to code 1.
    som = SelfOrganizingMap(3, init=[[0.0], [5.0], [8.0]], neighborhood="none", max_iter=1)
    x = np.array([[-0.5], [0.0], [0.5], [5.0]])
    som.fit(x).label(x, ["a", "a", "b", "b"])
    assert som.code_labels_.tolist() == ["a", "b", "b"]
    np.testing.assert_allclose(som.class_shares_, [[2 / 3, 1 / 3], [0, 1], [0, 0]])
    assert som.predict_label([[0.4], [4.0], [9.0]]).tolist() == ["a", "b", "b"]
    som.label(x, ["a", "a", "b", "b"], sample_weight=[1, 1, 5, 1])
    assert som.code_labels_.tolist() == ["b", "b", "b"]
    with pytest.raises(ValueError, match="y has 2 entries, but X has 4 samples"):
        som.label(x, [0, 1])


def test_labels_classify_digits():
    x, y = load_digits(return_X_y=True)
    som = SelfOrganizingMap((15, 15), max_iter=15).fit(x[:1200]).label(x[:1200], y[:1200])
    assert (som.predict_label(x[1200:]) == y[1200:]).mean() > 0.85
    tensor = som.predict_label(torch.from_numpy(x[1200:]))
    assert isinstance(tensor, torch.Tensor)


def test_a_new_fit_forgets_the_labels_of_the_last(wine):
    x, y = wine
    som = SelfOrganizingMap((3, 3)).fit(x).label(x, y)
    som.fit(load_breast_cancer().data)
    with pytest.raises(NotFittedError, match="call label"):
        som.predict_label(load_breast_cancer().data)
