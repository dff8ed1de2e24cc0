"""Checkpoints, models and records that are damaged: named and refused, and the run goes on from what is sound."""

from __future__ import annotations

import io
import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_training import Stopping, losses, weights
from tiny import TinySource, tiny_config

from topovq.storage import DamagedFile
from topovq.tokenizer.training import Diverged, evaluate, info, load_run, read_record, train
from topovq.tokenizer.training.checkpoint import checkpoints, load_checkpoint
from topovq.tokenizer.training.step import make_optimizer

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`short`, of 8 steps, which has checkpoints of steps 4 and 8, and `whole`, of 12 steps of the same."""
    out = tmp_path_factory.mktemp("made")
    options = {"quantizer_options": {"neighborhood": "hard"}}  # knows no end: a run made longer is the longer run
    train(tiny_config(out / "short", steps=8, **options), source=TinySource(), quiet=True)
    train(tiny_config(out / "whole", **options), source=TinySource(), quiet=True)
    return out


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made / "short", tmp_path / "run")


def go_on(run: Path, **changes: Any) -> None:
    options = {"quantizer_options": {"neighborhood": "hard"}, **changes}
    train(tiny_config(run, resume=True, **options), source=TinySource(), quiet=True)


def same(ours: Path, theirs: Path) -> bool:
    a, b = weights(ours), weights(theirs)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


# The run goes on


@pytest.mark.parametrize("name", ["model.safetensors", "state.pt", "config.json", "manifest.json"])
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_used(
    run: Path, made: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    flip(checkpoints(run)[-1] / name)
    (run / "checkpoints" / "step-notes").mkdir()  # not a checkpoint, whatever it is
    (run / "checkpoints" / "step-00000099").write_text("")
    go_on(run)
    assert "a damaged checkpoint is set aside as" in caplog.text
    assert f"step-00000008/{name}" in caplog.text
    assert (run / "checkpoints" / "damaged-step-00000008").is_dir()
    assert [line["step"] for line in read_record(run / "record.jsonl") if line["event"] == "resumed"] == [4]
    assert same(run, made / "whole")
    assert losses(run) == losses(made / "whole")


def test_a_run_without_a_sound_checkpoint_says_so(run: Path) -> None:
    for checkpoint in checkpoints(run):
        flip(checkpoint / "state.pt")
    with pytest.raises(DamagedFile, match=r"none of the 2 checkpoints .* is sound.*step-00000008/state\.pt is damaged"):
        go_on(run)


def test_a_checkpoint_from_before_manifests_goes_on_with_a_note(
    run: Path, made: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for path in run.rglob("manifest.json"):
        path.unlink()
    go_on(run)
    assert "step-00000008 has no manifest.json" in caplog.text
    assert same(run, made / "whole")


def test_a_lost_record_does_not_let_another_rule_go_on(run: Path, made: Path) -> None:
    (run / "record.jsonl").unlink()
    with pytest.raises(ValueError, match="started with seed=3 but is resumed with seed=4"):
        go_on(run, seed=4)
    with pytest.raises(ValueError, match=r"started with quantizer='kohonen'.*resumed with quantizer='ema'"):
        go_on(run, quantizer="ema", quantizer_options={})
    for path in run.rglob("manifest.json"):
        path.unlink()  # of a version that wrote none: the model's own configuration is left
    with pytest.raises(ValueError, match=r"started with quantizer_options=.*'hard'.*resumed with .*'gaussian'"):
        go_on(run, quantizer_options={"neighborhood": "gaussian"})
    go_on(run)
    assert same(run, made / "whole")


# Which model is the run's


def test_an_old_final_model_beside_newer_checkpoints_is_not_the_runs(run: Path) -> None:
    options = {"quantizer_options": {"neighborhood": "hard"}, "steps": 12, "resume": True, "checkpoint_every": 1}
    with pytest.raises(BaseException, match="stopped at step 9"):
        train(tiny_config(run, **options), source=Stopping(at=8), quiet=True)
    assert int(load_run(run).quantizers[0].step) == 9
    assert info(run)["step"] == 9
    flip(checkpoints(run)[-1] / "model.safetensors")
    assert int(load_run(run).quantizers[0].step) == 8


def test_a_damaged_final_model_is_refused(run: Path) -> None:
    flip(run / "model.safetensors")
    for look in (load_run, info):
        with pytest.raises(DamagedFile, match=r"run/model\.safetensors is damaged or was changed"):
            look(run)


# What a checkpoint may hold


def without_manifest(run: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """The newest checkpoint, as a version before manifests wrote it, with another state."""
    folder = checkpoints(run)[-1]
    (folder / "manifest.json").unlink()
    state = torch.load(folder / "state.pt", weights_only=True)
    change(state)
    torch.save(state, folder / "state.pt")
    return folder


def load(folder: Path) -> Any:
    model = tiny_config(folder, quantizer_options={"neighborhood": "hard"}).build_model(16, (127.5,) * 3, (127.5,) * 3)
    return load_checkpoint(folder, model, make_optimizer(model, 1e-3, 0.0, CPU), CPU)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda s: s["optimizer"][0].update(exp_avg=torch.zeros(1)),
            r"exp_avg of .* 0 is torch.float32 \[1\]; expected",
        ),
        (lambda s: s["optimizer"][3].update(exp_avg_sq=torch.zeros(0)), r"exp_avg_sq of .* 3 is torch.float32 \[0\]"),
        (lambda s: s["optimizer"][0].update(step=torch.zeros(2)), r"step of .* 0 is torch.float32 \[2\]"),
        (lambda s: s["optimizer"][0].update(exp_avg=s["optimizer"][0]["exp_avg"].double()), "is torch.float64"),
        (lambda s: s["optimizer"][0].update(exp_avg=1.0), "exp_avg of .* 0 is 1.0"),
        (lambda s: s["optimizer"][0]["exp_avg"].fill_(torch.nan), "has values that cannot be"),
        (lambda s: s["optimizer"][0]["exp_avg_sq"].fill_(-1), "has values that cannot be"),
        (lambda s: s["optimizer"][0].pop("exp_avg"), "state of parameter 0 is not one of this model"),
        (lambda s: s["optimizer"].update({999: {}}), "state of parameter 999 is not"),
        (lambda s: s.update(optimizer=[]), r"its 'optimizer' is \[\]"),
        (lambda s: s.update(step=9), "not the state of step 8: its 'step' is 9"),
        (lambda s: s.update(rng=[torch.zeros(5, dtype=torch.uint8)]), "its 'rng' is"),
        (lambda s: s.update(seconds=float("nan")), "its 'seconds' is nan"),
        (lambda s: s.pop("best"), "its 'best' is missing"),
        (lambda s: s.update(validation={"loss": "x"}), "its 'validation' is"),
    ],
)
def test_every_value_of_a_state_is_checked(run: Path, change: Callable[[dict[str, Any]], Any], said: str) -> None:
    load(checkpoints(run)[-1])
    folder = without_manifest(run, change)
    with pytest.raises(DamagedFile, match=rf"state\.pt.*{said}"):
        load(folder)


class Code:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("code was run",)


def as_archive(*members: tuple[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return buffer.getvalue()


@pytest.mark.parametrize("data", [b"", b"x" * 1000, as_archive(("state/data.pkl", bytes(10**7)))], ids=len)
def test_a_state_that_is_none_is_refused_in_a_sentence(run: Path, data: bytes) -> None:
    folder = without_manifest(run, lambda state: None)
    (folder / "state.pt").write_bytes(data)
    with pytest.raises(DamagedFile, match=r"state\.pt is (damaged or no checkpoint's state|compressed)") as refused:
        load(folder)
    assert "weights_only" not in str(refused.value)


def test_code_in_a_state_is_not_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = without_manifest(run, lambda state: state.update(best=Code()))
    with pytest.raises(DamagedFile, match=r"no checkpoint's state: UnpicklingError$"):
        load(folder)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (torch.zeros(3), r"decoder\.0\.weight has shape \[3\]"),
        (torch.zeros(16, 8, 3, 3, dtype=torch.float64), r"decoder\.0\.weight is of type F64"),
        (torch.full((16, 8, 3, 3), torch.inf), r"values of decoder\.0\.weight are NaN or infinite"),
        (None, r"does not fit the run.*decoder\.0\.weight"),
    ],
)
def test_every_weight_of_a_checkpoint_is_checked(run: Path, tensor: Any, said: str) -> None:
    folder = without_manifest(run, lambda state: None)
    tensors = {**load_file(folder / "model.safetensors"), "decoder.0.weight": tensor}
    save_file({name: t for name, t in tensors.items() if t is not None}, folder / "model.safetensors")
    with pytest.raises(DamagedFile, match=rf"model\.safetensors.*{said}"):
        load(folder)


# Records


@pytest.mark.parametrize(
    "line",
    ["[]", "3", '{"event": "other"}', '{"event": "final"}', '{"event": "validation", "step": "3", "loss": 1}', "\xff"],
)
def test_a_record_with_a_line_that_is_none_is_refused_by_number(run: Path, line: str) -> None:
    with open(run / "record.jsonl", "ab") as file:
        file.write(line.encode("latin-1") + b"\n")
    for look in (info, load_run, go_on):
        with pytest.raises(ValueError, match=r"record\.jsonl, line 5 is "):
            look(run)


def test_a_validation_that_was_not_finite_is_told_as_null(run: Path) -> None:
    lines = read_record(run / "record.jsonl")
    lines[2]["loss"] = None
    (run / "record.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert info(run)["validation"]["loss"] is None
    assert info(run)["best_loss"] == lines[1]["loss"]


def test_a_run_whose_weights_are_lost_stops(tmp_path: Path) -> None:
    options = {"learning_rate": 1e38, "clip": 1e38, "steps": 100}
    with pytest.raises(
        Diverged, match=r"at step 2: weights are NaN or infinite.*--learning-rate; there is no checkpoint"
    ):
        train(tiny_config(tmp_path / "seen", **options), source=TinySource(), quiet=True)
    with pytest.raises(Diverged, match="at step 1: "):  # none is written that could not be loaded
        train(tiny_config(tmp_path / "saved", checkpoint_every=1, **options), source=TinySource(), quiet=True)
    assert not checkpoints(tmp_path / "saved")


def test_a_record_that_names_no_data_says_so(run: Path) -> None:
    lines = read_record(run / "record.jsonl")
    del lines[0]["data"]
    (run / "record.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match="the record names no data set: data=None"):
        evaluate(run)
