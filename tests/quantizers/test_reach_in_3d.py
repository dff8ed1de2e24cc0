"""A layer on a 3-D map keeps the reach it was made with, when that was not named and the usual one was another."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from topovq import KohonenVQ
from topovq.quantizers.kohonen import radius_before
from topovq.tokenizer.training import TrainConfig
from topovq.tokenizer.training.config import told_options


def test_what_was_saved_without_a_radius_reaches_the_corners(tmp_path: Path) -> None:
    vq = KohonenVQ(2, 27, neighborhood="hard", grid=(3, 3, 3))
    assert vq.neighborhood.radius == pytest.approx(math.sqrt(2))
    vq.save_pretrained(tmp_path)
    assert KohonenVQ.from_pretrained(tmp_path).neighborhood.radius == vq.neighborhood.radius
    told = json.loads((tmp_path / "config.json").read_text())
    before = {name: value for name, value in told.items() if name != "radius"}
    assert radius_before(before)["radius"] == math.sqrt(3)
    assert radius_before(told) == told
    flat = {"neighborhood": "hard", "grid": [3, 9]}
    assert radius_before(flat) == flat
    assert radius_before(flat | {"grid": {"shape": [3, 3, 3]}})["radius"] == math.sqrt(3)


def test_a_run_names_its_reach_and_one_from_before_keeps_its_own() -> None:
    options = {"neighborhood": "hard", "grid": [8, 8, 8]}
    made = TrainConfig(quantizer_options=options).resolve("cpu")
    assert made.quantizer_options["radius"] == math.sqrt(2)
    assert told_options(made.as_dict()) == made.quantizer_options
    assert told_options({"quantizer": "kohonen", "quantizer_options": options})["radius"] == math.sqrt(3)
    assert "radius" not in TrainConfig(quantizer_options=options | {"grid": [16, 32]}).resolve("cpu").quantizer_options


def test_the_rule_on_a_cube_is_that_of_places_less_than_1_5_apart() -> None:
    torch.manual_seed(0)
    vq, x = KohonenVQ(2, 27, neighborhood="hard", grid=(3, 3, 3), decay=0.5, update_empty=False), torch.zeros(1, 2)
    codes = vq.codebook.clone()
    winner = int(vq(x).indices)
    near = vq.grid.distance_matrix()[winner] < 1.5
    assert torch.equal((vq.codebook != codes).any(1), near)
