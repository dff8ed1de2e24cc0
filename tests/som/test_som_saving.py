"""Saved estimators that are damaged: refused in a sentence with the file's name, or the same estimator."""

import json
import logging
import os

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from topovq.som import NeuralGas, SelfOrganizingMap
from topovq.storage import DamagedFile

X = np.random.default_rng(0).normal(size=(60, 3))


@pytest.fixture(params=[SelfOrganizingMap, NeuralGas])
def saved(request, tmp_path):
    request.param(n_codes=12, max_iter=3, random_state=0).fit(X).save(tmp_path / "map.safetensors")
    return request.param, tmp_path / "map.safetensors"


def rewrite(path, values=None, **tensors):
    """As a version without digests wrote it, with other values; those of None are left out."""
    with safetensors.safe_open(path, framework="np") as file:
        header = file.metadata()
    kept = {
        name: tensor for name, tensor in (safetensors.numpy.load_file(path) | tensors).items() if tensor is not None
    }
    told = {name: v for name, v in (json.loads(header["values"]) | (values or {})).items() if v != "left out"}
    header = {"format": header["format"], "class": header["class"], "values": json.dumps(told)}
    path.write_bytes(safetensors.numpy.save(kept, metadata=header))


def outcome(kind, path, right):
    try:
        found = kind.load(path)
    except DamagedFile as error:
        return "refused" if str(path) in str(error) else str(error)
    same = found.get_params() == right.get_params() and np.array_equal(found.transform(X), right.transform(X))
    return "right" if same else "another estimator"


def test_the_same_estimator_is_the_same_file(saved, tmp_path):
    kind, path = saved
    for _ in range(4):
        kind.load(path).save(tmp_path / "again")
        assert (tmp_path / "again").read_bytes() == path.read_bytes()


def test_a_damaged_byte_changes_nothing_or_is_refused(saved):
    kind, path = saved
    right, whole = kind.load(path), path.read_bytes()
    outcomes = []
    for place in range(0, len(whole), 31):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        outcomes.append(outcome(kind, path, right))
    for place in (0, 7, 100, len(whole) - 1):
        path.write_bytes(whole[:place])
        outcomes.append(outcome(kind, path, right))
    assert set(outcomes) <= {"right", "refused"}
    assert outcomes.count("refused") > 0.8 * len(outcomes)


def test_a_file_without_a_digest_loads_with_a_note(saved, caplog):
    kind, path = saved
    right = kind.load(path)
    assert not caplog.records
    rewrite(path)
    with caplog.at_level(logging.WARNING):
        assert outcome(kind, path, right) == "right"
    assert "has no SHA-256, so damage to it may go unnoticed" in caplog.text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"fitted.codes_": np.full((12, 3), np.nan)}, "not all finite"),
        ({"fitted.codes_": np.zeros((12, 4))}, "codes_ have 4 features, and n_features_in_ is 3"),
        ({"fitted.codes_": np.zeros(3)}, r"shape \(3,\) are not codes"),
        ({"fitted.codes_": np.zeros((12, 3), dtype=np.int64)}, "codes_ of type int64"),
        ({"fitted.predict": np.zeros(3)}, "'predict' is no fitted attribute"),
        ({"other": np.zeros(3)}, "'other'"),
        ({"values": {"parameter.colour": 3}}, "colour"),
        ({"values": {"fitted.n_features_in_": "left out"}}, "n_features_in_"),
        ({"values": {"parameter.tol": {"grid": 3}}}, "is damaged or no saved estimator"),
    ],
)
def test_what_is_no_estimator_is_refused(saved, change, said):
    kind, path = saved
    rewrite(path, **change)
    with pytest.raises(DamagedFile, match=rf"map\.safetensors is damaged or no saved estimator.*{said}|{said}"):
        kind.load(path)


def test_codes_must_fit_their_map_and_edges(tmp_path):
    for kind, said in ((SelfOrganizingMap, "11 codes, and a map of 12"), (NeuralGas, "edges_ name codes")):
        kind(n_codes=12, max_iter=3, random_state=0).fit(X).save(tmp_path / "map.safetensors")
        edges = {} if kind is SelfOrganizingMap else {"fitted.edges_": np.array([[0, 11]])}
        rewrite(tmp_path / "map.safetensors", **{"fitted.codes_": np.zeros((11, 3)), **edges})
        with pytest.raises(DamagedFile, match=said):
            kind.load(tmp_path / "map.safetensors")


def test_what_is_no_file_is_not_waited_at(tmp_path):
    os.mkfifo(tmp_path / "pipe.safetensors")
    for name in ("pipe.safetensors", ".", "missing.safetensors"):
        with pytest.raises(FileNotFoundError, match="no saved estimator at"):
            SelfOrganizingMap.load(tmp_path / name)
