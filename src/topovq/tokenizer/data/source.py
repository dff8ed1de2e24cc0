"""What every data source offers to training. B: global batch, W: ranks, N: training images, S: side of an image."""

import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from topovq.tokenizer.data.files import DataError
from topovq.tokenizer.data.labels import Labels
from topovq.tokenizer.data.order import order_slice

Triple = tuple[float, float, float]
Batches = Generator[torch.Tensor, None, None]
logger = logging.getLogger("topovq")

SIGNED_UNIT: tuple[Triple, Triple] = ((127.5, 127.5, 127.5), (127.5, 127.5, 127.5))
"""Mean and std that bring pixels to [-1, 1]."""


class Source(ABC):
    """Square RGB images as uint8 [., 3, S, S] batches; `normalized = (uint8 - mean) / std` is left to the model.

    A subclass gives `_train`, `_validation`, and the indices of its validation images.
    """

    def __init__(
        self,
        name: str,
        size: int,
        normalization: tuple[Triple, Triple],
        validation: np.ndarray,
        *,
        path: str | None = None,
        train_images: int | None = None,
        parts: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """`train_images` is None where training draws endlessly instead of going through a list."""
        if size < 1:
            raise ValueError(f"images of size {size!r} cannot be; a side is at least 1 pixel")
        self.name = name
        self.path = path
        self.size = size
        self.mean, self.std = normalization
        self.train_images = train_images
        self._validation_indices = validation
        self._parts = dict(parts or {})
        self._iterators: weakref.WeakSet[Batches] = weakref.WeakSet()

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the sets that validation consists of, where there is more than one."""
        return tuple(self._parts)

    @property
    def validation_images(self) -> int:
        """How many images validate: none of them is ever trained on."""
        return len(self._validation_indices)

    def describe(self) -> dict[str, Any]:
        """Facts for the record of a run, fit for JSON."""
        facts: dict[str, Any] = {"name": self.name, "path": self.path, "size": self.size}
        facts |= {"mean": list(self.mean), "std": list(self.std)}
        if self.train_images is not None:
            facts["train_images"] = self.train_images
        facts["validation_images"] = self.validation_images
        if self._parts:
            facts["validation_parts"] = {name: len(indices) for name, indices in self._parts.items()}
        return facts

    def train(
        self, batch_size: int, *, seed: int, start: int = 0, rank: int = 0, world_size: int = 1
    ) -> Iterator[torch.Tensor]:
        """Endless uint8 [B / W, 3, S, S], beginning with batch `start`.

        Batch i of the global batch size B is a function of (seed, i) alone; rank r yields its rows [r B/W, (r+1) B/W).
        """
        rows = rank_rows(batch_size, rank, world_size)
        for label, value in (("seed", seed), ("start", start)):
            if value < 0:
                raise ValueError(f"{label}={value!r} must be 0 or more")
        return self._remember(self._train(batch_size, rows, seed, start))

    def validation(
        self, batch_size: int, *, rank: int = 0, world_size: int = 1, part: str | None = None
    ) -> Iterator[torch.Tensor]:
        """Each validation image once, in a fixed order: uint8 [B / W, 3, S, S], the last one smaller.

        Ranks take consecutive stretches that together are the whole set (a stretch may be empty). `part` is one of
        `parts`; None takes them all together.
        """
        rows = rank_rows(batch_size, rank, world_size)
        if part is not None and part not in self._parts:
            known = f"is none of {', '.join(self._parts)}" if self._parts else f"given, but {self.name} has no parts"
            raise ValueError(f"part={part!r} {known}")
        chosen = self._validation_indices if part is None else self._parts[part]
        first, last = (len(chosen) * r // world_size for r in (rank, rank + 1))
        return self._remember(self._validation(chosen[first:last], rows.stop - rows.start))

    def each(self, batch_size: int) -> Iterator[torch.Tensor]:
        """Each training image once, in a fixed order and as it is: uint8 [B, 3, S, S], without unreadable ones."""
        if self.train_images is None:
            raise ValueError(f"{self.name} draws its images endlessly; there is no last one")
        return self._remember(self._each(batch_size))

    def labels(self) -> Labels:
        """The classes of the images of `each` and of `validation`, after both were read."""
        raise DataError(f"the images of {self.name} have no labels")

    def check(self) -> Iterator[int]:
        """Read every image once, some at a time: how many were read. `unreadable` is complete afterwards."""
        return iter(())

    @property
    def unreadable(self) -> dict[str, str]:
        """The images found so far that cannot be read, by name, with the reasons."""
        return {}

    def resident(self) -> torch.Tensor | None:
        """The training images, uint8 [N, 3, S, S], where they fit in memory; `indices` says which rows come when."""
        return None

    def indices(self, i: int, batch_size: int, seed: int) -> torch.Tensor:
        """int64 [B]: the training images that make up global batch i."""
        if self.train_images is None:
            raise ValueError(f"{self.name} draws its images endlessly; they have no indices")
        return torch.from_numpy(order_slice(self.train_images, seed, i * batch_size, batch_size))

    def close(self) -> None:
        """Stop the workers of every iterator handed out."""
        for iterator in list(self._iterators):
            iterator.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _remember(self, iterator: Batches) -> Batches:
        self._iterators.add(iterator)
        return iterator

    def _each(self, batch_size: int) -> Batches:
        images = self.resident()
        assert images is not None, "a source whose images are not in memory has its own"
        yield from images.split(batch_size)

    @abstractmethod
    def _train(self, batch_size: int, rows: range, seed: int, start: int) -> Batches:
        """The given rows of batches start, start + 1, ..."""

    @abstractmethod
    def _validation(self, indices: np.ndarray, batch_size: int) -> Batches:
        """The images at `indices`, `batch_size` at a time."""


def rank_rows(batch_size: int, rank: int, world_size: int) -> range:
    """The rows of a global batch that belong to `rank`."""
    if world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"rank={rank!r} must be in 0..world_size-1 with world_size={world_size!r} at least 1")
    if batch_size < 1 or batch_size % world_size:
        raise ValueError(f"batch_size={batch_size!r} must be a positive multiple of world_size={world_size!r}")
    share = batch_size // world_size
    return range(rank * share, (rank + 1) * share)
