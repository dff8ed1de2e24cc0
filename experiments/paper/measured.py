"""What is measured of trained models, which are not in the repository: one JSON file a run, `ID.measured.json`.

topography  the order of each level's map: topographic error and product, distance of neighbors
shifts      PSNR of images after all tokens were moved, on the map (`grid`) and by their numbers (`index`)
softmax     of a differentiable KSOM: the validation loss with its softmax, which the record has without it
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from experiments.figures.measures import WIDE, moved_by_index, shift_scores, topographies
from experiments.records import Record
from experiments.runs import Images
from topovq.metrics import topographic_product
from topovq.quantizers import SoftKohonenVQ
from topovq.storage import write_atomic
from topovq.tokenizer.atlas import charts
from topovq.tokenizer.data import Source
from topovq.tokenizer.models import Tokenizer
from topovq.tokenizer.training import load_run
from topovq.view.pictures import moved

SUFFIX = ".measured.json"
FAILED = ".failed.json"  # of a run whose weights became NaN
IMAGES = {32: 1_024, 256: 128}  # validation images by their side
MOVES = {"grid": moved, "index": moved_by_index}


def measure(run: Record, what: Collection[str], source: Source, device: torch.device, out: Path) -> Path:
    """Measure the model of a finished run, in its folder, and write what was found."""
    model = load_run(run.path.parent).to(device)
    images = Images(source, None).take(IMAGES.get(source.size, 256), model, run.config)
    orders = zip(topographies(model, images), charts(model), strict=True)
    found: dict[str, Any] = {
        "run": run.config["id"],
        "topography": [
            asdict(order) | {"topographic_product": float(topographic_product(chart.codes_KD.float(), chart.grid))}
            for order, chart in orders
        ],
        "shifts": [
            {"by": by} | asdict(score)
            for by, move in MOVES.items()
            for score in shift_scores(model, images, WIDE if "shifts" in what else (), moved=move)
            if score.offset
        ],
    }
    if any(isinstance(quantizer, SoftKohonenVQ) for quantizer in model.quantizers):
        found["softmax"] = soft_loss(model, source, run.config["batch_size"])
    path = out / f"{run.config['id']}{SUFFIX}"
    write_atomic(path, (json.dumps(found) + "\n").encode())
    return path


@torch.no_grad()
def soft_loss(model: Tokenizer, source: Source, batch_size: int) -> float:
    """The validation loss where vectors become mixtures of codes, as in training; the codes stay."""
    model.eval()
    layers: list[Any] = [quantizer for quantizer in model.quantizers if isinstance(quantizer, SoftKohonenVQ)]
    for layer in layers:
        layer.training, layer.freeze_codebook = True, True
    total = images = 0.0
    for batch in source.validation(batch_size):
        total += float(model(batch.to(model.mean_C11.device)).reconstruction_loss) * len(batch)
        images += len(batch)
    return total / images


def read_measured(folders: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """What was measured, by the run's id."""
    return _by_run(folders, SUFFIX)


def read_failed(folders: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Runs that were tried and failed, by their ids."""
    return _by_run(folders, FAILED)


def _by_run(folders: Iterable[Path], suffix: str) -> dict[str, dict[str, Any]]:
    paths = [path for folder in folders for path in sorted(folder.rglob(f"*{suffix}"))]
    return {found["run"]: found for found in (json.loads(path.read_text()) for path in paths)}
