"""Which image trains, which validates, and which comes when.

An epoch is a permutation, so that batch i is a function of (seed, i) alone.

Raw PCG64 words are used instead of `Generator` methods: numpy promises that the words never change between versions,
and a run resumed after an upgrade must see the batches it would have seen.
"""

from functools import lru_cache
from hashlib import blake2b

import numpy as np

from topovq.tokenizer.data.files import DataError

FRACTION = 0.05  # of the images validate, where nothing says which
ORDER, AUGMENTATION = 0, 1  # streams of one seed that must not overlap


def random_words(seed: int, stream: int, number: int, count: int) -> np.ndarray:
    """`count` uint64 words, a function of the arguments alone."""
    return np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(stream, number))).random_raw(count)


@lru_cache(maxsize=4)
def epoch_order(n: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of range(n), int64 [n], read-only."""
    order_n = np.argsort(random_words(seed, ORDER, epoch, n), kind="stable")
    order_n.flags.writeable = False
    return order_n


def order_slice(n: int, seed: int, first: int, count: int) -> np.ndarray:
    """Entries [first, first + count) of the endless sequence made of one permutation of range(n) after another."""
    position_B = np.arange(first, first + count, dtype=np.int64)
    epoch_B, within_B = np.divmod(position_B, n)
    index_B = np.empty(count, dtype=np.int64)
    for epoch in np.unique(epoch_B):
        here = epoch_B == epoch
        index_B[here] = epoch_order(n, seed, int(epoch))[within_B[here]]
    return index_B


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
