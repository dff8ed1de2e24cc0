"""CIFAR-10 with 20 images a batch, in the three forms in which the real one travels."""

import gzip
import hashlib
import io
import json
import pickle
import shutil
from pathlib import Path
from typing import ClassVar

import numpy as np
from pictures_on_disk import write_tar
from PIL import Image

from topovq.tokenizer.data import cifar10_copies as copies

EACH = 20
TRAIN = [f"data_batch_{i}" for i in range(1, 6)]


def images_and_labels() -> tuple[np.ndarray, np.ndarray]:
    """uint8 [120, 3, 32, 32] and int [120]: the five training batches, then the test batch."""
    random = np.random.default_rng(0)
    return random.integers(0, 256, (6 * EACH, 3, 32, 32), dtype=np.uint8), random.integers(0, 10, 6 * EACH)


class Python2Pickler(pickle._Pickler):
    """Writes bytes as the `str` of Python 2, as the original batches have them."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)

    def save_str_of_python_2(self, data: bytes) -> None:
        self.write(pickle.BINSTRING + len(data).to_bytes(4, "little") + data)

    dispatch[bytes] = save_str_of_python_2


def python_2_pickle(value: object) -> bytes:
    file = io.BytesIO()
    Python2Pickler(file, protocol=2).dump(value)
    return file.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


def batches() -> dict[str, bytes]:
    images, labels = images_and_labels()
    files = {}
    for i, name in enumerate([*TRAIN, "test_batch"]):
        rows = slice(i * EACH, (i + 1) * EACH)
        batch = {b"data": images[rows].reshape(EACH, 3072), b"labels": labels[rows].tolist(), b"filenames": [b"x.png"]}
        files[name] = python_2_pickle(batch)
    return files


def write_archive(folder: Path, files: dict[str, bytes] | None = None) -> Path:
    members = {f"{copies.UNPACKED}/{name}": data for name, data in (files or batches()).items()}
    path = write_tar(folder / "archive.tar", {**members, f"{copies.UNPACKED}/readme.html": b"<html>"})
    return compress(path, folder / copies.ARCHIVE)


def write_unpacked(folder: Path) -> Path:
    root = folder / copies.UNPACKED
    root.mkdir(parents=True)
    for name, data in batches().items():
        (root / name).write_bytes(data)
    return root


def write_package(folder: Path) -> Path:
    images, labels = images_and_labels()
    members = {}
    for i, name in enumerate([*TRAIN, "test_batch"]):
        rows_HWC = images[i * EACH : (i + 1) * EACH].transpose(0, 2, 3, 1).reshape(EACH, 1024, 3)
        file = io.BytesIO()
        Image.fromarray(rows_HWC).save(file, "PNG")
        members[f"package/{name}.png"] = file.getvalue()
    members["package/train_lables.json"] = json.dumps(labels[: 5 * EACH].tolist()).encode()
    members["package/test_lables.json"] = json.dumps(labels[5 * EACH :].tolist()).encode()
    return compress(write_tar(folder / "package.tar", members), folder / copies.PACKAGE_FILE)


def compress(tar: Path, path: Path) -> Path:
    with open(tar, "rb") as source, gzip.GzipFile(path, "wb", mtime=0) as target:
        shutil.copyfileobj(source, target)
    tar.unlink()
    return path


def accept(monkeypatch, copy: Path) -> Path:
    """Let the digests and numbers of the fake be those of the real thing."""
    monkeypatch.setattr(copies, "IMAGES", {"train": 5 * EACH, "test": EACH})
    if copy.is_dir():
        md5 = {name: hashlib.md5((copy / name).read_bytes()).hexdigest() for name in copies.BATCH_MD5}
        monkeypatch.setattr(copies, "BATCH_MD5", md5)
    elif copy.suffix == ".tgz":
        monkeypatch.setattr(copies, "PACKAGE_SHA256", hashlib.sha256(copy.read_bytes()).hexdigest())
    else:
        monkeypatch.setattr(copies, "ARCHIVE_MD5", hashlib.md5(copy.read_bytes()).hexdigest())
    return copy
