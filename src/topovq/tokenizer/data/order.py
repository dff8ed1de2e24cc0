"""Which image comes when: a permutation an epoch, so that batch i is a function of (seed, i) alone.

Raw PCG64 words are used instead of `Generator` methods: numpy promises that the words never change between versions,
and a run resumed after an upgrade must see the batches it would have seen.
"""

from functools import lru_cache

import numpy as np

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
