"""`topovq.load`: whatever topovq saved, by its path."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import safetensors

from topovq.missing import needs
from topovq.pretrained import HubModule
from topovq.prior import Prior
from topovq.quantizers import GradientVQ, GroupedResidualVQ, KohonenVQ, ResidualVQ, SoftKohonenVQ
from topovq.storage import CONFIG, WEIGHTS, read_json

MAP_FILE = "map.safetensors"  # in the folder that `topovq map` writes
# An argument that the class alone has, which its config.json therefore names; KohonenVQ is what is left.
TOLD_BY: dict[str, type[HubModule]] = {
    "groups": GroupedResidualVQ,
    "num_quantizers": ResidualVQ,
    "temperature": SoftKohonenVQ,
    "codebook_weight": GradientVQ,
}


def load(path: str | os.PathLike[str]) -> Any:
    """What was saved at `path`, ready to use and in eval mode, on the CPU.

    path  the folder of a run (its newest checkpoint, if it is not finished) or of one of its checkpoints: the model;
          the folder of a prior: the prior;
          a folder that `save_pretrained` wrote: the model or the quantizer;
          a file that `SelfOrganizingMap.save` and its like wrote, or a folder of `topovq map`: the estimator
    """
    place = Path(path)
    if not place.exists():
        raise FileNotFoundError(f"there is nothing at {str(place)!r}: neither a run nor a saved quantizer or map")
    if place.is_file():
        if place.name in (CONFIG, WEIGHTS):
            return load(place.parent)
        return _load_estimator(place)
    if (place / MAP_FILE).is_file():
        return _load_estimator(place / MAP_FILE)
    if (place / CONFIG).is_file():
        config = read_json(place / CONFIG)
        if "model" not in config:
            told: type[HubModule] = next((cls for name, cls in TOLD_BY.items() if name in config), KohonenVQ)
            return told.from_pretrained(place)
        if config["model"] == "prior":
            return Prior.from_pretrained(place)
    with needs("train"):
        from topovq.tokenizer.training.runs import load_run
    return load_run(place)


def _load_estimator(path: Path) -> Any:
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            name = (file.metadata() or {}).get("class")
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is no file that topovq saved: {error}") from None
    with needs("som"):
        from topovq import som
    if name not in som.ESTIMATORS:
        raise ValueError(f"{path} holds no estimator of topovq ({', '.join(som.ESTIMATORS)}), but {name!r}")
    return getattr(som, name).load(path)
