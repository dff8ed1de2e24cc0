"""Rows: a table that need not fit into memory, for `fit` and `predict`."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from topovq.som.passes import Block, Passes, Scaling, rows_of_block, table_of
from topovq.som.readers import Array, Batches, Dataset, Parquet, Piece, Reader, refuse_lazy


class Rows:
    """A table that is read a block at a time, as often as asked.

    source   a Parquet file, a folder of them, or a list of both; a pyarrow Dataset; an array such as np.memmap; or a
             function without arguments that gives an iterator of batches: arrays, tensors, frames, record batches, or
             pairs (batch, weights). It must give the same rows each time
    columns  names of the columns to use, or their numbers where they have no names; all by default
    weight   the column of the rows' weights; it is not among the columns, unless they name it

    A null or NaN is a missing value. All of it is float32 if every column is, else float64, as with arrays. In memory
    are a few blocks of at most 65,536 rows and 4 million numbers (on a GPU 1,048,576 rows and 64 million), whatever
    the table's size.
    """

    def __init__(
        self, source: Any, columns: Sequence[Any] | None = None, weight: Any = None, *, start: int = 0,
        stop: int | None = None,
    ) -> None:  # fmt: skip
        self.source, self.columns, self.weight = source, columns, weight
        self.start, self.stop = start, stop

    def weighted(self, weight: str) -> Rows:
        """The same rows with weights from this column."""
        return Rows(self.source, self.columns, weight, start=self.start, stop=self.stop)

    def reader(self, names: Sequence[str] | None = None) -> Reader:
        """The source, opened: columns and types are checked. `names` are used where nobody chose columns."""
        columns = names if self.columns is None else self.columns
        how = columns, self.weight
        refuse_lazy(self.source)
        if paths := paths_of(self.source):
            reader: Reader = Parquet(paths, *how)
        elif is_dataset(self.source):
            reader = Dataset(self.source, *how)
        elif isinstance(self.source, np.ndarray):
            reader = Array(self.source, self.columns, self.weight)
        elif callable(self.source):
            reader = Batches(self.source, self.columns, self.weight, names)
        else:
            raise TypeError(
                f"{self.source!r:.80} cannot be read in blocks: expected Parquet files or folders, a pyarrow Dataset, "
                "an array, or a function that gives an iterator of batches"
            )
        if (self.start, self.stop) != (0, None):
            if not reader.ranges or reader.n is None:
                raise ValueError(f"{reader.name} cannot be read from row {self.start} to {self.stop}")
            reader.n = min(reader.n, reader.n if self.stop is None else self.stop) - self.start
        if reader.n is not None and reader.n <= 0:
            raise ValueError(f"{reader.name} has no rows: expected at least one")
        return reader

    def parts(self, count: int, device: str | torch.device = "cpu") -> list[Rows]:
        """At most `count` Rows that together are this one, in order; each begins where a block does.

        What they say is added up as if one reader had read them all. They can be pickled if the source can.
        """
        reader = self.reader()
        if not reader.ranges or reader.n is None:
            raise ValueError(f"{reader.name} cannot be read in parts: expected Parquet files or an array")
        block = rows_of_block(reader.dim, torch.device(device))
        step = block * max(1, -(-reader.n // (block * count)))
        edges = [*range(self.start, self.start + reader.n, step), self.start + reader.n]
        return [Rows(self.source, self.columns, self.weight, start=a, stop=b) for a, b in pairwise(edges)]


def as_rows(X: Any) -> Rows | None:
    """X as Rows if it is one, or is read in blocks; None for an array in memory and its like."""
    if isinstance(X, Rows):
        return X
    refuse_lazy(X)
    if is_batches(X):
        raise TypeError(f"{X!r:.60} gives batches, and a fit reads them often: give a function that makes it")
    if isinstance(X, (str, os.PathLike, np.memmap)) or is_dataset(X) or (callable(X) and not hasattr(X, "__array__")):
        return Rows(X)
    return None


def paths_of(source: Any) -> list[Path]:
    """The files and folders that a source names; none for one that is no path and no list of them."""
    several = source if isinstance(source, (list, tuple)) else [source]
    if not several:
        raise ValueError("no table is named: expected at least one Parquet file or folder of them")
    named = all(isinstance(each, (str, os.PathLike)) for each in several)
    return [Path(each) for each in several] if named else []


def is_dataset(X: Any) -> bool:
    """Whether X is a pyarrow Dataset: not a Scanner of one, which is read once, nor a Table."""
    return type(X).__module__ == "pyarrow._dataset" and hasattr(X, "get_fragments")


def is_batches(X: Any) -> bool:
    """Whether X is an iterable of batches (a generator, a DataLoader), and no table or path itself."""
    table = isinstance(X, (Tensor, np.ndarray, list, tuple, str)) or hasattr(X, "shape") or hasattr(X, "__array__")
    return isinstance(X, Iterable) and not table


class ReadPasses(Passes):
    """Rows in blocks of the same size as those of an array; each pass reads them again."""

    def __init__(
        self, rows: Rows, reader: Reader, device: torch.device, sample_weight: np.ndarray | None,
        prepared: Callable[[Tensor], Tensor],
    ) -> None:  # fmt: skip
        self.rows, self.reader, self.device = rows, reader, device
        self.dim, self.dtype, self.n = reader.dim, reader.dtype, reader.n
        self.keeps_labels = isinstance(reader, Array)  # as with arrays in memory
        self.sample_weight = sample_weight
        self.prepared = prepared

    def _scale(self, scaling: Scaling) -> None:
        self.prepared = scaling

    def __iter__(self) -> Iterator[Block]:
        seen = 0
        for x_ND, weight_N in self._blocks():
            if bool(x_ND.isinf().any()):
                raise ValueError(
                    f"{self.reader.name} contains infinity: replace it, or put NaN where a value is missing"
                )
            if self.sample_weight is not None:
                if weight_N is not None:
                    raise ValueError(
                        f"weights were given twice, as sample_weight and by {self.reader.name}: give one of them"
                    )
                weight_N = torch.from_numpy(self.sample_weight[seen : seen + len(x_ND)])
                if len(weight_N) < len(x_ND):
                    raise ValueError(f"sample_weight has {len(self.sample_weight):,} entries, but there are more rows")
            table = table_of(self.prepared(x_ND), seen)
            seen += len(x_ND)
            yield table, self._checked(weight_N, table.n)
        self._check_count(seen)

    def _blocks(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """The pieces of the reader, cut and joined to blocks of one size, on the device."""
        size = rows_of_block(self.dim, self.device)
        held: list[Piece] = []
        count = 0
        pieces = self.reader.pieces(size, self.rows.start, self.rows.stop)
        for x_ND, weight_N in ahead(pieces) if self.reader.ahead else pieces:
            while len(x_ND):
                taken = min(size - count, len(x_ND))
                held.append((x_ND[:taken], None if weight_N is None else weight_N[:taken]))
                x_ND, weight_N = x_ND[taken:], None if weight_N is None else weight_N[taken:]
                count += taken
                if count == size:
                    yield self._joined(held)
                    held, count = [], 0
        if held:
            yield self._joined(held)

    def _joined(self, held: list[Piece]) -> tuple[Tensor, Tensor | None]:
        parts = [x.to(self.device) for x, _ in held]
        x_ND = (parts[0] if len(parts) == 1 else torch.cat(parts)).contiguous()
        weights = [torch.ones(len(x), dtype=torch.float64) if weight is None else weight for x, weight in held]
        return x_ND, None if all(weight is None for _, weight in held) else torch.cat([w.cpu() for w in weights])

    def _checked(self, weight_N: Tensor | None, n: int) -> Tensor:
        if weight_N is None:
            return torch.ones(n, dtype=self.dtype, device=self.device)
        if not bool(weight_N.isfinite().all()) or bool((weight_N < 0).any()):
            raise ValueError(f"a weight of {self.reader.name} is missing, infinite or below 0: expected 0 or more")
        return weight_N.to(device=self.device, dtype=self.dtype)

    def _check_count(self, seen: int) -> None:
        if seen == 0:
            raise ValueError(f"{self.reader.name} has no rows: expected at least one")
        if self.n is not None and seen != self.n:
            raise ValueError(
                f"{self.reader.name} had {seen:,} rows in this pass and {self.n:,} before: expected the same each time"
            )
        self.n = seen
        if self.sample_weight is not None and len(self.sample_weight) != seen:
            raise ValueError(
                f"sample_weight has {len(self.sample_weight)} entries: expected one for each of {seen} rows"
            )


def ahead(pieces: Iterator[Piece]) -> Iterator[Piece]:
    """The same pieces; the next one is read in a thread while one is worked on."""
    waiting: queue.Queue[Any] = queue.Queue(maxsize=1)
    left = threading.Event()

    def offer(item: Any) -> None:
        while not left.is_set():
            try:
                waiting.put(item, timeout=0.1)
                return
            except queue.Full:
                continue

    def read() -> None:
        try:
            for piece in pieces:
                offer(piece)
                if left.is_set():
                    return
            offer(None)
        except BaseException as error:  # it is raised where the pieces are taken
            offer(error)

    thread = threading.Thread(target=read, name="topovq-rows", daemon=True)
    thread.start()
    try:
        while (item := waiting.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        left.set()
        thread.join()
