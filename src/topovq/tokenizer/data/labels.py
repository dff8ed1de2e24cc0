"""Which class an image belongs to: the data set's own labels, or the folder that the image lies in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

import torch
from torch import Tensor

from topovq.tokenizer.data.files import DataError

SIDES = ("train", "val", "valid", "validation")  # folders that say what an image is for, not what it shows
MOST = 1024  # classes


@dataclass(frozen=True)
class Labels:
    """Names of the classes, and the class int64 of each training and each validation image, in their order."""

    names: list[str]
    train_N: Tensor
    validation_M: Tensor


def class_of(name: str) -> str:
    """The class of the image `name`, a path with slashes: "train/cat/1.png" shows a cat."""
    folder = PurePosixPath(name).parent.name
    if folder in ("", *SIDES):
        raise DataError(f"the image {name!r} has no label: it lies in no folder named as its class, as in cat/1.png")
    return folder


def labels_by_folder(train: Sequence[str], validation: Sequence[str]) -> Labels:
    """Labels of images by the folders in their names."""
    train_names, validation_names = [class_of(name) for name in train], [class_of(name) for name in validation]
    names = sorted(set(train_names))
    if not 2 <= len(names) <= MOST:
        few = ", ".join(names[:3])
        folders = f"{len(names):,} folder" + "s" * (len(names) != 1)
        raise DataError(f"the training images lie in {folders} ({few}): expected 2 to {MOST:,} classes")
    unknown = sorted(set(validation_names) - set(names))
    if unknown:
        raise DataError(f"no training image has the label {unknown[0]!r}, but a validation image has")
    number = {name: label for label, name in enumerate(names)}
    return Labels(names, *(torch.tensor([number[n] for n in each]) for each in (train_names, validation_names)))
