"""Figures of single batches, from the `trace` lines of records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from made_records import lines_of, write_record

from experiments.figures.curves import Look, course
from experiments.figures.draw import draw, draw_course
from experiments.figures.parts import Search, panels
from experiments.records import Records
from experiments.specs import Options

OPTIONS: dict[str, Any] = {"steps": 3_000, "records": ()}


def write_runs(folder: Path, name: str, seeds: int) -> None:
    for part in panels(name, "cifar10")[""]:
        for seed in range(seeds):
            first, *seen, last = lines_of(part.config(seed, 3_000), [60.0, 55.0, 52.0])
            told = [
                {
                    "event": "trace", "step": line["step"], "first": line["step"] - 980, "every": 20,
                    "losses": [1 / (line["step"] - 980 + 20 * i) for i in range(50)],
                    "perplexities": [[100.0 + seed] * 50],
                }
                for line in seen
            ]  # fmt: skip
            lines = [first, *(line for pair in zip(told, seen) for line in pair), last]
            write_record(folder / f"{first['id']}.jsonl", lines)


def test_the_early_figure_has_every_20th_step_up_to_1500(tmp_path: Path) -> None:
    write_runs(tmp_path, "early", seeds=2)
    search = Search("early", Options(runs=tmp_path, **OPTIONS), [tmp_path], Records([tmp_path]))
    look = Look("N", "red")
    runs = [run for run in search.records if run.config["quantizer_options"]["count_init"] == 0]
    early = course(look, runs, None, 1_500)
    assert early.steps_T.tolist() == list(range(20, 1_501, 20))
    assert early.values_ST[0, :2].tolist() == [1 / 20, 1 / 40]
    whole = course(look, runs, 0)
    assert (whole.steps_T[-1], set(whole.values_ST[:, 0])) == (3_000, {100.0, 101.0})
    paths = draw("early", Options(runs=tmp_path, out=tmp_path / "out", **OPTIONS))
    text = paths[1].read_text()
    assert "N = 0 (2 seeds)" in text
    assert "training reconstruction loss" in text


def test_the_codes_in_use_are_those_of_batches(tmp_path: Path) -> None:
    write_runs(tmp_path, "utilization", seeds=1)
    paths = draw("utilization", Options(runs=tmp_path, out=tmp_path / "out", **OPTIONS))
    assert "KSOM, exponential (1 seed)" in paths[1].read_text()


def test_records_without_a_course_are_refused_with_what_makes_one(tmp_path: Path) -> None:
    part = panels("early", "cifar10")[""][0]
    write_record(tmp_path / "a.jsonl", lines_of(part.config(0, 3_000), [52.0]))
    search = Search("early", Options(runs=tmp_path, **OPTIONS), [tmp_path], Records([tmp_path]))
    with pytest.raises(FileNotFoundError, match=r"none of N = 1, N = 0; `python -m experiments.paper.run"):
        draw_course(search, panels("early", "cifar10")[""])
