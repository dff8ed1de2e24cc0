"""`topovq map` and `topovq place`: a table in, a map and the places of its rows out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas
import pyarrow
import pyarrow.parquet
import pytest
from warm import python

import topovq
from topovq.cli import main
from topovq.som import SelfOrganizingMap


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    there = tmp_path_factory.mktemp("tables")
    generator = np.random.default_rng(0)
    x = generator.standard_normal((500, 3)) * [1, 10, 0.1]
    columns = {"height": x[:, 0], "weight": x[:, 1], "age": x[:, 2], "name": ["A"] * 500, "twice": np.ones(500)}
    table = pyarrow.table(columns)
    pyarrow.parquet.write_table(table, there / "table.parquet")
    (there / "cut.parquet").write_bytes((there / "table.parquet").read_bytes()[:2000])
    pyarrow.parquet.write_table(table.slice(0, 0), there / "empty.parquet")
    (there / "letters").mkdir()
    return there


NAMES = ["height", "weight", "age"]


def test_a_map_of_a_table_and_the_places_of_its_rows(folder: Path, tmp_path: Path, capsys) -> None:
    table = str(folder / "table.parquet")
    made = ["map", table, "--columns", *NAMES, "--grid", "4x6", "--weight", "twice", "-o", str(tmp_path / "map")]
    main(made)
    said = capsys.readouterr().out
    assert "rows/s" in said
    assert f"its report: {tmp_path / 'map' / 'report.html'}" in said.replace("\n", "")
    x = np.column_stack([pyarrow.parquet.read_table(table)[name] for name in NAMES])
    expected = SelfOrganizingMap((4, 6), standardize=True).fit(x)
    som = topovq.load(tmp_path / "map")
    np.testing.assert_array_equal(som.codes_, expected.codes_)
    page = (tmp_path / "map" / "report.html").read_text()
    for words in ("U-matrix", "Hits", "Component planes", "4 x 6, rectangular", "<td>500</td>", "column twice", *NAMES):
        assert words in page
    assert page.count("<img") == 2 + 3
    lowest = expected.codes_[:, 1].min() * expected.scale_[1] + expected.mean_[1]
    assert f"weight: {lowest:.4g} to" in page  # in the units of the table

    main(["place", str(tmp_path / "map"), table, "-o", str(tmp_path / "places.parquet")])
    assert "500 rows placed" in capsys.readouterr().out
    places = pyarrow.parquet.read_table(tmp_path / "places.parquet")
    assert places.column_names == ["code", "row", "column", "distance"]
    assert places["code"].to_pylist() == expected.labels_.tolist()
    both = np.column_stack([places["row"], places["column"]])
    np.testing.assert_array_equal(both, expected.places(x))
    np.testing.assert_allclose(places["distance"], expected.transform(x).min(1), rtol=1e-6)

    for again in (made, ["place", str(tmp_path / "map"), table, "-o", str(tmp_path / "places.parquet")]):
        with pytest.raises(SystemExit, match="2"):
            main(again)
        assert "is there already" in capsys.readouterr().err
    main([*made, "--force", "--passes", "2"])
    assert topovq.load(tmp_path / "map").n_iter_ == 2
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["map", "places.parquet"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["map", "table.parquet"], "column 'name' of table.parquet holds string, not numbers"),
        (["map", "table.parquet", "--columns", "hight"], "has no column 'hight' (did you mean 'height'?)"),
        (["map", "cut.parquet"], "cut.parquet is cut off, damaged or no Parquet file"),
        (["map", "empty.parquet", "--columns", "age"], "empty.parquet has no rows"),
        (["map", "nowhere.parquet"], "there is no table at 'nowhere.parquet'"),
        (["map", "table.parquet", "--columns", "age", "--grid", "3y3"], "--grid '3y3' must be sizes such as 32x32"),
        (["map", "table.parquet", "--columns", "age", "--passes", "0"], "--passes=0 must be an int of at least 1"),
        (["map", "table.parquet", "--columns", "age", "--device", "gpu"], "device='gpu' is unknown; use auto, cpu"),
        (["place", "map.safetensors", "table.parquet", "--device", "mps"], "device='mps' is not supported"),
        (["place", "map.safetensors", "cut.parquet"], "cut.parquet is cut off, damaged or no Parquet file"),
        (["place", "map.safetensors", "empty.parquet"], "empty.parquet has no rows"),
        (["place", "gas.safetensors", "table.parquet"], "gas.safetensors holds no map of a table, but a NeuralGas"),
        (["place", "nowhere", "table.parquet"], "there is nothing at 'nowhere'"),
        (
            ["place", "letters", "table.parquet"],
            "letters is no map of a table: expected a folder that topovq map wrote",
        ),
    ],
)
def test_mistakes_take_one_sentence_and_leave_nothing(folder, monkeypatch, capsys, arguments, problem) -> None:
    monkeypatch.chdir(folder)
    if not Path("map.safetensors").exists():
        x = pandas.DataFrame({"age": np.random.default_rng(0).random(40)})
        topovq.som.SelfOrganizingMap((2, 2)).fit(x).save("map.safetensors")
        topovq.som.NeuralGas(3).fit(x).save("gas.safetensors")
    before = sorted(folder.iterdir())
    with pytest.raises(SystemExit, match="2"):
        main([*arguments, "-o", "out.parquet"])
    captured = capsys.readouterr()
    error = captured.err
    assert problem in error.replace("\n", " ")
    assert "Traceback" not in error
    assert "━" not in captured.out, "a bar for what is refused"
    assert sorted(folder.iterdir()) == before


def test_several_files_are_one_table(folder: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    table = pyarrow.parquet.read_table(folder / "table.parquet", columns=NAMES)
    for name, start in (("b", 0), ("a", 200)):
        pyarrow.parquet.write_table(table.slice(start, 200 if name == "b" else None), f"{name}.parquet")
    pyarrow.parquet.write_table(table, "both.parquet")
    for out, files in (("one", ["both.parquet"]), ("two", ["b.parquet", "a.parquet"])):
        main(["map", *files, "--grid", "3x3", "--passes", "2", "-o", out])
        main(["place", out, *files, "-o", f"{out}.parquet"])
    assert "<td>b.parquet and 1 more</td>" in Path("two", "report.html").read_text()
    np.testing.assert_array_equal(topovq.load("one").codes_, topovq.load("two").codes_)
    assert pyarrow.parquet.read_table("one.parquet").equals(pyarrow.parquet.read_table("two.parquet"))
    capsys.readouterr()
    for files, problem in (([], "no table is named"), (["a.parquet", "c.parquet"], "there is no table at 'c.parquet'")):
        with pytest.raises(SystemExit, match="2"):
            main(["map", *files, "-o", "three"])
        assert problem in capsys.readouterr().err
    assert not Path("three").exists()


def test_torchrun_is_refused(folder: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        main(["map", str(folder / "table.parquet"), "--grid", "4x4", "-o", str(tmp_path / "map")])
    assert "topovq map is one process, not 2: for more than one, use --engine ray" in capsys.readouterr().err
    assert not (tmp_path / "map").exists()


def test_force_overwrites_maps_alone(folder: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("all of it")
    with pytest.raises(SystemExit, match="2"):
        main(["map", str(folder / "table.parquet"), "--columns", "age", "-o", str(tmp_path / "thesis"), "--force"])
    assert "is no map, so it is not overwritten" in capsys.readouterr().err.replace("\n", " ")
    assert (tmp_path / "thesis" / "chapter.txt").read_text() == "all of it"


@pytest.mark.parametrize(("grid", "said"), [("5", "; the line is drawn in rows"), ("2x2x2", "; its slices")])
def test_the_report_says_how_lines_and_slices_lie(folder: Path, tmp_path: Path, grid: str, said: str) -> None:
    main(["map", str(folder / "table.parquet"), "--columns", "age", "--grid", grid, "-o", str(tmp_path / "map")])
    assert said in (tmp_path / "map" / "report.html").read_text()


def test_what_a_killed_map_left_goes_with_the_next(folder: Path, tmp_path: Path) -> None:
    code = """if True:
        import os, sys
        from pathlib import Path
        from topovq.storage import atomic_folder
        with atomic_folder(Path(sys.argv[1])) as folder:
            (folder / "map.safetensors").write_bytes(b"half of it")
            os._exit(9)
    """
    python("-c", code, tmp_path / "map")
    assert len(list(tmp_path.iterdir())) == 1
    main(["map", str(folder / "table.parquet"), "--columns", "age", "--grid", "3", "-o", str(tmp_path / "map")])
    assert [path.name for path in tmp_path.iterdir()] == ["map"]
