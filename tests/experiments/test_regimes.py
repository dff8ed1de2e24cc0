"""Other regimes: fine-tuning goes on with what was learned, speech becomes frames, every regime is what it says."""

from __future__ import annotations

import csv
import wave
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments.clients import regimes
from experiments.clients.images import load_images
from experiments.clients.methods import QUICK_CELL
from experiments.clients.regimes import BANDS, CODES, mel_filters, mel_frames, quantize_speech, train
from experiments.clients.run import Run


def test_fine_tuning_goes_on_with_the_same_codes_on_new_images() -> None:
    images = [load_images(None, "photos", split) for split in ("train", "val")]
    cell = replace(QUICK_CELL, steps=4, method="ema")
    run = Run(cell, *images)
    run.advance(4)
    before = {name: tensor.clone() for name, tensor in run.quantizer.state_dict().items()}
    run.see(255 - images[0], images[1])
    assert run.done == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in run.quantizer.state_dict().items())
    run.advance(2)
    assert (run.done, int(run.t)) == (2, 2)
    assert not torch.equal(run.quantizer.codebook, before[next(name for name in before if name.endswith("codes"))])


def test_the_share_of_codes_that_jumped_is_of_fine_tuning_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    both = load_images(None, "photos", "train"), load_images(None, "photos", "val")
    images = {"photos": both, regimes.NEW: both}
    assert train(regimes.FINE_TUNING, replace(QUICK_CELL, method="ema", steps=6), images)["jumped"] == 0
    assert train("10 x learning rate", replace(QUICK_CELL, steps=2), images)["jumped"] is None
    monkeypatch.setattr(regimes, "codes_of", lambda run: torch.randn(64, 8))
    assert 0.1 < train(regimes.FINE_TUNING, replace(QUICK_CELL, steps=2), images)["jumped"] < 0.9


@pytest.mark.parametrize("small", [True, False])
def test_every_regime_is_what_its_name_says(small: bool) -> None:
    cells = regimes.regimes(small)
    tokens = {name: (cell.crop // cell.stride) ** 2 for name, cell in cells.items()}
    assert (tokens["1 x 1 tokens"], tokens["3 x 3 tokens"]) == (1, 9)
    few = cells["256 tokens a batch"]
    assert (few.batch * tokens["256 tokens a batch"], few.K) == (256, 16_384)
    assert cells["10 x learning rate"].learning_rate == pytest.approx(1e-3)


def test_a_tone_is_in_its_band() -> None:
    filters = mel_filters()
    assert filters.shape == (BANDS, 129)
    assert (filters.sum(1) >= 0).all()
    power = torch.zeros(129)
    power[32] = 1.0  # 1,000 Hz: 1,000 mel of 2,146
    assert abs(int((filters @ power).argmax()) - round(1_000 / 2_146 * BANDS)) <= 1


def test_recordings_become_frames_and_codes(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for index in (0, 7):
        with wave.open(str(tmp_path / f"3_someone_{index}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(8_000)
            file.writeframes((generator.normal(size=8_000) * 3_000).astype(np.int16).tobytes())
    trained, tested = mel_frames(tmp_path)
    assert trained.shape == tested.shape == ((8_000 - 256) // 80 + 1, BANDS)
    torch.testing.assert_close(trained.mean(0), torch.zeros(BANDS), atol=1e-4, rtol=0)
    row = quantize_speech("ema", (trained, tested), 2)
    assert 0 < row["least_used"] <= row["used"] < 1
    assert row["tokens_per_code"] == len(tested) / CODES


def test_a_row_takes_the_place_of_its_like_alone(tmp_path: Path) -> None:
    out = tmp_path / "regimes.csv"
    for regime, method, used in (("a", "ema", 1), ("a", "vqp", 2), ("b", "ema", 3), ("a", "ema", 4)):
        regimes.add(out, {"regime": regime, "method": method, "K": 8, "used": used, "hardware": f"GPU {used}"})
    with open(out, newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["regime"], row["method"], row["used"]) for row in rows] == [
        *(("a", "vqp", "2"), ("b", "ema", "3"), ("a", "ema", "4")),
    ]
    assert [row["hardware"] for row in rows] == ["GPU 2", "GPU 3", "GPU 4"]
