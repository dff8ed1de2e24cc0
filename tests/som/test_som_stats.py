"""The mergeable step: statistics add up, travel as bytes, and `update` moves the codes as `fit` does."""

import pickle

import numpy as np
import pytest
import torch
from sklearn.datasets import load_wine

from topovq.som import NeuralGas, SelfOrganizingMap, Stats
from topovq.storage import DamagedFile


@pytest.fixture(scope="module")
def wine():
    x = load_wine().data
    return (x - x.mean(0)) / x.std(0)


def test_statistics_by_hand():
    som = SelfOrganizingMap(2, init=[[0.0, 0.0], [4.0, 10.0]], neighborhood="none", max_iter=1)
    some = som.start([[0.0, 0.0]]).statistics([[0.0, 0.0], [2.0, 0.0]], sample_weight=[1.0, 3.0])
    assert some["sums"].tolist() == [[6.0, 0.0], [0.0, 0.0]]
    assert some["weights"].tolist() == [[4.0], [0.0]]
    assert [float(some[name]) for name in ("error", "weight", "rows")] == [6.0, 4.0, 2.0]
    # A missing value has no weight; with the statistics above, which have one weight a code, it adds up.
    both = some + som.statistics([[np.nan, 8.0]])
    assert both["sums"].tolist() == [[6.0, 0.0], [0.0, 8.0]]
    assert both["weights"].tolist() == [[4.0, 4.0], [0.0, 1.0]]
    assert som.update(both).codes_.tolist() == [[1.5, 0.0], [4.0, 8.0]]  # what nobody told stays
    assert som.n_iter_ == 1
    assert som.quantization_errors_.tolist() == pytest.approx([(6 + 8**0.5) / 5])


@pytest.mark.parametrize("make", [lambda: SelfOrganizingMap((4, 5)), lambda: NeuralGas(12, max_iter=5)])
@pytest.mark.parametrize("holes", [False, True])
def test_passes_over_parts_are_a_fit(wine, make, holes):
    x, weight = wine.copy(), np.linspace(0.5, 2, len(wine))
    if holes:
        x[::7, 3] = np.nan
    whole, parts = make().fit(x, sample_weight=weight), make().start(x, weight)
    while parts.n_iter_ < parts.max_iter:
        told = [parts.statistics(x[rows], weight[rows]) for rows in (slice(50), slice(50, 51), slice(51, None))]
        parts.update(sum(Stats.from_bytes(each.to_bytes()) for each in reversed(told)))
    np.testing.assert_allclose(parts.codes_, whole.codes_, rtol=0, atol=1e-12)
    np.testing.assert_allclose(parts.quantization_errors_, whole.quantization_errors_, rtol=1e-12)


def test_statistics_travel(wine):
    som = SelfOrganizingMap((3, 3)).fit(wine)
    stats = som.statistics(wine)
    for other in (Stats.from_bytes(stats.to_bytes()), pickle.loads(pickle.dumps(stats)), Stats.merge([stats])):
        assert set(other) == {"sums", "weights", "error", "weight", "rows"}
        assert all(torch.equal(other[name], stats[name]) for name in stats)
    assert "sums: [9, 13]" in repr(stats)


def test_what_does_not_fit_is_refused(wine):
    som = SelfOrganizingMap((3, 3)).fit(wine)
    stats = som.statistics(wine)
    with pytest.raises(ValueError, match="is not of 4 codes of 13 features"):
        SelfOrganizingMap((2, 2)).fit(wine).update(stats)
    with pytest.raises(ValueError, match="do not add up"):
        stats + SelfOrganizingMap((2, 2)).fit(wine).statistics(wine)
    with pytest.raises(ValueError, match="do not add up: they differ"):
        stats + Stats(rows=torch.ones(()))
    with pytest.raises(TypeError, match="unsupported operand"):
        stats + 1
    with pytest.raises(TypeError, match="None is no Stats: expected what statistics"):
        som.update(None)
    with pytest.raises(ValueError, match="no statistics to merge"):
        Stats.merge([])
    with pytest.raises(DamagedFile, match="are no statistics"):
        Stats.from_bytes(stats.to_bytes()[:100])


def test_statistics_know_which_codes_they_are_of(wine):
    som = SelfOrganizingMap((3, 3)).start(wine)
    first = som.statistics(wine)
    som.update(first)
    for old in (first, Stats.from_bytes(first.to_bytes()), pickle.loads(pickle.dumps(first)), first + first):
        with pytest.raises(ValueError, match=r"of other codes \(after 0 passes; the map's had 1\): take statistics"):
            som.update(old)
    with pytest.raises(ValueError, match=r"different codes \(after 0 and 1 passes\) do not add up"):
        first + som.statistics(wine)
    other = SelfOrganizingMap((3, 3), init="sample", random_state=0).start(wine)
    with pytest.raises(ValueError, match=r"different codes \(after 0 and 0 passes\)"):
        first + other.statistics(wine)
    with pytest.raises(ValueError, match=r"of other codes \(after 0 passes; the map's had 0\)"):
        other.update(first)
    # A copy on another machine may differ in the last bits.
    copy = SelfOrganizingMap((3, 3)).start(wine)
    copy.codes_ = copy.codes_ * (1 + 1e-12)
    copy.update(first + copy.statistics(wine))
    # Sums that somebody made by hand are taken at their word.
    som.update(Stats(**first))
    assert som.n_iter_ == 2


def test_damaged_bytes_are_refused(wine):
    data = SelfOrganizingMap((3, 3)).start(wine).statistics(wine).to_bytes()
    for wrong in (data.replace(b"passes", b"pauses"), data[:-1], b"", data.replace(b"[", b"]", 1)):
        with pytest.raises(DamagedFile, match="are no statistics"):
            Stats.from_bytes(wrong)


def test_an_update_drops_what_was_measured_of_the_codes_before(wine, tmp_path):
    som = SelfOrganizingMap((3, 3), max_iter=3).fit(wine).label(wine, np.arange(len(wine)) % 2)
    som.cluster(2)
    som.update(som.statistics(wine))
    for name in ("labels_", "hits_", "quantization_error_", "topographic_error_", "code_clusters_", "code_labels_"):
        assert not hasattr(som, name), name
    assert len(som.quantization_errors_) == len(som.radii_) == som.n_iter_ == 4
    som.save(tmp_path / "map.safetensors")
    assert (SelfOrganizingMap.load(tmp_path / "map.safetensors").predict(wine) == som.predict(wine)).all()


def test_batches_after_an_update_go_on_from_its_codes(wine):
    """What earlier batches left is of other codes, and has no say."""
    som = SelfOrganizingMap((3, 3)).partial_fit(wine[:60])
    som.update(som.statistics(wine))
    fresh = SelfOrganizingMap.__new__(SelfOrganizingMap)
    vars(fresh).update({**vars(som), "codes_": som.codes_.copy(), "_running": None})
    np.testing.assert_array_equal(som.partial_fit(wine[60:]).codes_, fresh.partial_fit(wine[60:]).codes_)


def test_rows_that_all_weigh_nothing_are_refused(wine):
    som, none = SelfOrganizingMap((2, 2)).start(wine), lambda: [(wine, np.zeros(len(wine)))]
    for call in (SelfOrganizingMap((2, 2)).fit, som.score, som.measures, lambda rows: som.update(som.statistics(rows))):
        with pytest.raises(ValueError, match="must contain at least one non-zero number"):
            call(none)
    # A part may weigh nothing: the others speak.
    assert np.isfinite(som.update(som.statistics(none) + som.statistics(wine)).codes_).all()
