"""Tables from records made by hand: the numbers, and what is refused."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_records import lines_of, write_record

from experiments.paper.table import make_table
from experiments.records import Records
from experiments.specs import Blocks, Cell, Options, cells
from experiments.tables import FORMATS, IncompleteTable, Spread, as_csv, latex, markdown, terminal

GOLDEN = Path(__file__).parents[1] / "golden"
STEPS, SEEDS = 6_000, 3
# What each seed's best loss is multiplied with at 1,000, ..., 6,000 steps: +20% at 3k, 3k, 4k and +10% at 4k, 4k, 5k.
CURVES = [(1.5, 1.3, 1.15, 1.05, 1.02, 1.0)] * 2 + [(1.5, 1.4, 1.25, 1.15, 1.05, 1.0)]
BEST = {"none": (52.0, 51.8, 52.2), "hard": (52.5, 52.5, 52.8), "gaussian": (51, 51, 51), "exponential": (50, 51, 52)}

Tweak = Callable[[Cell, int, list[dict[str, Any]]], list[dict[str, Any]] | None]


def write_main(folder: Path, tweak: Tweak = lambda cell, seed, lines: lines) -> Records:
    """The records of `main`, three seeds; `tweak` changes a record, or leaves it out."""
    for cell in cells("main"):
        for seed in range(SEEDS):
            losses = [BEST[cell.neighborhood][seed] * ratio for ratio in CURVES[seed]]
            lines = tweak(cell, seed, lines_of(cell.config(seed, STEPS), losses))
            if lines is not None:
                write_record(folder / f"{cell.neighborhood}-{seed}.jsonl", lines)
    return Records([folder])


def make(records: Records, **options: Any) -> Any:
    return make_table("main", Options(**({"seeds": SEEDS, "steps": STEPS} | options)), records)


def of_hard_1(change: Callable[[list[dict[str, Any]]], Any]) -> Tweak:
    """Changes the record of the second seed of `hard` alone."""
    return lambda cell, seed, lines: change(lines) if (cell.neighborhood, seed) == ("hard", 1) else lines


@pytest.mark.parametrize(("name", "render"), [("main-cifar10.csv", as_csv), ("main-cifar10.md", markdown)])
def test_the_table_is_the_golden_one(tmp_path: Path, name: str, render: Callable[[Any], str]) -> None:
    assert render(make(write_main(tmp_path))) == (GOLDEN / name).read_text()


def test_the_golden_table_has_what_is_computed_by_hand() -> None:
    with open(GOLDEN / "main-cifar10.csv") as file:
        ema, hard, gaussian, exponential = csv.DictReader(file)
    assert (ema["method"], ema["n"], ema["steps"]) == ("ema", "3", "6000")
    assert [float(ema[f"ours_loss_{what}"]) for what in ("mean", "std")] == pytest.approx([52.0, 0.2])
    assert [float(hard[f"ours_loss_{what}"]) for what in ("mean", "std")] == pytest.approx([52.6, 0.03**0.5], rel=1e-4)
    assert [float(gaussian[f"ours_loss_{what}"]) for what in ("mean", "std")] == [51.0, 0.0]
    for row in (ema, hard, gaussian, exponential):  # 4, 4, 5 and 3, 3, 4 thousand
        steps = [float(row[f"ours_steps{n}_{what}_k"]) for n in (10, 20) for what in ("mean", "std")]
        assert steps == pytest.approx([13 / 3, 3**-0.5, 10 / 3, 3**-0.5], rel=1e-4)
    assert (ema["paper_loss_mean"], ema["paper_steps20_std_k"]) == ("51.9", "0.5")
    assert {value for name, value in exponential.items() if name.startswith("paper_")} == {""}


def test_the_difference_is_in_standard_errors_of_both() -> None:
    ours, paper = Spread(52.0, 0.2, 3), Spread(51.9, 0.2, 10)
    assert ours.standard_errors_from(paper) == pytest.approx(0.1 / (0.04 / 3 + 0.04 / 10) ** 0.5)
    assert paper.standard_errors_from(ours) == pytest.approx(-0.1 / (0.04 / 3 + 0.04 / 10) ** 0.5)
    assert Spread(52.0, None, 1).standard_errors_from(paper) is None
    assert Spread(2.0, 0.0, 3).standard_errors_from(Spread(3.0, 0.0, 10)) == -math.inf
    assert Spread(3.0, 0.0, 3).standard_errors_from(Spread(3.0, 0.0, 10)) == 0
    assert Spread.of([3.0]) == Spread(3.0, None, 1)
    assert Spread.of([1.0, 3.0]) == Spread(2.0, 2**0.5, 2)
    assert Spread.of([]) is None


def test_the_caption_says_what_is_less_than_the_paper_and_what_differs(tmp_path: Path) -> None:
    table = make(write_main(tmp_path))
    assert "Fewer seeds than the paper: 3 a cell, 10 there." in table.notes
    assert "Fewer steps than the paper: 6,000, 30,000 there." in table.notes
    (apart,) = [note for note in table.notes if note.startswith("More than two standard errors")]
    # hard: (52.6 - 52.1) / sqrt(0.03/3 + 0.04/10) = 4.2; gaussian: (51 - 51.8) / sqrt(0 + 0.04/10) = -12.6
    assert "ksom hard (loss +4.2, " in apart
    assert "ksom gaussian (loss -12.6, " in apart
    # ema: the loss by 0.1 / sqrt(0.04/3 + 0.04/10) = 0.8 alone, +10% by (13/3 - 5.4) / sqrt(1/9 + 0.25/10) = -2.9
    assert "ema (+10% -2.9)" in apart
    assert "exponential" not in apart
    assert "PARTIAL" not in table.caption
    assert "good" not in table.caption


@pytest.mark.parametrize(("batch", "said"), [(32, "Smaller"), (512, "Larger")])
def test_the_caption_says_when_the_batch_is_not_the_papers(tmp_path: Path, batch: int, said: str) -> None:
    for cell in cells("main"):
        write_record(tmp_path / f"{cell.neighborhood}.jsonl", lines_of(cell.config(0, STEPS, None, batch), [60, 50]))
    table = make(Records([tmp_path]), seeds=1, batch_size=batch)
    assert f"{said} batches than the paper's: {batch}, 256 there." in table.notes
    with pytest.raises(IncompleteTable, match=f"batch_size={batch} instead of 256"):
        make(Records([tmp_path]), seeds=1)
    assert "batches" not in make(write_main(tmp_path / "usual")).caption


def write_faces(folder: Path, images: int, seeds: int = 1) -> Records:
    """Faces with smaller batches: three cells of `main` and two of `robustness`, with best losses 2, 3, 4, 5, 6."""
    run = [cell for cell in cells("main", "faces") if cell.neighborhood != "gaussian"]
    run += cells("robustness", "faces")[:2]
    for number, cell in enumerate(run):
        for seed in range(seeds):
            lines = lines_of(cell.config(seed, 10_000, None, 32), [9, 2 + number], source_train_images=images)
            write_record(folder / f"{number}-{seed}.jsonl", lines)
    return Records([folder])


def faces(table: str, records: Records, seeds: int = 1) -> Any:
    options = Options("faces", seeds, steps=10_000, batch_size=32, partial=True)
    return make_table(table, options, records)


def test_other_data_than_the_papers_is_not_compared_with_it(tmp_path: Path) -> None:
    """Not even where there are enough seeds for a standard error."""
    table = faces("main", write_faces(tmp_path, images=5_753, seeds=2), seeds=2)
    (said,) = [note for note in table.notes if note.startswith("Not the paper's data")]
    assert "5,753 training images, about 43,000 there" in said
    assert "between our methods" in said
    assert "diff/SE" not in "".join([*table.header, table.caption])
    assert "standard errors" not in table.caption
    assert table.rows[0][table.header.index("loss paper")] == "1.86 ± 0.10"  # for orientation
    same = faces("main", write_faces(tmp_path / "same", images=42_000, seeds=2), seeds=2)
    assert "Not the paper's data" not in same.caption
    assert "loss diff/SE" in same.header
    assert "Trained on 42,000 images." in same.notes


def test_one_seed_of_some_rows_is_a_table_that_says_what_is_missing(tmp_path: Path) -> None:
    records = write_faces(tmp_path, images=5_753)
    main, robustness = (faces(table, records) for table in ("main", "robustness"))
    # The rows that were run; the CSV has all, and the note the others.
    assert main.header[:4] == ["method", "neighborhood", "n", "loss ours"]
    assert [row[:4] for row in main.rows] == [
        ["ema", "none", "1", "2.000"],
        ["ksom", "hard", "1", "3.000"],
        ["ksom", "exponential", "1", "4.000"],
    ]
    assert [row[main.columns.index("n")] for row in main.values] == ["1", "1", "0", "1"]
    assert main.notes[0] == "PARTIAL: missing: ksom gaussian grid=2-D tau=0.1 count_init=1 update_empty=yes (seed 0)."
    assert "exponential the one in its authors' code" in main.caption
    # Of the first two of six rows, what they share is in the title.
    assert robustness.header[:4] == ["method", "neighborhood", "n", "loss ours"]
    assert [row[:4] for row in robustness.rows] == [["ema", "none", "1", "5.000"], ["ksom", "hard", "1", "6.000"]]
    assert "count_init 0, update_empty no" in robustness.title
    for table in (main, robustness):
        assert "one seed, 10,000 steps" in table.title
        assert "standard deviation" not in table.caption
        assert "Fewer seeds than the paper: 1 a cell, 5 there." in table.notes
        assert "Fewer steps than the paper: 10,000, 30,000 there." in table.notes
        assert "Smaller batches than the paper's: 32, 128 there." in table.notes
        ours = [row[i] for row in table.rows for i, name in enumerate(table.header) if name.endswith("ours")]
        assert not [text for text in ours if "±" in text or "nan" in text or not text]


def test_full_runs_of_as_many_seeds_as_the_paper_need_no_excuse(tmp_path: Path) -> None:
    for cell in cells("sensitivity"):
        for seed in range(10):
            write_record(tmp_path / f"{cell.name}-{seed}.jsonl", lines_of(cell.config(seed), [52.0] * 30))
    table = make_table("sensitivity", Options(seeds=10), Records([tmp_path]))
    assert "Fewer" not in table.caption
    assert "ten seeds that it calls good" in table.caption  # count_init 0 is among the rows


def test_missing_seeds_are_refused_by_name_and_a_partial_table_says_so(tmp_path: Path) -> None:
    records = write_main(tmp_path, of_hard_1(lambda lines: None))
    with pytest.raises(IncompleteTable, match=r"missing: ksom hard .*\(seed 1\)\. .*--partial shows what is there"):
        make(records)
    table = make(records, partial=True)
    assert [row[table.columns.index("n")] for row in table.values] == ["3", "2", "3", "3"]
    assert table.notes[0].startswith("PARTIAL: missing: ksom hard")
    assert "Fewer seeds than the paper: 2 to 3 a cell, 10 there." in table.notes
    assert all("PARTIAL: missing: ksom hard" in FORMATS[name](table) for name in ("terminal", "markdown", "latex"))


def test_more_seeds_than_there_are_is_missing_seeds(tmp_path: Path) -> None:
    with pytest.raises(IncompleteTable, match=r"ema .* \(seeds 3, 4, 5, 6, 7, 8, 9\); ksom hard"):
        make(write_main(tmp_path), seeds=None)


def write_sensitivity(folder: Path, blocks: Blocks, seeds: int, loss: float) -> None:
    for cell in cells("sensitivity", blocks=blocks):
        for seed in range(seeds):
            name = f"{blocks}-{cell.count_init}-{cell.update_empty}-{seed}"
            write_record(folder / f"{name}.jsonl", lines_of(cell.config(seed), [loss] * 3))


def test_a_table_has_one_kind_of_blocks_the_papers_where_there_are_enough_and_names_it(tmp_path: Path) -> None:
    def drawn(**options: Any) -> tuple[set[str], set[str], set[float], bool]:
        table = make_table("sensitivity", Options(**options), Records([tmp_path]))
        of = {name: {row[table.columns.index(name)] for row in table.values} for name in ("blocks", "n")}
        losses = {float(row[table.columns.index("ours_loss_mean")]) for row in table.values}
        return of["blocks"], of["n"], losses, "plain residual blocks, not the authors'" in table.title

    write_sensitivity(tmp_path, "plain", 5, 50.0)
    assert drawn(render_only=True) == ({"plain"}, {"5"}, {50.0}, True)
    assert drawn(render_only=True, partial=True, seeds=6) == ({"plain"}, {"5"}, {50.0}, True)
    write_sensitivity(tmp_path, "paper", 2, 52.0)  # two seeds are too few
    assert drawn(render_only=True) == ({"plain"}, {"5"}, {50.0}, True)
    assert drawn(render_only=True, blocks="paper", seeds=2) == ({"paper"}, {"2"}, {52.0}, False)
    with pytest.raises(IncompleteTable, match=r"seeds 2, 3, 4, 5, 6, 7, 8, 9.*has model_options=.* instead of"):
        drawn()  # what is to be run is the paper's
    write_sensitivity(tmp_path, "paper", 4, 52.0)
    assert drawn(render_only=True) == ({"paper"}, {"4"}, {52.0}, False)
    assert drawn(render_only=True, blocks="plain") == ({"plain"}, {"5"}, {50.0}, True)
    assert drawn(render_only=True, seeds=5) == ({"plain"}, {"5"}, {50.0}, True)


def test_rows_of_ours_are_shown_once_all_their_seeds_are_there(tmp_path: Path) -> None:
    rows = cells("robustness")
    for cell in rows:
        for seed in range(2 if cell.neighborhood == "exponential" else 3):
            if cell.neighborhood != "gaussian":
                name = f"{cell.neighborhood}-{cell.count_init}-{cell.update_empty}-{seed}"
                write_record(tmp_path / f"{name}.jsonl", lines_of(cell.config(seed), [52.0]))
    table = make_table("robustness", Options(render_only=True), Records([tmp_path]))
    assert {(row[3], row[table.columns.index("n")]) for row in table.values} == {
        ("none", "3"),
        ("hard", "3"),
        ("gaussian", "0"),
        ("exponential", "0"),  # of which two seeds would stand beside three
    }
    assert table.notes[0].startswith("Not measured yet: ksom gaussian")


def test_nothing_there_is_no_partial_table(tmp_path: Path) -> None:
    with pytest.raises(IncompleteTable, match="there is no finished run of main on cifar10"):
        make(Records([tmp_path]), partial=True)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("batch_size", 128, "batch_size=128 instead of 256"),
        ("precision", "fp32", "precision='fp32' instead of 'bf16'"),
        ("learning_rate", 0.1, "learning_rate=0.1 instead of 0.001"),
    ],
)
def test_a_run_of_another_configuration_is_refused_by_name_and_never_mixed_in(
    tmp_path: Path, name: str, value: Any, said: str
) -> None:
    records = write_main(tmp_path, of_hard_1(lambda lines: [lines[0] | {name: value}, *lines[1:]]))
    with pytest.raises(IncompleteTable, match=f"seed 1: .*hard-1.jsonl has {said}"):
        make(records)
    table = make(records, partial=True)
    assert [row[table.columns.index("n")] for row in table.values] == ["3", "2", "3", "3"]
    assert said in table.caption


def test_a_run_of_other_steps_is_refused_by_name(tmp_path: Path) -> None:
    def shorter(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [lines[0] | {"steps": 5_000}, *lines[1:-2], lines[-1] | {"steps": 5_000, "step": 5_000}]

    with pytest.raises(IncompleteTable, match="steps=5000 instead of 6000"):
        make(write_main(tmp_path, of_hard_1(shorter)))


def test_runs_on_different_images_are_mixed(tmp_path: Path) -> None:
    records = write_main(tmp_path, of_hard_1(lambda lines: [lines[0] | {"source_train_images": 100}, *lines[1:]]))
    with pytest.raises(IncompleteTable, match=r"mixed: source_train_images is 40053 in 11 .* and 100 in 1 .*hard-1"):
        make(records)
    assert "PARTIAL: mixed: source_train_images" in make(records, partial=True).caption


def test_where_the_images_lay_makes_no_difference(tmp_path: Path) -> None:
    elsewhere = {"data_path": "/elsewhere", "source_path": "/elsewhere", "id": "another"}
    table = make(write_main(tmp_path, of_hard_1(lambda lines: [lines[0] | elsewhere, *lines[1:]])))
    assert as_csv(table) == (GOLDEN / "main-cifar10.csv").read_text()


def test_a_record_that_was_cut_off_is_not_finished(tmp_path: Path) -> None:
    records = write_main(tmp_path, of_hard_1(lambda lines: lines[:4]))
    with pytest.raises(IncompleteTable, match=r"hard-1\.jsonl was cut off at step 3,000"):
        make(records)


def test_a_half_written_last_line_is_dropped(tmp_path: Path) -> None:
    write_main(tmp_path)
    with open(tmp_path / "hard-1.jsonl", "a") as file:
        file.write('{"event": "valid')
    assert as_csv(make(Records([tmp_path]))) == (GOLDEN / "main-cifar10.csv").read_text()


def test_other_files_and_foreign_runs_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / "notes.jsonl").write_text('{"event": "benchmark"}\n[1]\n')
    (tmp_path / "empty.jsonl").write_text("")
    write_record(tmp_path / "foreign.jsonl", lines_of(cells("sensitivity")[0].config(0, STEPS), [9.0]))
    assert as_csv(make(write_main(tmp_path))) == (GOLDEN / "main-cifar10.csv").read_text()


def test_one_run_in_two_places_counts_once_and_must_say_one_thing(tmp_path: Path) -> None:
    write_main(tmp_path / "a")
    write_main(tmp_path / "b", lambda cell, seed, lines: [line | {"seconds": 3.0} for line in lines])
    assert as_csv(make(Records([tmp_path]))) == (GOLDEN / "main-cifar10.csv").read_text()
    write_main(tmp_path / "b", of_hard_1(lambda lines: [*lines[:2], lines[2] | {"loss": 0.01}, *lines[3:]]))
    with pytest.raises(ValueError, match=r"a/hard-1\.jsonl and .*b/hard-1\.jsonl are records of one run"):
        make(Records([tmp_path]))


def test_a_run_that_never_had_a_finite_loss_is_named(tmp_path: Path) -> None:
    def nothing(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [line | {"loss": None} if line["event"] == "validation" else line for line in lines]

    with pytest.raises(ValueError, match=r"hard-1\.jsonl: none of the 6 validations has a finite loss"):
        make(write_main(tmp_path, of_hard_1(nothing)))


def test_one_seed_has_no_spread(tmp_path: Path) -> None:
    table = make(write_main(tmp_path), seeds=1)
    assert "±" not in "".join(row[table.header.index("loss ours")] for row in table.rows)
    assert [row[table.columns.index("ours_loss_std")] for row in table.values] == [""] * 4
    assert "loss diff/SE" not in table.header


def test_latex_and_terminal_hold_every_number_of_the_markdown(tmp_path: Path) -> None:
    table = make(write_main(tmp_path))
    for text in (latex(table).replace(r"$\pm$", "±"), terminal(table)):
        for row in table.rows:
            assert all(cell in text for cell in row)
    assert latex(table).count("&") == 5 * (len(table.header) - 1)  # four rows and the header
    assert r"10\%" in latex(table)
    assert r"count\_init 1" in latex(table)
