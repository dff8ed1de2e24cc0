"""Snapshots: which steps are kept, what is in them, and that training is the same with and without them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from small_runs import make_run

from topovq.grid import Grid
from topovq.tokenizer.atlas import charts, tiles
from topovq.tokenizer.training import TrainConfig, load_run
from topovq.tokenizer.training.snapshots import LARGEST_IMAGE, STRIP, Snapshots, read_snapshot, snapshots


def steps(run: Path) -> list[int]:
    return [int(path.stem[5:]) for path in snapshots(run)]


def test_they_are_close_together_at_first() -> None:
    assert Snapshots(Path("run"), 4, 160).due == {0, 10, 40, 90, 160}
    assert Snapshots(Path("run"), 0, 160).due == set()
    with pytest.raises(ValueError, match="snapshots=-1 must be a whole number"):
        TrainConfig(snapshots=-1).resolve("cpu")


def test_a_snapshot_is_the_model_at_its_step_and_training_is_the_same(tmp_path: Path) -> None:
    levels = {"model": "vqvae2", "image_size": 64, "steps": 10, "quantizer_options": {"topology": "hexagonal"}}
    plain = make_run(tmp_path / "plain", **levels)
    run = make_run(tmp_path / "kept", **levels, snapshots=3)
    assert steps(plain) == []
    assert steps(run) == [0, 1, 4, 10]
    model = load_run(run)
    for name, tensor in load_run(plain).state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name

    last, maps = read_snapshot(snapshots(run)[-1]), charts(model)
    for number, (told, chart) in enumerate(zip(json.loads(str(last["maps"])), maps, strict=True)):
        assert told["name"] == chart.name
        assert Grid.from_dict(told["grid"]) == chart.grid
        assert np.array_equal(last[f"tiles_{number}"], tiles(model, maps, number).numpy())
        assert np.array_equal(last[f"codes_{number}"], chart.codes_KD.half().numpy())
    assert last["strip"].shape == (3, 2 * 64, STRIP * 64)
    images = torch.from_numpy(last["strip"][:, :64]).unflatten(-1, (STRIP, 64)).permute(2, 0, 1, 3)
    decoded = torch.from_numpy(last["strip"][:, 64:]).unflatten(-1, (STRIP, 64)).permute(2, 0, 1, 3)
    assert torch.equal(model.decode(model.encode(images)), decoded)
    first = read_snapshot(snapshots(run)[0])
    assert not np.array_equal(first["tiles_0"], last["tiles_0"])


def test_large_tiles_and_images_are_kept_small(tmp_path: Path) -> None:
    run = make_run(
        tmp_path, image_size=128, model_options={"hidden": 8, "residual_hidden": 4, "stride": 32}, snapshots=1
    )
    last = read_snapshot(snapshots(run)[-1])
    assert last["tiles_0"].shape == (12, 3, 16, 16)
    assert last["strip"].shape == (3, 2 * LARGEST_IMAGE, STRIP * LARGEST_IMAGE)


def test_a_run_that_goes_on_from_a_checkpoint_forgets_what_came_after(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=4, snapshots=2)
    assert steps(run) == [0, 1, 4]
    (run / "snapshots" / "step-00000007.npz").write_bytes(b"of a training that was cut off")
    make_run(tmp_path, steps=16, snapshots=2, resume=True)
    assert steps(run) == [0, 1, 4, 16]
