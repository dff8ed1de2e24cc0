"""Configurations: what is filled in, what is refused, and what makes two runs the same experiment."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from topovq.grid import Grid
from topovq.neighborhood import narrowing
from topovq.tokenizer.training import TrainConfig
from topovq.tokenizer.training.base import check_folder
from topovq.tokenizer.training.config import IDENTITY
from topovq.tokenizer.training.record import RECORD_FILE


def test_what_is_left_open_is_filled_in_from_the_paper() -> None:
    vqvae = TrainConfig().resolve("cpu")
    assert (vqvae.batch_size, vqvae.learning_rate, vqvae.precision, vqvae.compile) == (256, 1e-3, "fp32", False)
    vqvae2 = TrainConfig(model="vqvae2").resolve("cuda")
    assert (vqvae2.batch_size, vqvae2.learning_rate, vqvae2.precision, vqvae2.compile) == (128, 3e-4, "bf16", True)
    assert vqvae.out == Path("runs") / vqvae.run_id


def test_the_small_preset_fills_in_what_is_not_said_and_nothing_else() -> None:
    small = TrainConfig(data="my/pictures", preset="auto").resolve("cpu")
    assert (small.image_size, small.model_options, small.code_dim) == (64, {"hidden": 64}, 32)
    assert (small.steps, small.batch_size, small.validate_every, small.log_every) == (1_000, 32, 100, 10)
    assert small.run_id == TrainConfig(data="my/pictures", preset="small", precision="fp32").resolve("cuda").run_id
    given = {"image_size": 128, "codebook_size": 64, "code_dim": 16, "steps": 50, "batch_size": 5, "log_every": 7}
    said = TrainConfig(data="my/pictures", preset="auto", model_options={"hidden": 8, "stride": 8}, **given)
    resolved = said.resolve("cpu")
    assert {name: getattr(resolved, name) for name in given} == given
    assert resolved.model_options == {"hidden": 8, "stride": 8}
    assert TrainConfig(data="photos", preset="auto").resolve("cpu").image_size is None  # they are small already
    full, paper = TrainConfig(preset="auto").resolve("cuda"), TrainConfig().resolve("cuda")
    assert full.run_id == paper.run_id
    assert (paper.steps, paper.codebook_size, paper.code_dim, paper.image_size) == (30_000, 512, 64, None)
    with pytest.raises(ValueError, match=r"unknown preset 'smal' \(did you mean 'small'"):
        TrainConfig(preset="smal").resolve("cpu")  # type: ignore[arg-type]


@pytest.mark.parametrize(("steps", "every"), [(3, 1), (300, 30), (1_000, 100), (30_000, 3_000)])
def test_there_are_ten_validations_whatever_the_length(steps: int, every: int) -> None:
    assert TrainConfig(steps=steps).resolve("cpu").validate_every == every
    assert TrainConfig(steps=steps, validate_every=7).resolve("cpu").validate_every == 7


def test_a_run_that_is_resumed_keeps_what_is_left_open(tmp_path: Path) -> None:
    first = TrainConfig(data="my/pictures", out=tmp_path, preset="small", steps=70).resolve("cpu")
    (tmp_path / RECORD_FILE).write_text(json.dumps({"event": "config", **first.as_dict()}) + "\n")
    again = TrainConfig(data="my/pictures", out=tmp_path, preset="auto", resume=True, precision="fp32").resolve("cuda")
    assert again.run_id == first.run_id
    assert check_folder(again) is None
    longer = TrainConfig(data="my/pictures", out=tmp_path, resume=True, steps=90).resolve("cpu")
    assert (longer.steps, longer.batch_size, longer.validate_every) == (90, 32, 7)
    other = TrainConfig(data="my/pictures", out=tmp_path, resume=True, batch_size=64).resolve("cpu")
    with pytest.raises(ValueError, match="started with batch_size=32 but is resumed with batch_size=64"):
        check_folder(other)


RIDE = {"neighborhood": "ride", "decay": 0.95}


def falls_for(steps: int, size: int = 512) -> dict[str, Any]:
    """The options that spell out "narrowing"."""
    kind, schedule, radius = narrowing(Grid.balanced(size), steps)
    assert radius is None
    named = {"neighborhood": kind, "schedule": schedule.to_dict(), "update_empty": False}
    return {**named, **({"decay": 0.95} if steps <= 1_200 else {})}


LEARNABLE = {"learnable_codebook": True, "ema_update": False}


@pytest.mark.parametrize(
    ("change", "options"),
    [
        ({}, RIDE),
        ({"codebook_size": 509}, RIDE),
        ({"quantizer": "residual"}, RIDE),
        ({"quantizer_options": {"decay": 0.9}}, {**RIDE, "decay": 0.9}),
        ({"quantizer_options": {"update_empty": False}}, {**RIDE, "update_empty": False}),
        ({"quantizer_options": {"steps": 50}}, RIDE),
        ({"quantizer_options": {"steps": 6_000}}, {**RIDE, "decay": 0.99}),
        ({"quantizer_options": {"neighborhood": "ride", "steps": 6_000}}, {**RIDE, "decay": 0.99}),
        ({"quantizer_options": {"grid": [4, 128]}}, {"grid": [4, 128], **RIDE}),
        ({"quantizer": "soft"}, falls_for(700)),
        ({"quantizer_options": {"neighborhood": "narrowing"}}, falls_for(700)),
        ({"quantizer_options": {"neighborhood": "narrowing", "steps": 6_000}}, falls_for(6_000)),
        ({"quantizer_options": {"neighborhood": "narrowing"}, "codebook_size": 509}, falls_for(700, 509)),
        ({"quantizer_options": {"tau": 0.2}}, {"tau": 0.2, "neighborhood": "narrowing"}),
        ({"quantizer_options": {"neighborhood": "hard"}}, {"neighborhood": "hard"}),
        ({"quantizer": "ema"}, {}),
        ({"quantizer_options": LEARNABLE}, LEARNABLE),
        ({"quantizer": "som-vae"}, {"neighbor_reduction": "sum"}),
        ({"quantizer": "gradient"}, {}),
        ({"quantizer": "residual", "quantizer_options": {"quantizer": "gradient"}}, {"quantizer": "gradient"}),
    ],
)
def test_a_neighborhood_left_open_is_spelled_out(change: dict[str, Any], options: dict[str, Any]) -> None:
    config = TrainConfig(steps=700, **change)
    resolved = config.resolve("cpu")
    assert resolved.quantizer_options == options
    assert resolved.resolve("cpu").run_id == resolved.run_id
    assert config.quantizer_options == change.get("quantizer_options", {}), "what was given is not changed"
    assert json.loads(json.dumps(resolved.as_dict())) == resolved.as_dict()
    resolved.build_model(16, (0,) * 3, (1,) * 3)


@pytest.mark.parametrize("rule", [{}, {"update_empty": False}, {"update_empty": True}])
def test_a_run_that_is_resumed_keeps_the_rule_it_was_started_with(tmp_path: Path, rule: dict[str, Any]) -> None:
    """Records without `update_empty` are of a time when a neighborhood by name, the paper's rule, was all there was."""
    options = {"neighborhood": "gaussian", "schedule": falls_for(700)["schedule"], "decay": 0.95, **rule}
    (tmp_path / RECORD_FILE).write_text(json.dumps({"event": "config", "quantizer_options": options}) + "\n")
    resumed = TrainConfig(steps=900, out=tmp_path, resume=True).resolve("cpu")
    assert resumed.quantizer_options == options
    book = resumed.build_model(16, (0,) * 3, (1,) * 3).quantizers[0].codebook_of(0)
    assert book.update_empty is rule.get("update_empty", True)


@pytest.mark.parametrize(("told", "meant"), [({}, "mean"), ({"neighbor_reduction": "sum"}, "sum")])
def test_a_run_that_is_resumed_keeps_its_neighbor_term(tmp_path: Path, told: dict[str, str], meant: str) -> None:
    """Records that do not say how it is reduced are of a time when it was averaged over dimensions."""
    options = {"neighbor_weight": 0.1}
    config = TrainConfig(quantizer="som-vae", quantizer_options=options, out=tmp_path, resume=True)
    first = {"event": "config", **config.resolve("cpu").as_dict(), "quantizer_options": {**options, **told}}
    (tmp_path / RECORD_FILE).write_text(json.dumps(first) + "\n")
    resumed = config.resolve("cpu")
    assert resumed.quantizer_options == {**options, "neighbor_reduction": meant}
    assert check_folder(resumed) is None
    other = replace(config, quantizer_options={**options, "neighbor_reduction": {"mean": "sum", "sum": "mean"}[meant]})
    with pytest.raises(ValueError, match=r"was started with quantizer_options=.* but is resumed with"):
        check_folder(other.resolve("cpu"))


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"out": Path("elsewhere")}, True),
        ({"device": "cpu"}, True),
        ({"log_every": 7}, True),
        ({"tensorboard": True}, True),
        ({"resume": True}, True),
        ({"batch_size": 256}, True),
        ({"seed": 1}, False),
        ({"steps": 5}, False),
        ({"quantizer_options": {"tau": 0.2}}, False),
        ({"validate_every": 500}, False),
    ],
)
def test_the_id_changes_with_what_decides_the_result(change: dict[str, Any], same: bool) -> None:
    assert (TrainConfig(**change).resolve("cpu").run_id == TrainConfig().resolve("cpu").run_id) is same


def test_a_new_field_identifies_a_run_or_is_said_not_to() -> None:
    where_and_how = {"out", "workers", "device", "compile", "checkpoint_every", "keep_checkpoints", "log_every"}
    where_and_how |= {"preset"}  # what it decides is in the other fields
    watched = {"resume", "snapshots", "tensorboard", "trace_every", "wandb"}
    assert {field.name for field in fields(TrainConfig)} == {*IDENTITY, *where_and_how, *watched}
    assert (
        TrainConfig(quantizer="ema", validate_every=1_000).resolve("cpu").run_id == "ea3c598db68b"
    )  # of runs that are on disks


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "vqae"}, "did you mean 'vqvae'.*vqvae2"),
        ({"quantizer": "emma"}, "did you mean 'ema'"),
        ({"model_options": {"hiden": 3}}, "did you mean 'hidden'.*stride"),
        ({"model_options": {"code_dim": 3}}, "'code_dim' has an option of its own"),
        ({"quantizer_options": {"tua": 3}}, "did you mean 'tau'"),
        ({"steps": 0}, "steps=0 must be a whole number of at least 1"),
        ({"learning_rate": 0.0}, r"learning_rate=0\.0 must be above 0"),
        ({"precision": "fp8"}, "precision='fp8' is unknown; use auto, bf16 or fp32"),
    ],
)
def test_bad_values_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig(**change).resolve("cpu")
