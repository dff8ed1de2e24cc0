"""Runs: quantizers that are not in the package, in a run's folder and in the processes of a sweep; and images."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from experiments.peers import Peer
from experiments.runs import Images, run_all
from topovq.tokenizer.models import VQVAE, load_pretrained
from topovq.tokenizer.training import TrainConfig

ROOT = Path(__file__).parents[2]


def test_a_run_folder_says_what_to_import(tmp_path: Path) -> None:
    """In a process that knows the package alone; after the import the same folder loads."""
    VQVAE(image_size=8, hidden=8, codebook_size=32, code_dim=4, quantizer="simvq").save_pretrained(tmp_path)
    code = """
import sys
from topovq.tokenizer.models import load_pretrained
try:
    load_pretrained(sys.argv[1])
except ValueError as error:
    assert "quantizer 'simvq' is of another library" in str(error), error
    assert "`import experiments.peers` first, in a clone" in str(error), error
else:
    raise AssertionError("the package alone cannot know it")
import experiments.peers
assert load_pretrained(sys.argv[1]).quantizers[0].codebook_size == 32
"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_processes_of_a_sweep_know_them(tmp_path: Path) -> None:
    """Each run has a process of its own, which imports the package and not the experiments."""
    small: dict[str, Any] = {"hidden": 8, "residual_hidden": 4, "residual_layers": 1}
    runs = [
        TrainConfig(data="photos", image_size=32, model_options=small, codebook_size=32, code_dim=4, quantizer="fsq",
                    steps=1, batch_size=8, validate_every=1, learning_rate=1e-3, seed=seed, device="cpu",
                    precision="fp32")
        for seed in (0, 1)
    ]  # fmt: skip
    results = run_all(runs, tmp_path, jobs=2)
    assert [result.folder for result in results] == [tmp_path / config.run_id for config in runs]
    assert isinstance(load_pretrained(results[1].folder).quantizers[0], Peer)


def test_images_are_of_every_part_of_a_data_set() -> None:
    class Parts:
        parts = ("a", "b")

        def validation(self, batch_size: int, part: str | None = None) -> Any:
            value = {"a": 1, "b": 2}[str(part)]
            return iter([torch.full((batch_size, 3, 2, 2), value, dtype=torch.uint8)])

    model: Any = SimpleNamespace(channels=3)
    images = Images(Parts(), None)  # type: ignore[arg-type]
    assert images.take(3, model, {})[:, 0, 0, 0].tolist() == [1, 2, 2]
    assert images.take(1, model, {})[:, 0, 0, 0].tolist() == [2]
