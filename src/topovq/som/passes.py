"""Passes: a table in blocks of rows, gone over as often as asked. What is asked of the blocks is added up.

An array in memory and a table that is read are cut at the same rows, so that a fit gives the same codes for both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from topovq.som.questions import Moments, Question, Spread
from topovq.som.stats import Stats
from topovq.som.tables import DenseTable, MissingTable, SparseTable, Table

ROWS = 2**16  # of a block at most; fewer where rows are long
NUMBERS = 2**22  # in a block: 16 MiB of float32
CUDA_ROWS, CUDA_NUMBERS = 2**20, 2**26  # on a GPU, where a block takes a few launches
DISTINCT = 2**20  # rows up to which different ones are counted; beyond they are estimated, to 0.1%
CONSTANT = 1e-12  # of the mean: a smaller deviation is rounding
# Squares of larger numbers overflow, or would when 2^22 of them are added up.
LARGEST = {dtype: torch.finfo(dtype).max ** 0.5 / 2**11 for dtype in (torch.float32, torch.float64)}

Block = tuple[Table, Tensor]


def rows_of_block(dim: int, device: torch.device) -> int:
    """How many rows a block has."""
    most, numbers = (CUDA_ROWS, CUDA_NUMBERS) if device.type == "cuda" else (ROWS, NUMBERS)
    return max(1, min(most, numbers // dim))


class Scaling:
    """x becomes (x - mean) / scale, feature by feature; one that does not vary is moved alone."""

    def __init__(self, mean_D: Tensor, deviation_D: Tensor) -> None:
        self.mean_D = mean_D
        self.scale_D = torch.where(deviation_D > CONSTANT * mean_D.abs(), deviation_D, 1)

    def __call__(self, x_ND: Tensor) -> Tensor:
        return ((x_ND - self.mean_D.to(x_ND.device)) / self.scale_D.to(x_ND.device)).to(x_ND.dtype)


class Passes:
    """Blocks (table, weight [n]) of D features, of one type and on one device."""

    dim: int
    dtype: torch.dtype
    device: torch.device
    in_memory = False  # whether all of it can be asked for at once
    keeps_labels = False  # whether there is room for a label of each row
    n: int | None = None  # how many rows there are, once that is known

    def advance(self, rows: int) -> None:
        """Called after each block; a progress bar puts its own here."""

    def __iter__(self) -> Iterator[Block]:
        raise NotImplementedError

    def told(self, question: Question) -> Iterator[Any]:
        """What `question` gives for each block, in their order: one pass."""
        for table, weight_N in self:
            yield question(table, weight_N)
            self.advance(table.n)

    def added(self, question: Question) -> Stats:
        """What `question` gives for all rows: one pass."""
        total: Stats | None = None
        for told in self.told(question):
            total = told if total is None else total + told
        if total is None:
            raise ValueError("there are no rows: expected at least one")
        return total

    @cached_property
    def moments(self) -> Stats:
        return self.added(Moments())

    @property
    def mean_D(self) -> Tensor:
        """Of each feature, in float64."""
        return self.moments["sums"] / self.moments["seen"]

    def deviation(self) -> Tensor:
        """The standard deviation [D] of each feature, in float64: one more pass."""
        return (self.added(Spread(self.mean_D))["squares"] / self.moments["seen"]).sqrt()

    def standardize(self, scaling: Scaling) -> None:
        """From now on give rows that are scaled; what was asked before is made to fit."""
        seen = self.moments["seen"]
        self.moments = Stats(**{**self.moments, "sums": torch.zeros_like(seen)})
        self._scale(scaling)

    def _scale(self, scaling: Scaling) -> None:
        raise NotImplementedError

    def distinct(self) -> int:
        """How many rows with a weight differ; exact up to DISTINCT.

        It is what the default number of codes, 5 sqrt(N), goes by. Repeating a row, weighting it, or scaling all
        weights adds nothing to see, and changes nothing here. The smallest of the rows' hashes are kept, and beyond
        DISTINCT of them the largest of these says how close together all must lie.
        """
        mix_D = np.random.RandomState(0).randint(1, 2**62, self.dim, dtype=np.int64).astype(np.uint64) | np.uint64(1)
        lowest = np.empty(0, dtype=np.uint64)
        for table, weight_N in self:
            kept = weight_N.cpu().numpy() > 0
            for rows in table.slices():
                x = table.dense(rows)[kept[rows]].astype(np.float64) + 0.0  # -0 becomes 0
                hashes = (np.ascontiguousarray(x).view(np.uint64) * mix_D).sum(1)
                lowest = np.unique(np.concatenate([lowest, _scrambled(hashes)]))[:DISTINCT]
            self.advance(table.n)
        if len(lowest) < DISTINCT:
            return len(lowest)
        return round((DISTINCT - 1) / (float(lowest[-1]) / 2.0**64))

    def sample(self, count: int, random: np.random.RandomState) -> np.ndarray:
        """`count` different rows, drawn by their weights: NaN where a value is missing. One pass."""
        keys, rows = np.empty(0), np.empty((0, self.dim))
        for table, weight_N in self:
            weight = weight_N.double().cpu().numpy()
            with np.errstate(divide="ignore"):
                key = random.standard_exponential(table.n) / weight  # the lowest are a sample without replacement
            chosen = np.flatnonzero(np.isfinite(key))
            chosen = chosen[key[chosen].argsort()[:count]]
            keys, rows = np.concatenate([keys, key[chosen]]), np.concatenate([rows, table.dense(chosen)])
            kept = keys.argsort(kind="stable")[:count]
            keys, rows = keys[kept], rows[kept]
            self.advance(table.n)
        if len(rows) < count:
            raise ValueError(
                f"init='sample' takes {count} different samples, but n_samples={len(rows)} with a weight above 0: "
                "use fewer codes, or init='pca'"
            )
        return rows


class TablePasses(Passes):
    """Tables in memory, each a block."""

    in_memory = True
    keeps_labels = True

    def __init__(self, tables: Sequence[Table], weights: Sequence[Tensor]) -> None:
        self.tables, self.weights = tables, weights
        self.n = sum(table.n for table in tables)
        self.dim, self.dtype, self.device = tables[0].dim, tables[0].dtype, tables[0].device

    def __iter__(self) -> Iterator[Block]:
        return zip(self.tables, self.weights)

    def _scale(self, scaling: Scaling) -> None:
        if any(isinstance(table, SparseTable) for table in self.tables):
            raise ValueError("standardize=True would fill a sparse matrix: scale its columns before, or make it dense")
        self.tables = [table_of(scaling(table.x_ND)) for table in self.tables]  # type: ignore[attr-defined]

    @classmethod
    def cut(cls, x_ND: Tensor, weight_N: Tensor) -> TablePasses:
        """A tensor, cut into blocks."""
        size = rows_of_block(x_ND.shape[1], x_ND.device)
        tables = [table_of(x, size * number) for number, x in enumerate(x_ND.split(size))]
        return cls(tables, weight_N.split(size))


def table_of(x_ND: Tensor, first_row: int = 0) -> DenseTable | MissingTable:
    """A tensor as a table; numbers that are too large and rows without values are refused."""
    if check_size(x_ND):
        return DenseTable(x_ND)
    table = MissingTable(x_ND)
    empty_N = ~table.seen_ND.any(1)
    if bool(empty_N.any()):
        row = first_row + int(empty_N.nonzero()[0])
        raise ValueError(f"sample {row} has no values, only NaN: remove such samples ({int(empty_N.sum())} of them)")
    return table


def check_size(values: Tensor) -> bool:
    """Refuse numbers too large to be squared and added up; whether none is NaN (infinity was refused before)."""
    if values.numel() == 0:
        return True
    lowest, highest = values.aminmax()  # one pass; NaN anywhere is both
    complete = not bool(highest.isnan())
    if not complete:
        lowest, highest = values.nan_to_num().aminmax()
    largest, limit = float(torch.maximum(-lowest, highest)), LARGEST[values.dtype]
    if largest > limit:
        fits = values.dtype == torch.float32 and largest <= LARGEST[torch.float64]
        raise ValueError(
            f"the data holds {largest:.3g}, but at most {limit:.2g} can be squared and added up in {values.dtype}: "
            f"divide the data by a constant{', or give it as float64' if fits else ''}"
        )
    return complete


def check_columns(passes: Passes, names: Sequence[str] | None = None) -> None:
    """Refuse rows without any weight, and features without a single value: no code could have one there."""
    check_weight(passes.moments)
    empty_D = passes.moments["seen"] == 0
    if bool(empty_D.any()):
        columns = empty_D.nonzero()[:, 0].tolist()
        told = columns if names is None else [str(names[column]) for column in columns]
        raise ValueError(f"features {told} have no values, only NaN: remove these columns")


def check_weight(stats: Stats) -> None:
    """Refuse sums over rows that all weigh nothing, in the words that scikit-learn has for arrays."""
    if float(stats["weight"]) == 0:
        raise ValueError("Sample weights must contain at least one non-zero number.")


def all_rows(passes: Passes) -> Table:
    """The one table of passes in memory, for what must see all rows at once."""
    assert isinstance(passes, TablePasses)
    if len(passes.tables) == 1:
        return passes.tables[0]
    assert not any(isinstance(table, SparseTable) for table in passes.tables)
    return table_of(torch.cat([table.x_ND for table in passes.tables]))  # type: ignore[attr-defined]


def _scrambled(hash_N: np.ndarray) -> np.ndarray:
    """64 bits made of 64 bits, all alike: by the finalizer of splitmix64."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        hash_N = (hash_N ^ (hash_N >> np.uint64(shift))) * np.uint64(factor)
    return hash_N ^ (hash_N >> np.uint64(31))
