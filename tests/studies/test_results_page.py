"""docs/results.md says what the records and the measured files beside it say."""

from __future__ import annotations

import csv
import re
import statistics
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from topovq.studies.figure_parts import FIGURES
from topovq.studies.library import Found, Library
from topovq.studies.sheet import Sheet, as_csv, markdown
from topovq.studies.specs import SCALE, TABLES, cells
from topovq.studies.table import make_table

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "results"
SHOWN = ("sensitivity", "main", "robustness")
SEEDS = 3


@cache
def page() -> str:
    return (ROOT / "docs" / "results.md").read_text()


@cache
def prose() -> str:
    """The page with its line breaks undone."""
    return " ".join(page().split())


@cache
def library() -> Library:
    return Library([ROOT / "records"])


def made(table: str) -> Sheet:
    return make_table(table, "cifar10", library(), seeds=SEEDS, partial=True)


def rows(name: str) -> list[dict[str, str]]:
    with open(FOLDER / name) as file:
        return list(csv.DictReader(file))


def runs_of(**key: str) -> list[Found]:
    """The finished runs of a cell of `main`, `sensitivity` or `robustness`."""
    known = [cell for table in SHOWN for cell in cells(table)]
    cell = next(cell for cell in known if all(getattr(cell, name) == value for name, value in key.items()))
    found = [library().finished(cell.config(seed)) for seed in range(SEEDS)]
    return [run for run in found if run is not None]


def says(text: str) -> None:
    assert text in prose(), f"docs/results.md does not say {text!r}, which is what the records and CSV files say"


@pytest.mark.parametrize("table", SHOWN)
def test_the_tables_are_those_of_the_records(table: str) -> None:
    sheet = made(table)
    assert markdown(sheet) in page()
    assert as_csv(sheet) == (FOLDER / f"{sheet.name}.csv").read_text()


def test_no_table_is_there_that_was_not_made() -> None:
    assert re.findall(r"^\*\*Table (\w+), ", page(), re.MULTILINE) == list(SHOWN)


def test_the_commands_name_tables_and_figures() -> None:
    named = re.findall(r"topovq reproduce ([\w-]+)", page())
    assert set(named) <= {*TABLES, SCALE, *FIGURES}
    assert set(named) >= {*SHOWN, *FIGURES} - {"maps2", "scale-map"}


def test_every_figure_is_small_and_shown() -> None:
    pictures = sorted((ROOT / "docs").glob("results_*.png"))
    assert sorted(re.findall(r"\]\((results_\w+\.png)\)", page())) == [picture.name for picture in pictures]
    assert all(picture.stat().st_size < 300_000 for picture in pictures)


def test_the_runs_and_their_time() -> None:
    found = {run.path for table in SHOWN for cell in cells(table) for run in _finished(cell)}
    assert len(found) == 24
    says("Twenty-four runs")
    lasts = [Found(path).lines[-1]["seconds"] for path in found]
    assert {Found(path).config["at_once"] for path in found} == {6}
    says(f"{max(lasts):.0f} s for six: {max(lasts) / 6:.0f} s a run")


def _finished(cell: Any) -> list[Found]:
    return [run for seed in range(SEEDS) if (run := library().finished(cell.config(seed))) is not None]


def test_what_is_said_of_the_losses() -> None:
    cells_ = {tuple(row[: sheet.columns.index("n")])[2:]: row for sheet in map(made, SHOWN) for row in sheet.values}
    columns = made("main").columns
    lower, percent = [], []
    for key, row in cells_.items():
        ours, paper = (row[columns.index(f"{whose}_loss_mean")] for whose in ("ours", "paper"))
        if paper and key != ("ema", "none", "", "", "0", "no"):
            lower.append(float(paper) - float(ours))
            percent.append(100 * lower[-1] / float(paper))
    assert len(lower) == 8  # the ten cells, less the one that collapses and the one that the paper does not have
    says(f"by {min(lower):.1f} to {max(lower):.1f} (1e-3), or {min(percent):.1f} to {max(percent):.1f}%")
    main = made("main")
    errors = [-float(row[main.header.index("loss diff/SE")]) for row in main.rows[:3]]
    says(f"in `main` that is {min(errors):.0f} to {max(errors):.0f} standard errors")
    means = [float(row[columns.index("ours_loss_mean")]) for row in main.values]
    says(f"well configured, all methods reach about the same loss | the same: {min(means):.1f} to {max(means):.1f}")
    pairs = [float(row[columns.index("ours_loss_mean")]) for row in made("robustness").values]
    says(f"KSOM does not | the same: {pairs[0]:.0f} and {pairs[1]:.1f}")
    says(f"KSOM is not | the same: {pairs[2]:.1f} and {pairs[3]:.1f}")
    ksom = pairs[1::2]
    says(f"KSOM's loss is the same in all configurations, {min(ksom):.1f} to {max(ksom):.1f}")


def test_what_is_said_of_the_steps() -> None:
    ema, hard, gaussian, exponential = rows("main-cifar10.csv")
    twenty = [f"{float(row['ours_steps20_mean_k']):.1f}" for row in (hard, ema, gaussian, exponential)]
    says("`hard` is: {} thousand steps, EMA-VQ {}; `gaussian` ({}) and `exponential` ({}) are not".format(*twenty))
    ten = [f"{float(row['ours_steps10_mean_k']):.1f}" for row in (hard, ema)]
    says("{} (`hard`) and {} (EMA-VQ) thousand steps".format(*ten))
    sooner = [
        float(row[f"paper_steps{share}_mean_k"]) - float(row[f"ours_steps{share}_mean_k"])
        for row in (ema, hard, gaussian)
        for share in (10, 20)
    ]
    assert sooner[-1] == min(sooner) < 0  # of gaussian, at 20%
    assert min(sooner[:-1]) > 0
    says(f"by at most {max(sooner):.1f} thousand steps")
    says(f"`gaussian` at 20% is {-sooner[-1]:.1f} later")


def test_what_is_said_of_the_collapse() -> None:
    bad = runs_of(method="ema", count_init="0", update_empty="no")
    best = [1e3 * min(line["loss"] for line in run.validations()) for run in bad]
    used = [round(512 * run.validations()[-1]["usage"]) for run in bad]
    says(f"their best losses are {best[0]:.1f} and {best[1]:.1f}, with {used[0]} and {used[1]} of the 512 codes in use")


def test_what_is_said_of_the_perplexity() -> None:
    def mean(neighborhood: str, which: int) -> str:
        runs = runs_of(table="main", neighborhood=neighborhood)
        assert len(runs) == 3
        return f"{statistics.fmean(run.validations()[which]['perplexity'] for run in runs):.0f}"

    kinds = ("hard", "exponential", "gaussian", "none")
    first, last = ([mean(kind, which) for kind in kinds] for which in (0, -1))
    says(
        "After 1,000 steps the perplexity is {} with the hard neighborhood, {} with the exponential one, {} with the "
        "Gaussian and {} with EMA-VQ; at the end {}, {}, {} and {}".format(*first, *last)
    )


def test_what_is_said_of_shifts() -> None:
    by_method: dict[str, dict[int, float]] = {}
    for row in rows("shift-psnr.csv"):
        assert (row["seed"], row["images"]) == ("0", "1024")
        by_method.setdefault(row["method"], {})[int(row["offset"])] = float(row["to_reconstruction"])
    (header,) = re.findall(r"^\| places moved \|(.*)\|$", page(), re.MULTILINE)
    offsets = [int(text) for text in header.split("|")]
    for method, values in by_method.items():
        says(f"| {method} (dB) | " + " | ".join(f"{values[offset]:.1f}" for offset in offsets) + " |")
    ahead = {offset: by_method["KSOM"][offset] - by_method["EMA-VQ"][offset] for offset in offsets}
    says(f"ahead by up to {max(ahead.values()):.0f} dB")
    assert all(difference < 0 for offset, difference in ahead.items() if abs(offset) > 4)
    assert all(difference > 2 for offset, difference in ahead.items() if abs(offset) < 4)


def test_what_is_said_of_the_order_on_the_map() -> None:
    ksom, ema = rows("topography.csv")
    assert (ksom["method"], ema["method"]) == ("KSOM", "EMA-VQ")
    says(f"{float(ksom['neighbor_ratio']):.2f} times as far from each other as any two codes")
    says(f"(EMA-VQ: {float(ema['neighbor_ratio']):.2f}, no order)")
    share = [f"{100 * float(row['topographic_error']):.1f}%" for row in (ksom, ema)]
    says(
        "for {} of the encoder's outputs the two closest codes are not neighbors on the map (EMA-VQ: {};".format(*share)
    )
    says(f"by chance: {100 * float(ksom['chance_error']):.1f}%")
    says(f"{int(ksom['vectors']):,} vectors")


def test_what_is_said_of_float32() -> None:
    lower = []
    for row in rows("float32.csv"):
        (run,) = [found for found in library().all() if found.path.stem == row["run"]]
        last = run.validations()[-1]
        assert (float(row["bf16_loss"]), int(row["step"])) == (last["loss"], last["step"])
        lower.append(1e3 * (float(row["bf16_loss"]) - float(row["float32_loss"])))
    says(f"are {min(lower):.2f} to {max(lower):.2f} lower still")
