"""Tables that are read in blocks: every kind of source, and the same map as from an array in memory."""

import pickle
import threading
from itertools import pairwise

import numpy as np
import pandas
import pyarrow
import pyarrow.dataset
import pyarrow.parquet
import pytest
import torch
from rich.progress import Progress
from sklearn.datasets import load_wine
from sklearn.preprocessing import StandardScaler
from warm import python

from topovq.som import NeuralGas, Rows, SelfOrganizingMap, passes
from topovq.storage import DamagedFile

NAMES = [f"c{i}" for i in range(13)]
KINDS = ["file", "folder", "dataset", "memmap", "arrays", "pairs", "frames", "record batches"]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(passes, "ROWS", 50)  # 178 wines are four blocks


@pytest.fixture(scope="module")
def wine():
    x = load_wine().data
    x[::9, 4] = np.nan
    return x, np.linspace(0.5, 2, len(x))


@pytest.fixture(scope="module")
def folder(wine, tmp_path_factory):
    """The wines with weights and a name, as one file of odd row groups, and as a folder of three files."""
    there = tmp_path_factory.mktemp("tables")
    frame = pandas.DataFrame(wine[0], columns=NAMES).assign(w=wine[1], city="Trento")
    table = pyarrow.Table.from_pandas(frame, preserve_index=False)
    pyarrow.parquet.write_table(table, there / "wine.parquet", row_group_size=37)
    (there / "many").mkdir()
    for number, part in enumerate((table.slice(0, 3), table.slice(3, 0), table.slice(3, 120), table.slice(123))):
        pyarrow.parquet.write_table(part, there / "many" / f"{number}.parquet")
    memmap = np.memmap(there / "wine.bin", dtype=np.float64, mode="w+", shape=wine[0].shape)
    memmap[:] = wine[0]
    return there


def sources(folder, wine):
    x, weight = wine
    frame = pandas.read_parquet(folder / "wine.parquet")
    cuts = (0, 1, 77, 77, 130, 178)
    parts = [slice(a, b) for a, b in pairwise(cuts)]
    memmap = np.memmap(folder / "wine.bin", dtype=np.float64, mode="r", shape=x.shape)
    return {
        "file": (Rows(str(folder / "wine.parquet"), NAMES, "w"), None),
        "folder": (Rows(folder / "many", NAMES, "w"), None),
        "dataset": (Rows(pyarrow.dataset.dataset(folder / "many"), NAMES), "w"),
        "memmap": (memmap, weight),
        "arrays": (lambda: (x[part] for part in parts), weight),
        "pairs": (lambda: ((torch.from_numpy(x[part]), weight[part]) for part in parts), None),
        "frames": (Rows(lambda: (frame[part] for part in parts), NAMES, "w"), None),
        "record batches": (Rows(lambda: pyarrow.Table.from_pandas(frame).to_batches(30), NAMES, "w"), None),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_every_source_gives_the_map_of_the_array(folder, wine, kind):
    source, weight = sources(folder, wine)[kind]
    make = lambda: SelfOrganizingMap((4, 5), max_iter=4, standardize=True)  # noqa: E731
    expected, som = make().fit(wine[0], sample_weight=wine[1]), make().fit(source, sample_weight=weight)
    for name in ("codes_", "hits_", "quantization_errors_", "mean_", "scale_"):
        np.testing.assert_array_equal(getattr(som, name), getattr(expected, name), err_msg=name)
    assert som.quantization_error_ == expected.quantization_error_
    assert som.topographic_error_ == expected.topographic_error_
    assert (som.predict(source) == expected.labels_).all()
    assert som.score(source, sample_weight=weight) == expected.score(wine[0], sample_weight=wine[1])
    assert hasattr(som, "labels_") == (kind == "memmap")  # a map of a billion rows has no room for them


def test_scaling_is_that_of_scikit_learn(folder, wine):
    som = SelfOrganizingMap((3, 3), standardize=True).fit(Rows(folder / "wine.parquet", NAMES, "w"))
    scaler = StandardScaler().fit(wine[0], sample_weight=wine[1])
    np.testing.assert_allclose(som.mean_, scaler.mean_, rtol=1e-12)
    np.testing.assert_allclose(som.scale_, scaler.scale_, rtol=1e-12)
    scaled = SelfOrganizingMap((3, 3)).fit(scaler.transform(wine[0]), sample_weight=wine[1])
    np.testing.assert_allclose(som.codes_, scaled.codes_, rtol=0, atol=1e-9)
    # A column that does not vary is moved, and not divided by rounding.
    flat = SelfOrganizingMap((2, 2), standardize=True).fit(np.column_stack([np.arange(9.0), np.full(9, 0.1)]))
    assert flat.scale_[1] == 1
    np.testing.assert_allclose(flat.codes_[:, 1], 0, atol=1e-12)
    for rule in ("minibatch", "online"):
        made = SelfOrganizingMap((3, 3), rule=rule, standardize=True, random_state=0).fit(wine[0])
        x = StandardScaler().fit_transform(wine[0])
        other = SelfOrganizingMap((3, 3), rule=rule, random_state=0).fit(x)
        np.testing.assert_allclose(made.codes_, other.codes_, rtol=0, atol=1e-6)
        np.testing.assert_allclose(made.transform(wine[0]), other.transform(x), rtol=1e-6)


@pytest.mark.parametrize("init", ["pca", "sample", "random"])
@pytest.mark.parametrize("estimator", [SelfOrganizingMap, NeuralGas])
def test_every_start_and_the_default_size(folder, wine, estimator, init):
    rows = Rows(folder / "many", NAMES)
    expected, made = (estimator(init=init, max_iter=2, random_state=0).fit(x) for x in (wine[0], rows))
    np.testing.assert_array_equal(made.codes_, expected.codes_)
    assert made.feature_names_in_.tolist() == NAMES


def test_a_map_of_wide_rows_starts_on_their_plane(tmp_path):
    x = np.random.default_rng(0).standard_normal((120, 300)) * np.r_[9, 5, np.ones(298)]
    pyarrow.parquet.write_table(pyarrow.table({f"c{i}": x[:, i] for i in range(300)}), tmp_path / "wide.parquet")
    expected, made = (SelfOrganizingMap((3, 3), max_iter=2).fit(source) for source in (x, tmp_path / "wide.parquet"))
    np.testing.assert_array_equal(made.codes_, expected.codes_)


def test_columns_are_found_by_name(folder, wine, tmp_path):
    some = ["c5", "c2", "c9"]
    som = SelfOrganizingMap((3, 3), max_iter=2).fit(Rows(folder / "wine.parquet", some))
    np.testing.assert_array_equal(som.codes_, SelfOrganizingMap((3, 3), max_iter=2).fit(wine[0][:, [5, 2, 9]]).codes_)
    assert (som.predict(folder / "wine.parquet") == som.predict(wine[0][:, [5, 2, 9]])).all()  # the fitted ones


def test_types_are_those_of_arrays(tmp_path):
    x = np.random.default_rng(0).integers(0, 50, (200, 2))
    half, small, whole = (tmp_path / f"{kind}.parquet" for kind in ("half", "small", "whole"))
    values = {"a": x[:, 0].astype(np.float32), "b": x[:, 1].astype(np.float32)}
    pyarrow.parquet.write_table(pyarrow.table(values), half)
    pyarrow.parquet.write_table(pyarrow.table({"a": x[:, 0].astype(np.int16), "b": values["b"]}), small)
    pyarrow.parquet.write_table(pyarrow.table({"a": pyarrow.array([True, None] * 100), "b": x[:, 1]}), whole)
    assert SelfOrganizingMap((2, 2)).fit(half).codes_.dtype == np.float32
    assert SelfOrganizingMap((2, 2)).fit(small).codes_.dtype == np.float64
    nulls = np.column_stack([np.where(np.arange(200) % 2, np.nan, 1), x[:, 1]])
    expected = SelfOrganizingMap((2, 2), max_iter=2).fit(nulls)
    np.testing.assert_array_equal(SelfOrganizingMap((2, 2), max_iter=2).fit(whole).codes_, expected.codes_)


def test_parts_add_up_to_the_whole(folder, wine):
    """What each part says, from another process, is what one reader says of all."""
    rows = Rows(folder / "many", NAMES, "w")
    som = SelfOrganizingMap((4, 5)).start(rows)
    parts = pickle.loads(pickle.dumps(rows.parts(3)))
    assert [(part.start, part.stop) for part in parts] == [(0, 100), (100, 178)]
    assert len(rows.parts(100)) == 4
    whole, added = som.statistics(rows), sum(som.statistics(part) for part in parts)
    for name in whole:
        torch.testing.assert_close(added[name], whole[name], rtol=1e-14, atol=0)
    assert sum(len(part.parts(9)) for part in parts) == 4
    assert (np.concatenate([som.predict(part) for part in parts]) == som.predict(rows)).all()


def test_labels_of_codes_and_measures(folder, wine):
    rows, y = Rows(folder / "wine.parquet", NAMES), load_wine().target
    made, expected = (SelfOrganizingMap((3, 3)).fit(x).label(x, y) for x in (rows, wine[0]))
    assert (made.class_shares_ == expected.class_shares_).all()
    assert (made.predict_label(rows) == expected.predict_label(wine[0])).all()
    assert made.measures(rows) == expected.measures(wine[0])
    assert (made.places(rows) == expected.places(wine[0])).all()
    with pytest.raises(ValueError, match="y has 3 entries, but X has 178 samples"):
        made.label(rows, y[:3])


def test_damaged_and_empty_tables(folder, tmp_path):
    som = SelfOrganizingMap((2, 2))
    whole = (folder / "wine.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[:-200])
    (tmp_path / "bad.parquet").write_bytes(whole[:4] + bytes(3000) + whole[3004:])
    pyarrow.parquet.write_table(pyarrow.table({"a": pyarrow.array([], pyarrow.float32())}), tmp_path / "none.parquet")
    (tmp_path / "folder").mkdir()
    for name, problem in {
        "cut.parquet": "cut.parquet is cut off, damaged or no Parquet file",
        "none.parquet": "none.parquet has no rows",
    }.items():
        with pytest.raises(ValueError, match=problem) as error:
            som.fit(tmp_path / name)
        assert "\n" not in str(error.value)
    with pytest.raises(DamagedFile, match=r"bad\.parquet is damaged"):
        som.fit(Rows(tmp_path / "bad.parquet", NAMES))
    table = pyarrow.table({"a": np.random.default_rng(0).random(1000)})
    pyarrow.parquet.write_table(table, tmp_path / "sums.parquet", write_page_checksum=True, compression="none")
    whole = bytearray((tmp_path / "sums.parquet").read_bytes())
    whole[3000] ^= 1  # a number that could be another
    (tmp_path / "sums.parquet").write_bytes(whole)
    for damaged in (tmp_path / "sums.parquet", pyarrow.dataset.dataset(tmp_path / "sums.parquet")):
        with pytest.raises(DamagedFile, match="CRC"):
            som.fit(damaged)
    with pytest.raises(FileNotFoundError, match=r"no \.parquet file in"):
        som.fit(tmp_path / "folder")
    with pytest.raises(FileNotFoundError, match="no table at 'nowhere"):
        som.fit("nowhere.parquet")


@pytest.mark.parametrize(
    ("columns", "weight", "problem"),
    [
        (["c1", "citi"], None, r"wine.parquet has no column 'citi' \(did you mean 'city'\?\); its columns are 'c0'"),
        (["c1", "city"], None, "column 'city' of .*wine.parquet holds .*string, not numbers: choose others"),
        (None, None, "column 'city' of .*wine.parquet holds .*string, not numbers"),
        (["c1"], "v", "has no column 'v'"),
        (["c1"], "city", "column 'city'"),
        ([], None, "no columns to make a map of"),
        (["c1", "c2", "c1"], None, "column 'c1' was named twice: a map takes each column once"),
    ],
)
def test_columns_that_are_not_there(folder, columns, weight, problem):
    with pytest.raises(ValueError, match=problem):
        SelfOrganizingMap((2, 2)).fit(Rows(folder / "wine.parquet", columns, weight))


def test_sources_that_cannot_be(folder, wine):
    x, rows = wine[0], Rows(folder / "wine.parquet", NAMES)
    som = SelfOrganizingMap((2, 2))
    left = [x, x[:10], x]
    for source, problem in [
        ((part for part in [x]), "gives batches, and a fit reads them often: give a function that makes it"),
        (torch.utils.data.DataLoader(x), "gives batches, and a fit reads them often"),
        (Rows(7), "7 cannot be read in blocks"),
        (Rows(pyarrow.table({"a": x[:, 0]})), "cannot be read in blocks: expected Parquet files"),
        (lambda: None, "expected an iterator of batches"),
        (lambda: iter(()), "has no rows"),
        (lambda: [x, x[:, :3]], "expected 13 columns"),
        (lambda: [x[0]], "expected .samples, features."),
        (lambda: [left.pop()], "the same each time"),
        (lambda: [(x, [1.0])], "expected one for each row"),
        (lambda: [(x, -wine[1])], "below 0"),
        (lambda: [np.where(np.arange(13) == 3, np.inf, x)], "contains infinity"),
        (Rows(x, [0, 44]), "no column 44"),
        (Rows(x, [0, 1, 0]), "column 0 was named twice"),
        (Rows(folder / "wine.parquet", "c1"), "must be a list of names"),
    ]:
        with pytest.raises((ValueError, TypeError), match=problem):
            som.fit(source)
    with pytest.raises(ValueError, match="there are more rows"):
        som.fit(rows, sample_weight=[1.0] * 60)
    with pytest.raises(ValueError, match="expected one for each of 178 rows"):
        som.fit(rows, sample_weight=[1.0] * 179)
    with pytest.raises(ValueError, match="13 features, but SelfOrganizingMap is expecting 2"):
        SelfOrganizingMap((2, 2)).fit(x[:, :2]).predict(rows)
    for call in (SelfOrganizingMap((2, 2), rule="online").fit, SelfOrganizingMap().fit(x).transform):
        with pytest.raises(TypeError, match=r"is read in blocks.*this takes an array"):
            call(rows)
    for source in (rows, str(folder / "wine.parquet"), folder / "wine.parquet", lambda: [x]):
        with pytest.raises(TypeError, match="is read in blocks, which `fit` can do: partial_fit takes one batch"):
            som.partial_fit(source)
    with pytest.raises(ValueError, match="looks at all samples"):
        SelfOrganizingMap((2, 2), init="kmeans++").fit(rows)
    with pytest.raises(ValueError, match="standardize=True needs all rows"):
        SelfOrganizingMap((2, 2), standardize=True).partial_fit(x)


def test_weights_are_given_once(folder, wine):
    x, weight = wine
    som, rows = SelfOrganizingMap((2, 2)), Rows(folder / "wine.parquet", NAMES, "w")
    for source, sample_weight, problem in [
        (rows, weight, "as sample_weight and as weight='w'"),
        (rows, "w", "as sample_weight and as weight='w'"),
        (lambda: [(x, weight)], weight, "as sample_weight and by what <lambda> gives"),
        (Rows(lambda: [(x, weight)], weight=4), None, "in a pair of what <lambda> gives and as weight=4"),
    ]:
        with pytest.raises(ValueError, match=f"weights were given twice, {problem}: give one of them"):
            som.fit(source, sample_weight=sample_weight)


def test_a_plan_of_polars_has_no_rows(folder, wine):
    polars = pytest.importorskip("polars")
    som, frame = SelfOrganizingMap((2, 2)), polars.DataFrame(wine[0], schema=NAMES)
    for lazy in (frame.lazy(), Rows(frame.lazy()), lambda: [frame.lazy()]):
        with pytest.raises(TypeError, match=r"a LazyFrame of polars has no rows yet: give its \.collect\(\)"):
            som.fit(lazy)
    with pytest.raises(TypeError, match="a LazyFrame of polars has no rows yet"):
        som.partial_fit(frame.lazy())
    np.testing.assert_array_equal(som.fit(frame).codes_, SelfOrganizingMap((2, 2)).fit(wine[0]).codes_)


def test_columns_without_values_are_named(tmp_path):
    values = {"age": [1.0, 2.0], "never seen": pyarrow.array([None, None], pyarrow.float64())}
    pyarrow.parquet.write_table(pyarrow.table(values), tmp_path / "t.parquet")
    with pytest.raises(ValueError, match=r"features \['never seen'\] have no values, only NaN: remove these columns"):
        SelfOrganizingMap((2, 2)).fit(tmp_path / "t.parquet")


def test_fit_predict_reads_once_more_where_no_labels_are_kept(folder, wine):
    made = SelfOrganizingMap((3, 3)).fit_predict(Rows(folder / "wine.parquet", NAMES))
    assert (made == SelfOrganizingMap((3, 3)).fit_predict(wine[0])).all()


def test_a_reader_that_is_left_ends_its_thread(folder):
    som = SelfOrganizingMap((2, 2)).fit(Rows(folder / "wine.parquet", NAMES))
    blocks = iter(som._passes(Rows(folder / "wine.parquet", NAMES), reset=False))
    next(blocks)
    blocks.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "topovq-rows"]


@pytest.mark.parametrize(
    ("options", "totals"), [({"shape": (3, 3)}, 1), ({}, 1), ({"shape": (3, 3), "max_iter": 9, "tol": 0.5}, 2)]
)
def test_the_bar_says_rows_a_second_and_is_full_after_the_last_pass(folder, capfd, monkeypatch, options, totals):
    """Only `tol` makes it shorter than was told before."""
    update, told = Progress.update, set()
    monkeypatch.setattr(Progress, "update", lambda *a, **new: told.add(new.get("total")) or update(*a, **new))
    SelfOrganizingMap(verbose=True, **options).fit(Rows(folder / "wine.parquet", NAMES))
    end = capfd.readouterr().out.rstrip("\n").split("\n")[-1]
    assert "rows/s" in end
    assert "100%" in end
    assert len(told - {None}) == totals


MEMORY = """
import resource
import numpy as np, torch
torch.set_num_threads(1)
from topovq.som import SelfOrganizingMap
def peak(count):
    def batches():
        for i in range(count):
            yield np.random.default_rng(i).random((50_000, 8), dtype=np.float32)
    SelfOrganizingMap((4, 4), max_iter=1, standardize=True).fit(batches)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(peak(4), peak(40))
"""


def test_memory_does_not_grow_with_the_table():
    """Ten times the rows, 64 MB as an array, take a few MiB more at most."""
    process = python("-c", MEMORY)
    assert process.returncode == 0, process.stderr
    few, many = map(float, process.stdout.split())
    assert many - few < 16


POOL = """
import sys
import pyarrow, pyarrow.dataset
from topovq.som import SelfOrganizingMap
path, kind = sys.argv[1:]
SelfOrganizingMap((2, 2), max_iter=1).fit(pyarrow.dataset.dataset(path) if kind == "dataset" else path)
print(pyarrow.default_memory_pool().max_memory() / 2**20)
"""


@pytest.mark.parametrize(
    ("kind", "group", "most"), [("path", 100_000, 30), ("path", 2_000_000, 45), ("dataset", 100_000, 70)]
)
def test_arrow_keeps_nothing_of_a_file_that_was_read(tmp_path, kind, group, most):
    """A table of 61 MiB, in small row groups and in one: Arrow has a few blocks of it in memory, of 1 MiB."""
    x = np.random.default_rng(0).random((4, 2_000_000), dtype=np.float32)
    table = pyarrow.table({**dict(zip("abcd", x)), "e": x[0], "f": x[1], "g": x[2], "h": x[3]})
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet", row_group_size=group)
    process = python("-c", POOL, tmp_path / "t.parquet", kind)
    assert process.returncode == 0, process.stderr
    assert float(process.stdout) < most


def test_a_folder_may_have_files_without_rows_or_row_groups(folder, wine, tmp_path):
    schema = pyarrow.parquet.read_schema(folder / "wine.parquet")
    pyarrow.parquet.ParquetWriter(tmp_path / "1.parquet", schema).close()
    for number in (0, 2):
        (tmp_path / f"{number}.parquet").write_bytes((folder / "wine.parquet").read_bytes())
    assert SelfOrganizingMap((2, 2)).fit(Rows(tmp_path, NAMES)).hits_.sum() == 2 * len(wine[0])
