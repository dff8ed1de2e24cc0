"""Verdicts on the paper's claims follow from records, and from nothing else."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from made_records import lines_of, write_record

from experiments.paper.claim_list import (
    CLAIMS,
    faces_better,
    fails_from_0,
    in_use,
    ksom_everywhere,
    saved,
    smaller_tau,
    softmax_fails,
)
from experiments.paper.claims import Claim, Evidence, answers, greater, joined, speedup
from experiments.paper.groups import EMA, HARD, SHORT, SOFT, ZERO, smooth_cells
from experiments.records import Records, resolved
from experiments.specs import cells

DOCS = Path(__file__).parents[2] / "docs"


def test_what_is_saved_and_its_interval() -> None:
    assert speedup([4, 4, 4], [3, 3, 3]) == (25.0, 25.0, 25.0)  # seeds that agree leave no doubt
    mean, low, high = speedup([4.0, 6.0], [4.0, 5.0])
    assert mean == pytest.approx(10)
    # Of two seeds each, a mean is the lower, the middle or the higher one: 1 - 5/4 at the worst, 1 - 4/6 at the best.
    assert (low, high) == pytest.approx((-25.0, 100 / 3))


def test_of_two_means_one_is_greater_beyond_two_standard_errors() -> None:
    # Means 6 and 4, standard deviations 1, three seeds: the error is sqrt(1/3 + 1/3), and 2 / 0.816 = 2.4.
    assert greater([5, 6, 7], [3, 4, 5]) == "same"
    assert greater([3, 4, 5], [5, 6, 7]) == "differs"
    assert greater([5, 6, 7], [4, 5, 6]) == "cannot tell"  # 1 / 0.816 = 1.2
    assert greater([3, 3], [2, 2]) == "same"  # no seed differs from another
    assert greater([3, 3], [3, 3]) == greater([9], [1, 1]) == "cannot tell"
    assert joined(["same", "cannot tell"]) == "cannot tell"
    assert joined(["same", "cannot tell", "differs"]) == "differs"


def write_main(folder: Path, reached: dict[str, list[int]]) -> Evidence:
    """`main` of the paper's blocks, in which a seed is within 10% of its best at this validation."""
    for cell in cells("main"):
        for seed, at in enumerate(reached[cell.neighborhood]):
            losses = [52.0 if step >= at else 60.0 for step in range(1, 31)]
            write_record(folder / f"{cell.neighborhood}-{seed}.jsonl", lines_of(cell.config(seed), losses))
    return Evidence(folder, Records([folder]))


@pytest.mark.parametrize(
    ("hard", "verdict", "words"),
    [
        ([10, 10, 10], "same", "0% (0 to 0)"),
        ([8, 8, 8], "differs", "20% (20 to 20)"),
        ([8, 10, 10], "cannot tell", "7% (0 to 20)"),
    ],
)
def test_less_than_5_percent_is_judged_by_the_interval(
    tmp_path: Path, hard: list[int], verdict: str, words: str
) -> None:
    reached = {"none": [10] * 3, "hard": hard, "gaussian": [10] * 3, "exponential": [10] * 3}
    assert saved(10)(write_main(tmp_path, reached)) == (words, 3, verdict)


def test_runs_that_fail_are_counted(tmp_path: Path) -> None:
    for cell, best in ((EMA, [52.0] * 20), (ZERO, [52.0] * 19 + [900.0])):
        for seed, loss in enumerate(best):
            write_record(tmp_path / f"{cell.count_init}-{seed}.jsonl", lines_of(cell.config(seed), [loss] * 3))
    evidence = Evidence(tmp_path, Records([tmp_path]))
    assert fails_from_0(evidence) == ("1 of 20 runs fail", 20, "same")
    (tmp_path / "0-19.jsonl").unlink()
    write_record(tmp_path / "0-19.jsonl", lines_of(ZERO.config(19), [52.0] * 3))
    # Where one in twenty fails, twenty runs without a failure are nothing rare: 0.95^20 = 0.36.
    assert fails_from_0(Evidence(tmp_path, Records([tmp_path]))) == ("0 of 20 runs fail", 20, "cannot tell")
    write_record(tmp_path / "0-19.jsonl", lines_of(ZERO.config(19), [900.0] * 3))
    (tmp_path / "0-0.jsonl").unlink()  # this one ended in NaN
    run = resolved(ZERO.config(0)).run_id
    (tmp_path / f"{run}.failed.json").write_text(json.dumps({"run": run, "failed": "NaN"}))
    evidence = Evidence(tmp_path, Records([tmp_path]))
    assert fails_from_0(evidence) == ("2 of 20 runs fail", 20, "same")


def test_tables_of_other_blocks_are_not_compared(tmp_path: Path) -> None:
    """`main` has the paper's blocks already, `robustness` only plain ones."""
    for blocks, best in (("paper", 53.0), ("plain", 51.0)):
        for cell in cells("main", blocks=blocks):
            for seed in range(5):
                write_record(tmp_path / f"{cell.name}-{blocks}-{seed}.jsonl", lines_of(cell.config(seed), [best]))
    for cell in cells("robustness", blocks="plain"):
        for seed in range(5):
            write_record(tmp_path / f"robust-{cell.name}-{seed}.jsonl", lines_of(cell.config(seed), [51.1]))
    evidence = Evidence(tmp_path, Records([tmp_path]))
    assert {row.cell.blocks for row in evidence.rows("main")} == {"paper"}
    assert ksom_everywhere("hard")(evidence) == ("51.0 to 51.1", 5, "same")


def test_runs_of_the_papers_length_are_not_compared_with_short_ones(tmp_path: Path) -> None:
    ema, ksom = (replace(cell, dataset="faces", blocks="plain") for cell in (EMA, HARD))
    for cell, best in ((ema, 5.0), (ksom, 4.0)):
        for seed in range(2):
            write_record(tmp_path / f"{cell.method}-{seed}.jsonl", lines_of(cell.config(seed, **SHORT), [best + seed]))
    whole = lines_of(replace(EMA, dataset="faces").config(0), [1.8])
    write_record(tmp_path / "whole.jsonl", whole)
    words = "4.50 and 5.50, fewer images, short runs"  # a difference of 1 is sqrt(2) standard errors here
    assert faces_better(Evidence(tmp_path, Records([tmp_path]))) == (words, 2, "cannot tell")
    write_record(tmp_path / "other.jsonl", lines_of(replace(HARD, dataset="faces").config(0), [1.7]))
    assert faces_better(Evidence(tmp_path, Records([tmp_path])))[0] == "1.70 and 1.80, fewer images"


def test_use_is_of_training_batches_where_records_have_them(tmp_path: Path) -> None:
    for cell in cells("main"):
        more = 100 if cell.method == "ksom" else 0
        for seed in range(3):
            lines = lines_of(cell.config(seed), [52.0] * 30)  # whose validations have 100, 200, ... 3,000
            values = [10.0 + more] * 50 + [20.0] * 1_400 + [30.0 + more + seed] * 50
            trace = {"event": "trace", "step": 30_000, "first": 20, "every": 20, "perplexities": [values]}
            write_record(tmp_path / f"{cell.neighborhood}-{seed}.jsonl", [*lines[:-1], trace, lines[-1]])
    words = "110 against 10 at first, 131 against 31 at the end"
    assert in_use(Evidence(tmp_path, Records([tmp_path]))) == (words, 3, "same")


def test_maps_and_softmax_are_judged_by_what_was_measured(tmp_path: Path) -> None:
    evidence = Evidence(tmp_path, Records([tmp_path]))
    assert smaller_tau(evidence)[0] == softmax_fails(evidence)[0] == "not run yet"
    errors = {"1": 0.9, "0.1": 0.7, "0.01": 0.5}
    for cell in (*smooth_cells(["hard"]), EMA, SOFT[0]):
        for seed in range(2):
            lines = lines_of(cell.config(seed), [70.0 if cell in SOFT else 52.0])
            run = lines[0]["id"]
            write_record(tmp_path / f"{run}.jsonl", lines)
            error = errors.get(cell.tau, 1) + seed / 1_000
            order = {"topographic_error": error, "topographic_product": 0.1, "neighbor_ratio": 0.5}
            found = {"run": run, "topography": [order], "shifts": [], "softmax": 0.05}
            (tmp_path / f"{run}.measured.json").write_text(json.dumps(found))
    evidence = Evidence(tmp_path, Records([tmp_path]))
    assert smaller_tau(evidence) == ("90%, 70%, 50%", 2, "same")
    assert softmax_fails(evidence) == ("70.0, KSOM 52.0", 2, "same")


def test_one_seed_is_never_enough() -> None:
    claim = Claim("map", "It works", "Sec. 1", "-", lambda evidence: ("yes", 1, "same"), "#here")
    (line,) = answers([claim], None)  # type: ignore[arg-type]
    assert (line["ours"], line["verdict"]) == ("yes", "cannot tell")
    (line,) = answers([replace(claim, answer=lambda evidence: ("yes", 2, "same"))], None)  # type: ignore[arg-type]
    assert line["verdict"] == "same"


def test_every_claim_links_to_a_heading() -> None:
    for claim in CLAIMS:
        file, _, anchor = claim.link.partition("#")
        text = (DOCS / "explanation" / (file or "claims.md")).read_text()
        headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
        named = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert anchor in named, claim.link
