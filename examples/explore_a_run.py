"""A page to walk on the map of a run: point at codes and tokens, move them, paint with them.

python examples/explore_a_run.py [RUN]    without a run, a small one is trained first; Ctrl-C ends it

The same on the command line: topovq explore RUN
"""

import contextlib
import sys
import tempfile
from pathlib import Path

from topovq.tokenizer.training import TrainConfig, train
from topovq.view.explorer import explore


def small_run(folder: Path) -> Path:
    """A VQ-VAE on crops of photographs, trained for seconds."""
    config = TrainConfig(
        data="photos",
        out=folder,
        codebook_size=256,
        model_options={"hidden": 32},
        steps=60,
        batch_size=32,
        validate_every=30,
        device="cpu",
    )
    return train(config).folder


run = Path(sys.argv[1]) if len(sys.argv) > 1 else small_run(Path(tempfile.mkdtemp(prefix="explore_")) / "run")
with contextlib.suppress(KeyboardInterrupt):
    explore([run], port=0)  # prints the address of the page, at any free port
