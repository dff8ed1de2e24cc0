"""The study of large codebooks from records made by hand."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest
from made_records import lines_of, write_record

from experiments import specs
from experiments.records import Records
from experiments.scale.table import LOOKS, draw_scale, make_scale
from experiments.specs import Options
from experiments.tables import IncompleteTable, Table, as_csv, markdown

STEPS = 4_000
LOSSES = {"ema": [80, 70, 60, 55], "ksom-paper": [60, 50, 45, 40], "ksom": [90, 50, 40, 30], "gradient": [70, 60]}


@pytest.fixture(autouse=True)
def one_slow_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer of which nothing needs to be installed."""
    monkeypatch.setattr(specs, "PEERS_AT_SCALE", (specs.Cell("scale", "cifar10", "gradient"),))


def write_study(folder: Path, peer_steps: int = STEPS, without: tuple[str, int] | None = None) -> Records:
    """Three seeds of ours, whose losses are 0, 1 and 2 apart from LOSSES; the peer's one may be shorter."""
    for cell in specs.cells("scale", codebooks=[512]):
        for seed in cell.seeds(3):
            if (cell.method, seed) != without:
                steps = peer_steps if cell.method == "gradient" else STEPS
                losses = [loss + seed for loss in LOSSES[cell.method]]
                write_record(folder / f"{cell.method}-{seed}.jsonl", lines_of(cell.config(seed, steps), losses))
    return Records([folder])


def make(records: Records, **options: Any) -> Table:
    return make_scale(Options(steps=STEPS, codebooks=(512,), **options), records)


def as_rows(table: Table) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(as_csv(table))))


def test_rows_have_the_figures_of_the_last_step(tmp_path: Path) -> None:
    table = make(write_study(tmp_path))
    ema, paper, ksom, peer = as_rows(table)
    assert [row["method"] for row in (ema, paper, ksom, peer)] == ["ema", "ksom-paper", "ksom", "gradient"]
    assert (ema["codebook_size"], ema["n"], ema["steps"], ema["run_steps"]) == ("512", "3", "4000", "4000")
    assert (ema["loss_mean"], ema["loss_std"], peer["loss_mean"], peer["loss_std"]) == ("56", "1", "60", "")
    assert (ema["psnr_mean"], ema["perplexity_mean"], ema["codes_used_percent_mean"]) == ("23", "400", "25")
    assert "Lowest mean loss: ksom at 512 (4,000 steps)." in table.notes
    assert "| 512 | ksom | 4,000 | 3 | 31.00 ± 1.00 | 23.00 ± 0.00 dB | 25.0 ± 0.0% | 400 ± 0 |" in markdown(table)


def test_a_shorter_run_has_every_method_shown_at_its_step_too(tmp_path: Path) -> None:
    table = make(write_study(tmp_path, peer_steps=2_000))
    rows = [(row["method"], row["steps"], row["run_steps"], row["loss_mean"]) for row in as_rows(table)]
    assert rows == [
        ("ema", "4000", "4000", "56"),
        ("ksom-paper", "4000", "4000", "41"),
        ("ksom", "4000", "4000", "31"),
        ("gradient", "2000", "2000", "60"),
        ("ema", "2000", "4000", "71"),
        ("ksom-paper", "2000", "4000", "51"),
        ("ksom", "2000", "4000", "51"),
    ]
    assert "ksom-paper at 512 (2,000 steps)" in table.caption
    assert "2,000 of 4,000" in markdown(table)
    assert "a schedule over b steps is not over there" in table.caption


def test_a_run_of_the_shared_length_goes_before_the_curve_of_a_longer_one(tmp_path: Path) -> None:
    write_study(tmp_path, peer_steps=2_000)
    (cell,) = [cell for cell in specs.cells("scale", codebooks=[512]) if cell.method == "ksom"]
    for seed in range(3):
        write_record(tmp_path / f"short-{seed}.jsonl", lines_of(cell.config(seed, 2_000), [60, 33]))
    rows = [row for row in as_rows(make(Records([tmp_path]))) if row["method"] == "ksom"]
    assert [(row["steps"], row["run_steps"], row["loss_mean"]) for row in rows] == [
        ("4000", "4000", "31"),
        ("2000", "2000", "33"),
    ]


def test_a_step_before_the_first_validation_needs_runs_of_its_own(tmp_path: Path) -> None:
    records = write_study(tmp_path, peer_steps=500)
    with pytest.raises(
        IncompleteTable, match=r"missing: ema K=512 .* at step 500 \(runs with --steps 500\); ksom-paper"
    ):
        make(records)
    rows = [(row["method"], row["steps"]) for row in as_rows(make(records, partial=True))]
    assert rows == [("ema", "4000"), ("ksom-paper", "4000"), ("ksom", "4000"), ("gradient", "500")]


def test_another_batch_is_another_run_and_the_caption_says_so(tmp_path: Path) -> None:
    for cell in specs.cells("scale", codebooks=[512]):
        for seed in cell.seeds(3):
            write_record(tmp_path / f"{cell.method}-{seed}.jsonl", lines_of(cell.config(seed, STEPS, None, 32), [9.0]))
    records = Records([tmp_path])
    with pytest.raises(IncompleteTable, match="there is no finished run of scale"):
        make(records, partial=True)
    table = make(records, batch_size=32)
    assert "Trained with batches of 32 images instead of 256." in table.notes
    assert {row["loss_mean"] for row in as_rows(table)} == {"9"}


def test_missing_seeds_and_methods_are_refused_by_name_and_a_partial_table_says_so(tmp_path: Path) -> None:
    records = write_study(tmp_path, without=("ksom", 2))
    with pytest.raises(IncompleteTable, match=r"missing: ksom K=512 \(2 of 3 seeds\)"):
        make(records)
    table = make(records, partial=True)
    assert [row["n"] for row in as_rows(table)] == ["3", "3", "2", "1"]
    assert table.notes[0] == "PARTIAL: missing: ksom K=512 (2 of 3 seeds)."
    with pytest.raises(IncompleteTable, match="gradient K=512"):
        make(write_study(tmp_path / "other", without=("gradient", 0)))
    with pytest.raises(IncompleteTable, match="there is no finished run of scale"):
        make(Records([]), partial=True)


def test_the_cost_of_a_step_is_the_mean_of_the_runs_that_measured_it(tmp_path: Path) -> None:
    for cell in specs.cells("scale", codebooks=[512]):
        for seed in cell.seeds(3):
            lines = lines_of(cell.config(seed, STEPS), [9.0])
            if cell.method == "ksom" and seed:
                lines[-1] |= {"ms_per_step": 0.5 * seed, "peak_mib": 1_000.0 * seed}
            write_record(tmp_path / f"{cell.method}-{seed}.jsonl", lines)
    table = make(Records([tmp_path]))
    ema, _, ksom, _ = as_rows(table)
    assert (ema["ms_per_step"], ema["peak_mib"], ksom["ms_per_step"], ksom["peak_mib"]) == ("", "", "0.75", "1500")
    assert " 25.0 ± 0.0% | 100 ± 0 | 0.750 | 1,500 |" in markdown(table)
    assert "of each run alone on the device" in table.caption


def test_without_a_measured_cost_there_are_no_columns_for_it(tmp_path: Path) -> None:
    assert "ms a step" not in markdown(make(write_study(tmp_path)))


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
    figure = draw_scale(Table("scale", "", [], [], [], columns, values))
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
    assert said == ["EMA-VQ", "KSOM, narrowing", "SimVQ"]
    assert "hollow: after 50 steps, every method with as many" in " ".join(t.get_text() for t in figure.texts)
