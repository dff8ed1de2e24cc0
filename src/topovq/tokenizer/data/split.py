"""Which images train and which validate."""

from hashlib import blake2b

import numpy as np

from topovq.tokenizer.data.files import DataError

FRACTION = 0.05


def split(
    names_N: np.ndarray, trains_N: np.ndarray, validates_N: np.ndarray, where: str
) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the images that train and of those that validate, int64.

    `trains_N` and `validates_N` (bool) are what folders or shards say. Where nothing validates, about 5% of the
    training images do, by the hash of their names (bytes): an image keeps its side when others are added, removed or
    moved to another shard, and each side gets at least one.
    """
    train, validation = np.flatnonzero(trains_N), np.flatnonzero(validates_N)
    if not len(train):
        raise DataError(f"{where} holds validation images only ({len(validation)}); training needs some too")
    if not len(validation):
        if len(train) < 2:
            raise DataError(f"{where} holds a single image; at least 2 are needed, one of which validates")
        hash_N = np.array([_hash(name) for name in names_N[train]], dtype=np.uint64)
        chosen_N = hash_N < np.uint64(FRACTION * 2**64)
        chosen_N[hash_N.argmin()] = True
        chosen_N[hash_N.argmax()] = False
        train, validation = train[~chosen_N], train[chosen_N]
    return train, validation


def _hash(name: bytes) -> int:
    return int.from_bytes(blake2b(name, digest_size=8).digest())
