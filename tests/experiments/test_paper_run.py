"""The runs behind the claims: which they are, in which order, and a small sweep from start to records."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from made_records import lines_of, write_record
from PIL import Image
from safetensors.torch import load_file

from experiments.paper import run as paper_run
from experiments.paper.groups import ZERO, groups, large_groups, traced
from experiments.paper.measured import read_failed, read_measured
from experiments.paper.run import collect, main, plan, unpack_cifar10
from experiments.records import Records, resolved
from experiments.specs import cells
from topovq.tokenizer.training import TrainConfig, read_record
from topovq.tokenizer.training.watch import Diverged


def test_the_groups_hold_every_run_once_in_order_of_value(tmp_path: Path) -> None:
    left = plan(groups(), Records([tmp_path]))
    numbers = {group.name: len(todo) for group, todo in left}
    first = ["main", "robustness", "sensitivity", "gradient", "ablation", "float32", "early"]
    assert list(numbers)[: len(first)] == first
    assert numbers["main"] == 4 * 10
    assert numbers["robustness"] == 6 * 10
    assert numbers["sensitivity"] == 0  # its runs are those of the two before
    assert numbers["early"] == 10  # seeds 10 to 19; the first ten are the sensitivity's
    assert (numbers["gradient"], numbers["ablation"], numbers["float32"]) == (2 * 5, 9 * 5, 3 * 3)
    assert (numbers["smoothness"], numbers["robustness-others"]) == (2 * 5, 6 * 10)
    ids = [resolved(config).run_id for _, todo in left for config in todo]
    assert len(ids) == len(set(ids))
    configs = [config for _, todo in left for config in todo]
    assert {config.model_options["residual"] for config in configs} == {"activated"}
    assert [config.seed for config in left[0][1][:5]] == [0, 0, 0, 0, 1]  # all cells of a seed, then the next
    assert {config.trace_every for config in left[0][1]} == {20}
    assert traced(ZERO)
    assert not traced(cells("ablation")[1])
    assert {config.precision for config in dict((g.name, t) for g, t in left)["float32"]} == {"fp32"}


def test_the_large_runs_are_in_the_order_of_the_plan() -> None:
    made = large_groups()
    assert [group.name for group in made[:4]] == [
        "main-faces",
        "main-imagenet",
        "worst-faces",
        "worst-imagenet",
    ]
    first = made[0].configs
    assert [(config.quantizer, config.seed) for config in first] == [
        ("ema", 0),
        ("kohonen", 0),
        ("ema", 1),
        ("kohonen", 1),
    ]
    assert {(c.steps, c.batch_size, c.learning_rate, c.model_options["residual"]) for c in first} == {
        (30_000, 128, 3e-4, "activated")
    }


def test_a_tiny_sweep_leaves_records_and_measures_and_is_not_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    where = ["--runs", str(tmp_path / "runs"), "--out", str(out), "--records", str(tmp_path / "none")]
    arguments = ["--tiny", "--device", "cpu", "--only", "gas", "--commit", "abc", *where]
    assert main(arguments) == 0
    assert "gas: 2 of 2 runs are done" in capsys.readouterr().out
    runs = list(Records([out]))
    assert [run.finished for run in runs] == [True, True]
    for run in runs:
        assert run.config["quantizer_options"]["neighborhood"] == "gas"
        assert (run.config["out"], run.config["commit"]) == (f"runs/{run.config['id']}", "abc")
        assert str(tmp_path) not in json.dumps(run.lines)
        assert [len(line["losses"]) for line in run.lines if line["event"] == "trace"] == [1, 1]
    measured = read_measured([out])
    assert set(measured) == {run.config["id"] for run in runs}
    assert {"topographic_error", "topographic_product"} <= set(next(iter(measured.values()))["topography"][0])
    assert main(arguments) == 0
    assert "runs are done" not in capsys.readouterr().out


def test_the_time_may_be_over_before_anything_is_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out"), "--records", str(tmp_path / "none")]
    for more in ([], ["--cut"]):
        assert main(["--tiny", "--device", "cpu", "--only", "soft", "--limit", "0.05", *more, *where]) == 0
        said = capsys.readouterr().out
        assert "the time is over: the same command goes on" in said
        assert ("0 of 4 runs are done" in said) == bool(more)  # that were started and cut off
    with pytest.raises(SystemExit):
        main(["--only", "mian", "--plan"])
    assert "there is no group mian; there are main, robustness" in capsys.readouterr().err


def test_no_run_is_started_that_cannot_end_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, waves = [0.0], list[int]()

    def train(configs: list[TrainConfig], **_: object) -> None:
        waves.append(len(configs))
        clock[0] += 20.0 * len(configs) + (40 if len(waves) == 1 else 0)

    monkeypatch.setattr(paper_run, "train_all", train)
    monkeypatch.setattr(paper_run.time, "monotonic", lambda: clock[0])
    where = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out"), "--records", str(tmp_path / "none")]
    assert main(["--device", "cpu", "--only", "main", "--limit", "440", *where]) == 0
    # 16 s a run are expected and 60 s to compile: 160 s for the first six. A run takes 20 s, as the second wave shows:
    # then 160 s are left, of which 15 are spare, and after the third 40, which are enough for one.
    assert waves == [6, 6, 6, 1]
    clock[0], waves[:] = 0.0, []
    assert main(["--device", "cpu", "--only", "gas", "early", "--limit", "150", *where]) == 0
    assert waves == [4]  # `early` comes first; for one of gas, of 90 s, the time is too short


def test_what_comes_back_replaces_older_records_of_the_same_run(tmp_path: Path) -> None:
    cell = cells("main")[0]
    old, new = tmp_path / "records" / "explain", tmp_path / "came"
    write_record(old / "a.jsonl", lines_of(cell.config(0), [53.0]))
    write_record(old / "b.jsonl", lines_of(cell.config(1), [53.0]))
    write_record(new / "a.jsonl", lines_of(cell.config(0, data_path=Path("elsewhere")), [52.0]))
    collect(new, tmp_path / "records" / "paper")
    records = Records([tmp_path / "records"])
    found = [records.finished(cell.config(seed)) for seed in (0, 1)]
    assert [run and run.best for run in found] == [0.052, 0.053]
    assert read_record(tmp_path / "records" / "replaced" / "a.jsonl")[1]["loss"] == 0.053
    assert len(list(Records([tmp_path / "records" / "replaced"]))) == 1  # still there for those who ask
    assert "done again" in (tmp_path / "records" / "replaced" / "README.md").read_text()


def test_sheets_are_read_in_rows_and_wrong_ones_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paper_run, "SIDE", 4)
    monkeypatch.setattr(paper_run, "TILES", 2)
    monkeypatch.setenv("TOPOVQ_CACHE", str(tmp_path / "cache"))
    images = np.random.default_rng(0).integers(0, 256, (20, 4, 4, 3), dtype=np.uint8)
    for number, four in enumerate(np.split(images, 5)):
        rows = [np.concatenate(pair, 1) for pair in np.split(four, 2)]
        Image.fromarray(np.concatenate(rows, 0)).save(tmp_path / f"batch_{number}.webp", lossless=True)
    with pytest.raises(ValueError, match="does not hold CIFAR-10 in its order"):
        unpack_cifar10(tmp_path)
    monkeypatch.setattr(paper_run, "FIRST", tuple(tuple(map(int, image[0, 0])) for image in images[:2]))
    statistics = (images.mean((0, 1, 2)), images.std((0, 1, 2)))
    monkeypatch.setattr(paper_run, "NORMALIZATION", statistics)
    unpack_cifar10(tmp_path)
    kept = load_file(tmp_path / "cache" / "cifar10.safetensors")["train_images"]
    assert torch.equal(kept, torch.from_numpy(images).permute(0, 3, 1, 2))
    monkeypatch.setenv("TOPOVQ_CACHE", str(tmp_path / "other"))
    with pytest.raises(FileNotFoundError, match="must hold five sheets"):
        unpack_cifar10(tmp_path / "cache")


def test_a_run_that_fails_is_noted_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    def train(configs: list[TrainConfig], **_: object) -> None:
        tried.append(len(configs))
        if len(configs) == 2:
            error = Diverged(20, [])
            error.add_note(str(configs[0].out))
            raise error

    monkeypatch.setattr(paper_run, "train_all", train)
    where = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path), "--records", str(tmp_path / "none")]
    assert main(["--tiny", "--device", "cpu", "--only", "gas", *where]) == 0
    assert tried == [2, 1]
    (failed,) = read_failed([tmp_path]).values()
    assert (failed["seed"], "weights are NaN" in failed["failed"]) == (0, True)
    main(["--tiny", "--only", "gas", "--plan", *where])
    assert "     2     1 " in capsys.readouterr().out.splitlines()[-2]


def test_a_fault_in_one_group_leaves_the_time_to_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(configs: list[TrainConfig], **_: object) -> None:
        if configs[0].quantizer == "soft":
            raise RuntimeError("no such kernel")

    monkeypatch.setattr(paper_run, "train_all", train)
    where = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path), "--records", str(tmp_path / "none")]
    assert main(["--tiny", "--device", "cpu", "--only", "soft", "gas", *where]) == 1
    said, told = capsys.readouterr()
    assert "soft broke off" in said
    assert "gas: 0 of 2 runs are done" in said
    assert "no such kernel" in told
