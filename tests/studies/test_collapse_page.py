"""The page on collapse says what the records say, and the picture of the study is drawn from its table."""

from __future__ import annotations

import csv
import math
import re
import shutil
from pathlib import Path

import pytest
from benchmarks import schedules
from benchmarks.schedules import short_table, small_table, table

from topovq.models.peers import FSQ_LEVELS
from topovq.studies.figure_scale import LOOKS, draw_scale
from topovq.studies.library import Library
from topovq.studies.scale import make_scale
from topovq.studies.sheet import Sheet, as_csv, markdown

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "collapse.md").read_text()
SIZES = [512, 1024, 4096, 16384, 65536]
COMPARED = SIZES[:-1]  # with the quantizers of others, after 6,000 steps
PEERS = ["vqp", "vqp-rotation", "simvq", "fsq", "lfq"]


@pytest.fixture(scope="module")
def sheet() -> Sheet:
    return make_scale("cifar10", Library([ROOT / "records"]), seeds=3, partial=True, codebooks=SIZES)


def test_the_tables_are_those_of_the_records(sheet: Sheet) -> None:
    rows = [
        line
        for line in [*markdown(sheet).splitlines(), *table(), *small_table(), *short_table()]
        if line.startswith("|")
    ]
    assert len(rows) == 2 + 3 * len(SIZES) + (len(PEERS) + 3) * len(COMPARED) + 2 + 8 + 2 + 12 + 2 + 8
    assert [line for line in PAGE.splitlines() if line.startswith("|")] == rows
    assert (ROOT / "docs" / "results" / "scale-cifar10.csv").read_text() == as_csv(sheet)


def by_method(sheet: Sheet, steps: int = 30_000) -> dict[tuple[str, int], dict[str, str]]:
    rows = [dict(zip(sheet.columns, row)) for row in sheet.values]
    return {(row["method"], int(row["codebook_size"])): row for row in rows if int(row["steps"]) == steps}


def test_the_numbers_in_the_text_are_those_of_the_records(sheet: Sheet) -> None:
    rows = by_method(sheet)

    def used(method: str, size: int) -> float:
        return float(rows[method, size]["codes_used_percent_mean"]) / 100

    found = Library([ROOT / "records" / "scale"]).all()
    tokens = {64 * int(run.config["source_validation_images"]) for run in found}
    assert tokens == {636_608}
    assert "636,608 tokens" in PAGE
    assert all(used("ema", size) * size < 2_200 for size in SIZES)
    assert all(used("ksom", size) > 0.99 for size in SIZES[:-1])
    assert round(100 * (1 - used("ksom", 65_536))) == 8
    with open(ROOT / "benchmarks" / "results" / "scale.csv") as file:
        step = {(row["quantizer"], int(row["codebook_size"])): float(row["ms"]) for row in csv.DictReader(file)}
    over = {size: step["kohonen", size] / step["ema", size] - 1 for size in (*SIZES, 262_144)}
    said = re.search(r"\((\d+)% at 16,384 codes,\s+(\d+)% at 65,536,\s+(\d+)% at 262,144\)", PAGE)
    assert said is not None
    assert [int(part) for part in said.groups()] == [round(100 * over[size]) for size in (16_384, 65_536, 262_144)]
    assert all(step["kohonen at 0.75", size] < step["kohonen", size] for size in (16_384, 65_536, 262_144))
    assert all(abs(step["kohonen hard", size] / step["ema", size] - 1) < 0.02 for size in SIZES)


def test_more_tokens_show_more_codes_in_use() -> None:
    with open(ROOT / "benchmarks" / "results" / "use.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["codebook_size"] == "16384"]
    used = {(row["quantizer"], row["over"]): f"{float(row['used']):.1%}" for row in rows}
    over = "validation and training"
    assert {row["tokens"] for row in rows if row["over"] == over} == {"3200000"}
    said = f"{used['kohonen', over]} of the codes of `ksom` occur, instead of {used['kohonen', 'validation']}, and "
    assert f"{said}{used['ema', over]} of those of `ema`" in " ".join(PAGE.split())


def test_in_short_trainings_lower_decays_are_better() -> None:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in short_table()[2:]]
    losses = {
        row[1]: [float(cell.split(",")[0]) for cell in row[2:]] for row in rows if row[0] == "recommended" and all(row)
    }
    assert set(losses) == {"0.99", "0.97", "0.95"}
    assert len(losses["0.99"]) == 4
    assert all(low < high for name in ("0.97", "0.95") for low, high in zip(losses[name], losses["0.99"]))


def test_the_map_is_compared_with_others_after_as_many_steps(sheet: Sheet) -> None:
    rows = by_method(sheet, 6_000)
    assert {size for _, size in rows} == set(COMPARED)
    assert {rows["ksom", size]["run_steps"] for size in COMPARED} == {"6000"}
    assert {rows[name, size]["n"] for name in ("ksom", *PEERS) for size in COMPARED} == {"1"}
    over = {
        name: [float(rows[name, size]["loss_mean"]) - float(rows["ksom", size]["loss_mean"]) for size in COMPARED]
        for name in ("ksom-paper", *PEERS)
    }
    said = re.search(r"\(([\d.]+) more than `ksom` at 512 codes, ([\d.]+) at 1,024, ([\d.]+) at 4,096\)", PAGE)
    assert said is not None
    assert [f"{more:.1f}" for more in over["vqp"]] == [*said.groups(), "2.5"]
    assert "At 16,384 codes `vqp` is 2.5 above `ksom`" in PAGE
    assert over["ksom-paper"][2] < 0 < min(over["ksom-paper"][size] for size in (0, 1, 3))
    assert max(over["ksom-paper"][:3]) < 1.05
    assert f"SimVQ is {min(over['simvq']):.1f} to {max(over['simvq']):.1f} above it" in PAGE
    assert min(over[name][i] for name in ("vqp-rotation", "fsq", "lfq") for i in range(4)) > 5
    assert [math.prod(FSQ_LEVELS[size]) for size in COMPARED] == [512, 1_000, 4_375, 15_360]


def test_others_that_are_more_even_or_faster_are_named(sheet: Sheet) -> None:
    rows, longer = by_method(sheet, 6_000), by_method(sheet)

    def ratio(name: str, size: int, value: str, to: dict[tuple[str, int], dict[str, str]]) -> float | None:
        mine = rows[name, size][value]
        return float(mine) / float(to["ksom", size][value]) if mine else None

    more = {(name, size): ratio(name, size, "perplexity_mean", rows) or 0 for name in PEERS for size in COMPARED}
    assert {name for (name, _), times in more.items() if times > 1} == {"vqp", "lfq"}
    assert min(more[name, size] for name in ("vqp", "lfq") for size in COMPARED) > 1
    assert min(more["vqp", 4_096], more["lfq", 4_096]) > 1.2
    used = {(name, size): float(rows[name, size]["codes_used_percent_mean"]) for name in PEERS for size in COMPARED}
    assert [key for key, share in used.items() if share < 98] == [("vqp-rotation", 16_384)]
    time = {(name, size): ratio(name, size, "ms_per_step", longer) for name in PEERS for size in COMPARED}
    unknown = {key for key, times in time.items() if times is None}
    assert unknown == {*((name, 512) for name in PEERS), ("lfq", 1_024)}
    known = {key: times for key, times in time.items() if times is not None}
    assert [key for key, times in known.items() if times < 1] == [("fsq", 16_384)]
    slower = [times for (name, _), times in known.items() if name == "vqp"]
    assert f"{min(slower):.0f} to {max(slower):.0f} times as long" in PAGE


def test_the_loss_of_the_rotation_trick_rises() -> None:
    found = Library([ROOT / "records" / "scale"]).all()
    losses = {
        run.config["codebook_size"]: [1e3 * seen["loss"] for seen in run.validations()]
        for run in found
        if run.config["quantizer"] == "vqp-rotation"
    }
    rises = {size: (seen[1], seen[-1]) for size, seen in losses.items() if seen[-1] - min(seen) > 1}
    assert all(min(losses[size]) == before for size, (before, _) in rises.items())
    said = "from {:.1f} to {:.1f} at 512 codes and from {:.1f} to {:.1f} at 1,024"
    assert sorted(rises) == [512, 1_024]
    assert said.format(*rises[512], *rises[1_024]) in " ".join(PAGE.split())


def test_the_recommended_schedule_is_near_the_best_of_every_size() -> None:
    library = Library([ROOT / "records"])
    last = {
        name: [run.validations()[-1] for run in map(library.finished, configs) if run is not None]
        for name, configs in schedules.rows()
    }
    last = {name: seen for name, seen in last.items() if seen}
    losses = {name: [1e3 * one["loss"] for one in seen] for name, seen in last.items()}
    first, shorter = "side / 16 to 0.3 over 0.5 of the steps", "side / 16 to 0.3 over 0.3 of the steps"
    gaps = [losses[first][i] - min(seen[i] for seen in losses.values()) for i in range(len(schedules.SIZES))]
    assert f"at most {gaps[2]:.1f} above the best of a size (at 16,384 codes)" in PAGE
    assert max(gaps) == gaps[2]
    large = {name: seen[-1] for name, seen in losses.items() if name.startswith("side")}
    assert min(large, key=lambda name: large[name]) == shorter
    used = {name: last[name][-1]["usage"] for name in large}
    text = " ".join(PAGE.split())
    assert f"{large[shorter]:.2f} with {used[shorter]:.0%} of the codes in use; the first row has" in text
    assert f"the first row has {large[first]:.2f} with {used[first]:.0%}" in text
    above = {name: loss - large[first] for name, loss in large.items()}
    assert f"{above.pop('side / 32 to 0.3 over 0.5 of the steps'):.1f} above the first row" in text
    assert f"the rest at most {max(above.values()):.1f}" in text
    assert max(used, key=lambda name: used[name]) == "side / 16 to 0.5 over 0.5 of the steps"
    assert f"leaves the most codes in use, {max(used.values()):.0%}" in text
    assert all(one["usage"] > 0.9995 for name in large for one in last[name][:-1])


def test_schedules_that_were_not_run_are_dashes(tmp_path: Path) -> None:
    shutil.copy(ROOT / "records" / "schedule" / "f9387dd26a23.jsonl", tmp_path)
    assert table(tmp_path)[2:] == ["| side / 16 to 0.3 over 0.5 of the steps | - | - | - | 29.9, 98.0% |"]
    number = sum(len(configs) for _, configs in schedules.rows())
    assert f"of {number} short runs" in (schedules.__doc__ or "")


def test_the_picture_compares_methods_at_the_same_step() -> None:
    columns = ["codebook_size", "method", "n", "steps", "loss_mean", "loss_std"]
    columns += ["codes_used_percent_mean", "codes_used_percent_std"]
    values = [
        ["512", "ema", "3", "100", "60", "1", "90", "2"],
        ["1024", "ema", "3", "100", "50", "1", "40", "2"],
        ["1024", "ksom", "1", "100", "30", "", "99", ""],
        ["1024", "simvq", "1", "50", "45", "", "98", ""],
        ["1024", "ema", "3", "50", "70", "1", "80", "2"],
        ["1024", "ksom", "1", "50", "40", "", "97", ""],
    ]
    figure = draw_scale(Sheet("scale", "", [], [], [], columns, values))
    losses, uses = figure.axes
    drawn = {
        (line[0].get_color(), line[0].get_markerfacecolor() == "white"): line[0].get_xydata().tolist()
        for line in losses.containers
    }
    ema, ksom, simvq = (LOOKS[name][1] for name in ("ema", "ksom", "simvq"))
    assert drawn == {
        (ema, False): [[512, 60], [1024, 50]],
        (ema, True): [[1024, 70]],
        (ksom, False): [[1024, 30]],
        (ksom, True): [[1024, 40]],
        (simvq, True): [[1024, 45]],
    }
    assert len(uses.containers) == 5
    said = [text.get_text() for text in losses.get_legend().get_texts()]
    assert said == ["EMA-VQ", "KSOM, recommended schedule", "SimVQ"]
    assert "hollow: after 50 steps, every method of that size" in " ".join(t.get_text() for t in figure.texts)


def test_the_readme_quotes_the_same_records(sheet: Sheet) -> None:
    rows = by_method(sheet)
    said = " ".join((ROOT / "README.md").read_text().split())
    for size, text in (
        (16_384, "Of 16,384 codes EMA-VQ uses {:.0f}%, the map {:.1f}%, with {:.0f}% less error"),
        (65_536, "of 65,536 codes {:.0f}% and {:.0f}%, with {:.0f}% less (one seed)."),
    ):
        ema, ksom = rows["ema", size], rows["ksom", size]
        less = 100 * (1 - float(ksom["loss_mean"]) / float(ema["loss_mean"]))
        used = [float(row["codes_used_percent_mean"]) for row in (ema, ksom)]
        assert text.format(*used, less) in said
    assert {rows[name, size]["n"] for name in ("ema", "ksom") for size in SIZES[:-1]} == {"3"}
