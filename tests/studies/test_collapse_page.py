"""The page on collapse says what the records say, and the picture of the study is drawn from its table."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest
from benchmarks.schedules import small_table, table

from topovq.studies.figure_scale import draw_scale
from topovq.studies.library import Library
from topovq.studies.scale import make_scale
from topovq.studies.sheet import Sheet, as_csv, markdown

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "collapse.md").read_text()
SIZES = [512, 4096, 16384, 65536]


@pytest.fixture(scope="module")
def sheet() -> Sheet:
    return make_scale("cifar10", Library([ROOT / "records"]), seeds=3, partial=True, codebooks=SIZES)


def test_the_tables_are_those_of_the_records(sheet: Sheet) -> None:
    rows = [line for line in [*markdown(sheet).splitlines(), *table(), *small_table()] if line.startswith("|")]
    assert len(rows) == 2 + 3 * len(SIZES) + 2 + 8 + 2 + 12
    assert [line for line in PAGE.splitlines() if line.startswith("|")] == rows
    assert (ROOT / "docs" / "results" / "scale-cifar10.csv").read_text() == as_csv(sheet)


def test_the_numbers_in_the_text_are_those_of_the_records(sheet: Sheet) -> None:
    rows = {(row[3], int(row[2])): dict(zip(sheet.columns, row)) for row in sheet.values}

    def used(method: str, size: int) -> float:
        return float(rows[method, size]["codes_used_percent_mean"]) / 100

    found = Library([ROOT / "records" / "scale"]).all()
    tokens = {64 * int(run.config["source_validation_images"]) for run in found}
    assert tokens == {636_608}
    assert "636,608 tokens" in PAGE
    assert all(used("ema", size) * size < 2_200 for size in SIZES[1:])
    assert round(100 * (1 - used("ksom", 65_536))) == 8
    with open(ROOT / "benchmarks" / "results" / "scale.csv") as file:
        step = {(row["quantizer"], int(row["codebook_size"])): float(row["ms"]) for row in csv.DictReader(file)}
    over = {size: step["kohonen", size] / step["ema", size] - 1 for size in SIZES}
    said = re.search(r"\((\d+)% at 16,384 codes,\s+(\d+)% at 65,536\)", PAGE)
    assert said is not None
    assert [int(part) for part in said.groups()] == [round(100 * over[16_384]), round(100 * over[65_536])]
    assert all(abs(step["kohonen hard", size] / step["ema", size] - 1) < 0.01 for size in SIZES)


def test_the_picture_shows_each_method_at_its_last_step() -> None:
    columns = ["codebook_size", "method", "n", "steps", "loss_mean", "loss_std"]
    columns += ["codes_used_percent_mean", "codes_used_percent_std"]
    values = [
        ["512", "ema", "3", "100", "60", "1", "90", "2"],
        ["512", "ema", "3", "50", "70", "1", "80", "2"],
        ["1024", "ema", "3", "100", "50", "1", "40", "2"],
        ["1024", "ksom", "1", "100", "30", "", "99", ""],
    ]
    figure = draw_scale(Sheet("scale", "", [], [], [], columns, values))
    losses, uses = figure.axes
    drawn = {line.get_label(): line for line in losses.containers}
    assert list(drawn) == ["EMA-VQ", "KSOM, recommended schedule"]
    assert drawn["EMA-VQ"][0].get_xydata().tolist() == [[512, 60], [1024, 50]]
    assert [line[0].get_xydata().tolist() for line in uses.containers] == [[[512, 90], [1024, 40]], [[1024, 99]]]


def test_the_readme_quotes_the_same_records(sheet: Sheet) -> None:
    rows = {(row[3], int(row[2])): dict(zip(sheet.columns, row)) for row in sheet.values}
    said = " ".join((ROOT / "README.md").read_text().split())
    for size, text in (
        (16_384, "Of 16,384 codes EMA-VQ uses {:.0f}%, the map {:.1f}%, with {:.0f}% less error"),
        (65_536, "of 65,536 codes {:.0f}% and {:.0f}%, with {:.0f}% less."),
    ):
        ema, ksom = rows["ema", size], rows["ksom", size]
        less = 100 * (1 - float(ksom["loss_mean"]) / float(ema["loss_mean"]))
        used = [float(row["codes_used_percent_mean"]) for row in (ema, ksom)]
        assert text.format(*used, less) in said
