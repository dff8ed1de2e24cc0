from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from small_runs import make_run
from tiny_prior import tiny_prior

from topovq.prior.fitting import fit


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of 16x16 images in four class folders, of one color each."""
    pictures = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for name, color in {"blue": (0, 0, 255), "green": (0, 200, 0), "red": (255, 0, 0), "white": (250,) * 3}.items():
        for i in range(24):
            folder = pictures / ("val" if i < 4 else "train") / name
            folder.mkdir(parents=True, exist_ok=True)
            noise = rng.integers(-20, 20, (16, 16, 3))
            Image.fromarray((np.array(color) + noise).clip(0, 255).astype(np.uint8)).save(folder / f"{i}.png")
    out = tmp_path_factory.mktemp("runs") / "tokenizer"
    return make_run(out, data=str(pictures), image_size=16, steps=60, validate_every=60, workers=0, learning_rate=3e-3)


@pytest.fixture(scope="session")
def labeled(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prior with classes, trained for long enough to know them."""
    out = tmp_path_factory.mktemp("priors") / "labeled"
    settings = {"steps": 150, "batch_size": 32, "validate_every": 75, "checkpoint_every": 75, "learning_rate": 1e-2}
    fit(tiny_prior(run, out, labels=True, **settings), quiet=True)
    return out
