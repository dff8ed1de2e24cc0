"""The numbers of the paper's tables (`targets.csv`): losses in 1e-3, steps in thousands, mean and std over seeds."""

from __future__ import annotations

import csv
from functools import cache
from importlib import resources

KEYS = ("table", "dataset", "method", "neighborhood", "grid_dim", "tau", "count_init", "update_empty")
MEASURES = ("loss", "steps10", "steps20")
COLUMNS = ("loss_mean", "loss_std", "steps10_mean_k", "steps10_std_k", "steps20_mean_k", "steps20_std_k")
# How many images the paper trains on: of CIFAR-10 by its authors' split, of the others as it rounds them.
IMAGES = {"cifar10": 40_053, "imagenet": 1_300_000, "celebahq_afhq": 43_000}
ROUNDING = 0.1  # by how much a number of images may differ and be the paper's nevertheless


@cache
def targets() -> dict[tuple[str, ...], dict[str, str]]:
    """Each row's key (`KEYS`) -> its `COLUMNS` and `seeds`, as the paper prints them; empty where it has no number."""
    text = resources.files("experiments").joinpath("targets.csv").read_text()
    rows = csv.DictReader(text.splitlines())
    return {tuple(row[key] for key in KEYS): {name: row[name] for name in (*COLUMNS, "seeds")} for row in rows}


def other_data(dataset: str, images: int) -> bool:
    """Whether so many training images are not those of the paper; no data set of ours alone is."""
    paper = IMAGES.get(dataset)
    return paper is not None and abs(images - paper) > ROUNDING * paper
