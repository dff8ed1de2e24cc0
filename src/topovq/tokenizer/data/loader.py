"""Image files decoded in worker processes: what `folder`, `shards` and the presets have in common.

A batch is one task of one worker, which decodes into a slot of shared memory allocated once. The batch handed out is
that slot; when its last reference is gone, the slot takes another batch. (Fresh memory for each batch would cost a
quarter of the decoding time in page faults.) Memory is [B, S, S, 3], as decoders write and channels-last models read.
"""

import os
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any, BinaryIO, Protocol

import numpy as np
import torch
from PIL import UnidentifiedImageError
from torch.utils.data import DataLoader, Dataset

from topovq.storage import one_line
from topovq.tokenizer.data.decode import Fit, decode
from topovq.tokenizer.data.files import DataError
from topovq.tokenizer.data.labels import Labels, labels_by_folder
from topovq.tokenizer.data.order import AUGMENTATION, order_slice, random_words
from topovq.tokenizer.data.source import SIGNED_UNIT, Batches, Source, Triple, logger
from topovq.tokenizer.data.workers import begin, default_workers, signals_held_back

DEFAULT_SIZE = 128
_PREFETCH = 2  # batches under way for each worker
_DECODED = 64  # images in a task, where all are decoded once
RESIDENT = 2**31  # bytes: images that take no more, validation included, may stay on a device
_HELD = 2  # batches the caller may keep before the next ones are copied: the one at hand and the one before


class Records(Protocol):
    """Encoded images by number. Sent to the workers, so it must pickle and be small."""

    names_N: np.ndarray
    """The images' names (bytes) within the folder or shard."""

    damage: list[str]
    """What was found unreadable while the images were looked for; logged already."""

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """The whole name, for the log."""
        ...

    def open(self, index: int) -> BinaryIO:
        """An open file, for Pillow."""
        ...


@dataclass(frozen=True)
class Listing:
    """Images, and the indices of those that train and that validate."""

    records: Records
    train: np.ndarray
    validation: np.ndarray


class ImageSource(Source):
    """Images of a listing, resized to squares, in an order drawn anew each epoch.

    An image that cannot be decoded is logged, counted and replaced by the next good one of the permutation, so a batch
    stays a function of (seed, i) and the files.
    """

    def __init__(
        self,
        name: str,
        path: str,
        listing: Listing,
        *,
        size: int = DEFAULT_SIZE,
        workers: int | None = None,
        flip: bool = False,
        fit: Fit = "crop",
        normalization: tuple[Triple, Triple] = SIGNED_UNIT,
        parts: dict[str, np.ndarray] | None = None,
    ) -> None:
        """`workers`: decoding processes, 0 to decode in this one, None for one a core. `flip`: mirror half of the
        training images. `fit`: how an image becomes a square."""
        super().__init__(
            name, size, normalization, listing.validation, path=path, train_images=len(listing.train), parts=parts
        )
        self.workers = default_workers() if workers is None else workers
        if self.workers < 0:
            raise ValueError(f"workers={workers!r} must be 0 or more")
        self._listing, self._flip, self._fit = listing, flip, fit
        self._bad: dict[int, str] = {}
        self._resident_N3SS: torch.Tensor | None = None

    def resident(self) -> torch.Tensor | None:
        """Decoded at the first call. None where images are mirrored or damaged: rows then change with the epoch."""
        train = self._listing.train
        images = len(train) + len(self._validation_indices)
        if self._flip or self._bad or images * 3 * self.size**2 > RESIDENT:
            return None
        if self._resident_N3SS is None:
            images_NSS3 = torch.empty(len(train), self.size, self.size, 3, dtype=torch.uint8)
            first = 0
            for batch in self._remember(self._validation(train, _DECODED)):
                images_NSS3[first : first + len(batch)] = batch.permute(0, 2, 3, 1)
                first += len(batch)
            if first < len(train):  # what could not be decoded is in self._bad now
                return None
            self._resident_N3SS = images_NSS3.permute(0, 3, 1, 2)
        return self._resident_N3SS

    def check(self) -> Iterator[int]:
        everything = np.concatenate([self._listing.train, self._validation_indices])
        for batch in self._remember(self._validation(everything, _DECODED)):
            yield len(batch)

    @property
    def unreadable(self) -> dict[str, str]:
        records = self._listing.records
        damage = {what: "could not be opened" for what in records.damage}
        return damage | {records.name(index): reason for index, reason in sorted(self._bad.items())}

    def _each(self, batch_size: int) -> Batches:
        return self._validation(self._listing.train, batch_size)

    def labels(self) -> Labels:
        """By the folders that the images lie in."""
        names_N = self._listing.records.names_N
        read = ([i for i in side if i not in self._bad] for side in (self._listing.train, self._validation_indices))
        return labels_by_folder(*([os.fsdecode(names_N[i]) for i in side] for side in read))

    def describe(self) -> dict[str, Any]:
        skipped = len(self._bad) + len(self._listing.records.damage)
        return super().describe() | {"flip": self._flip, "fit": self._fit, "skipped": skipped}

    def _train(self, batch_size: int, rows: range, seed: int, start: int) -> Batches:
        decoder = self._decoder(len(rows), self.workers)
        dataset = _TrainBatches(decoder, self._listing.train, batch_size, rows, seed, self._flip)
        for batch in self._run(dataset, count(start), self.workers):
            if len(batch) < len(rows):
                self._refuse_all_bad(self._listing.train)
            yield batch

    def _validation(self, indices: np.ndarray, batch_size: int) -> Batches:
        batches = -(-len(indices) // batch_size)
        workers = min(self.workers, batches)
        dataset = _ValidationBatches(self._decoder(batch_size, workers), indices, batch_size)
        rest = torch.empty(0, 3, self.size, self.size, dtype=torch.uint8)
        good = 0
        for batch in self._run(dataset, range(batches), workers):
            good += len(batch)
            rest = torch.cat([rest, batch]) if len(rest) else batch
            if len(rest) >= batch_size:  # not so where a bad image left a gap: the next batch fills it
                yield rest[:batch_size]
                rest = rest[batch_size:]
        if len(rest):
            yield rest
        if not good and 0 < len(indices) == len(self._validation_indices):
            self._refuse_all_bad(indices)

    def _decoder(self, rows: int, workers: int) -> "_Decoder":
        slots = workers * _PREFETCH + 1 + _HELD  # the tasks under way, and one just done
        ring = [torch.empty(rows, self.size, self.size, 3, dtype=torch.uint8) for _ in range(slots)]
        if workers:
            ring = [slot.share_memory_() for slot in ring]
        return _Decoder(self._listing.records, self.size, self._fit, ring)

    def _run(self, dataset: "_Batches", numbers: Iterable[int], workers: int) -> Iterator[torch.Tensor]:
        ring = dataset.decoder.ring
        free = list(range(len(ring)))
        loader = DataLoader(
            dataset,
            batch_size=None,
            sampler=((number, free.pop()) for number in numbers),
            num_workers=workers,
            prefetch_factor=_PREFETCH if workers else None,
            worker_init_fn=begin,
            generator=torch.Generator(),  # else each new iterator would draw from the global one, and change the run
        )
        with signals_held_back():
            results = iter(loader)
        for slot, rows, bad in results:
            for index, reason in bad:
                if index not in self._bad:
                    self._bad[index] = reason
                    logger.warning("skipped %s: %s", self._listing.records.name(index), reason)
            yield _hand_out(ring, slot, rows, free).permute(0, 3, 1, 2)

    def _refuse_all_bad(self, indices: np.ndarray) -> None:
        index = int(indices[0])
        first = f"{self._listing.records.name(index)}: {self._bad[index]}"
        raise DataError(f"none of the {len(indices)} images of {self.path} can be decoded; the first is {first}")


def _hand_out(ring: list[torch.Tensor], slot: int, rows: int, free: list[int]) -> torch.Tensor:
    """The first rows of a slot, uint8 [rows, S, S, 3], which goes back to `free` when no tensor refers to it."""
    if free and not torch.cuda.is_initialized():
        filled_BSS3 = ring[slot].numpy()[:rows]  # an array of its own, which lives as long as the tensors made of it
        weakref.finalize(filled_BSS3, free.append, slot).atexit = False
        return torch.from_numpy(filled_BSS3)
    # The next task needs a slot and the caller keeps the others; or the batch goes to a GPU, from pinned memory.
    filled = ring[slot][:rows]
    copied = torch.empty(filled.shape, dtype=torch.uint8, pin_memory=torch.cuda.is_initialized()).copy_(filled)
    free.append(slot)
    return copied


def reason_not_decoded(records: Records, index: int, size: int, fit: Fit, out_SS3: np.ndarray) -> str | None:
    """None, and image `index` is in `out_SS3`, uint8 [size, size, 3]; or why it cannot be decoded."""
    try:
        with records.open(index) as file:
            decode(file, size, fit, out_SS3)
    except MemoryError:
        raise
    except UnidentifiedImageError:  # its own message is no more than where the bytes were in memory
        return "not an image of a known format"
    except Exception as error:  # damaged bytes raise a dozen types in Pillow's decoders, and all mean the same here
        return f"{type(error).__name__}: {one_line(error)}"
    return None


class _Decoder:
    """Decodes into the slots of a ring, and keeps account of what it could not decode."""

    def __init__(self, records: Records, size: int, fit: Fit, ring: list[torch.Tensor]) -> None:
        self.records, self.size, self.fit, self.ring = records, size, fit, ring
        self.bad: dict[int, str] = {}

    def decode(self, index: int, out_SS3: np.ndarray) -> bool:
        """Whether image `index` is good; it is then in `out_SS3`."""
        if index in self.bad:
            return False
        reason = reason_not_decoded(self.records, index, self.size, self.fit, out_SS3)
        if reason is not None:
            self.bad[index] = reason
        return reason is None


class _Batches(Dataset[tuple[int, int, list[tuple[int, str]]]]):
    """Item (i, slot) decodes batch i into the slot; returns the slot, the rows filled, and what was newly found bad."""

    def __init__(self, decoder: _Decoder) -> None:
        self.decoder = decoder

    def __getitem__(self, item: tuple[int, int]) -> tuple[int, int, list[tuple[int, str]]]:
        i, slot = item
        known = len(self.decoder.bad)
        rows = self.fill(i, self.decoder.ring[slot].numpy())
        return slot, rows, list(self.decoder.bad.items())[known:]

    def fill(self, i: int, out_BSS3: np.ndarray) -> int:
        raise NotImplementedError


class _TrainBatches(_Batches):
    def __init__(
        self, decoder: _Decoder, indices: np.ndarray, batch_size: int, rows: range, seed: int, flip: bool
    ) -> None:
        super().__init__(decoder)
        self.indices, self.batch_size, self.rows, self.seed, self.flip = indices, batch_size, rows, seed, flip

    def fill(self, i: int, out_BSS3: np.ndarray) -> int:
        mirrored_B = random_words(self.seed, AUGMENTATION, i, self.batch_size) & 1 if self.flip else None
        first = i * self.batch_size + self.rows.start
        for row, index in enumerate(self._indices(first, len(self.rows))):
            replacements = count(first + row + 1)
            while not self.decoder.decode(int(index), out_BSS3[row]):
                if len(self.decoder.bad) == len(self.indices):
                    return 0
                (index,) = self._indices(next(replacements), 1)
            if mirrored_B is not None and mirrored_B[self.rows[row]]:
                out_BSS3[row] = out_BSS3[row, :, ::-1].copy()
        return len(out_BSS3)

    def _indices(self, first: int, rows: int) -> np.ndarray:
        return self.indices[order_slice(len(self.indices), self.seed, first, rows)]


class _ValidationBatches(_Batches):
    def __init__(self, decoder: _Decoder, indices: np.ndarray, batch_size: int) -> None:
        super().__init__(decoder)
        self.indices, self.batch_size = indices, batch_size

    def fill(self, i: int, out_BSS3: np.ndarray) -> int:
        rows = 0
        for index in self.indices[i * self.batch_size : (i + 1) * self.batch_size]:
            rows += self.decoder.decode(int(index), out_BSS3[rows])
        return rows
