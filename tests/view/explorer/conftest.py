"""Two small runs (a VQ-VAE-2 on hexagons and its EMA twin), a folder of images, a server in its own process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from small_runs import make_run

TWINS = {"model": "vqvae2", "image_size": 32, "codebook_size": 24, "steps": 60, "validate_every": 30}
TWINS["model_options"] = {"hidden": 32, "residual_hidden": 8}
# Started from data, so that images differ in their tokens after so few steps.
HEXAGONS = {"grid": [4, 6], "topology": "hexagonal", "neighborhood": "hard", "kmeans_init": True}


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("runs")
    return [
        make_run(root / "kohonen", **TWINS, quantizer_options=HEXAGONS),
        make_run(root / "ema", **TWINS, quantizer="ema", quantizer_options={"kmeans_init": True}),
    ]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two images, one broken, one text, and a link to an image outside of it."""
    root = tmp_path_factory.mktemp("pictures")
    for number, color in enumerate([(200, 30, 30), (30, 30, 200)]):
        Image.fromarray(np.full((40, 60, 3), color, np.uint8)).save(root / f"{number}.png")
    (root / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    (root / "notes.txt").write_text("secret")
    outside = tmp_path_factory.mktemp("elsewhere") / "outside.png"
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(outside)
    (root / "link.png").symlink_to(outside)
    return root


@pytest.fixture(scope="session")
def server(runs: list[Path], folder: Path) -> Iterator[tuple[str, int]]:
    """The address and process number of `topovq explore`."""
    command = [sys.executable, "-m", "topovq", "explore", *map(str, runs), "--port", "0", "--images", str(folder)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    assert process.stdout is not None
    line = process.stdout.readline()
    address = re.search(r"http://127\.0\.0\.1:\d+/", line)
    assert address, line + process.stdout.read()
    try:
        yield address.group(), process.pid
    finally:
        process.terminate()
        process.wait(20)
