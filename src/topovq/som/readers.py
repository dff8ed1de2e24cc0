"""What rows are read from: Parquet files, Arrow datasets, arrays on disk, functions that give batches.

A reader says what it has (`dim` features, their `names` if any, their type, `n` rows where that is known) and gives
pieces (x [n, D], weight [n] or None) of any length. It checks names and types before it reads a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from topovq.missing import MissingExtra
from topovq.storage import DamagedFile, first_sentence

Piece = tuple[Tensor, Tensor | None]
# Arrow keeps all that it read of a file, up to its end, unless it is told to read as it goes; and it looks at the
# checksums of pages, where a file has them, if it is told to.
AS_IT_GOES = {"pre_buffer": False, "buffer_size": 1 << 16, "page_checksum_verification": True}


class Reader:
    """Rows of one source. `start` and `stop` choose some of them, where `ranges` says that can be done."""

    name: str
    dim: int
    dtype: torch.dtype
    names: list[str] | None = None
    n: int | None = None
    device: torch.device | None = None  # where the pieces are, if their maker said so
    ranges = False
    ahead = True  # whether the next piece may be read in a thread of its own

    def pieces(self, size: int, start: int, stop: int | None) -> Iterator[Piece]:
        """The rows in order, about `size` at a time."""
        raise NotImplementedError


class Parquet(Reader):
    """Parquet files, one after another, and all of a folder in the order of their names."""

    ranges = True

    def __init__(self, sources: Sequence[Path], columns: Sequence[str] | None, weight: str | None) -> None:
        self.name, self.arrow = str(sources[0]) + f" and {len(sources) - 1} more" * (len(sources) > 1), arrow()
        self.paths = [path for source in sources for path in _files(source)]
        self.counts = []
        schemas = {}
        for each in self.paths:
            with self._open(each) as file:
                self.counts.append(file.metadata.num_rows)
                schemas[each] = file.schema_arrow
        self.n = sum(self.counts)
        self.weight = weight
        self.names = choose(schemas[self.paths[0]].names, columns, weight, self.name)
        kinds = [_kind(schema, name, str(each)) for each, schema in schemas.items() for name in self.names]
        for each, schema in schemas.items():
            if weight is not None:
                _kind(schema, weight, str(each))
        self.dim, self.dtype = len(self.names), _common(kinds)

    def _open(self, path: Path) -> Any:
        try:
            return self.arrow.parquet.ParquetFile(path, **AS_IT_GOES)
        except (self.arrow.ArrowException, OSError) as error:
            raise DamagedFile(f"{path} is cut off, damaged or no Parquet file: {first_sentence(error)}") from None

    def pieces(self, size: int, start: int, stop: int | None) -> Iterator[Piece]:
        stop = sum(self.counts) if stop is None else stop
        first = 0  # row of the file that is looked at, and then of its row group
        for path, count in zip(self.paths, self.counts):
            if first < stop and first + count > start:
                with self._open(path) as file:
                    yield from self._of_file(file, path, size, max(0, start - first), min(count, stop - first))
            first += count

    def _of_file(self, file: Any, path: Path, size: int, start: int, stop: int) -> Iterator[Piece]:
        sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
        ends = np.cumsum(sizes)
        groups = [i for i, end in enumerate(ends) if end > start and end - sizes[i] < stop]
        if not groups:  # a file without rows, of which some versions of pyarrow cannot read nothing
            return
        at = int(ends[groups[0]] - sizes[groups[0]])
        wanted = [*self.names, *([self.weight] if self.weight is not None else [])]  # type: ignore[misc]
        try:
            for batch in file.iter_batches(size, row_groups=groups, columns=list(dict.fromkeys(wanted))):
                low, high = max(0, start - at), min(batch.num_rows, stop - at)
                at += batch.num_rows
                if low < high:
                    yield from_arrow(batch.slice(low, high - low), self.names, self.weight, self.dtype, str(path))
        except (self.arrow.ArrowException, OSError) as error:
            raise DamagedFile(f"{path} is damaged: {first_sentence(error)}") from None


class Dataset(Reader):
    """A pyarrow Dataset."""

    def __init__(self, dataset: Any, columns: Sequence[str] | None, weight: str | None) -> None:
        self.name, self.dataset, self.weight, self.arrow = "the dataset", dataset, weight, arrow()
        self.names = choose(dataset.schema.names, columns, weight, self.name)
        self.dim, self.dtype = len(self.names), _common([_kind(dataset.schema, name, self.name) for name in self.names])
        if weight is not None:
            _kind(dataset.schema, weight, self.name)
        self.n = self._tried(dataset.count_rows)
        self.how = {"batch_readahead": 1, "fragment_readahead": 1}
        usual = self.arrow.dataset.ParquetFragmentScanOptions()
        if getattr(getattr(dataset, "format", None), "default_fragment_scan_options", None) == usual:
            options = self.arrow.dataset.ParquetFragmentScanOptions(use_buffered_stream=True, **AS_IT_GOES)
            self.how["fragment_scan_options"] = options

    def _tried(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (self.arrow.ArrowException, OSError) as error:
            raise DamagedFile(f"{self.name} cannot be read: {first_sentence(error)}") from None

    def pieces(self, size: int, start: int, stop: int | None) -> Iterator[Piece]:
        wanted = [*self.names, *([self.weight] if self.weight is not None else [])]  # type: ignore[misc]
        batches = self.dataset.to_batches(columns=list(dict.fromkeys(wanted)), batch_size=size, **self.how)
        while (batch := self._tried(lambda: next(batches, None))) is not None:
            if batch.num_rows:
                yield from_arrow(batch, self.names, self.weight, self.dtype, self.name)


class Array(Reader):
    """An array, most likely on disk: rows become numbers when they are read."""

    ranges = True

    def __init__(self, x_ND: np.ndarray, columns: Sequence[Any] | None, weight: Any) -> None:
        self.x_ND, self.name, self.weight = x_ND, f"the array of shape {x_ND.shape}", weight
        if x_ND.ndim != 2 or 0 in x_ND.shape:
            raise ValueError(f"{self.name} is no table: expected [samples, features], not empty")
        if x_ND.dtype.kind not in "fiub":
            raise ValueError(f"{self.name} holds {x_ND.dtype}: expected real numbers")
        self.columns = numbered(x_ND.shape[1], columns, weight, self.name)
        self.dim, self.n = len(self.columns), len(x_ND)
        self.dtype = torch.float32 if x_ND.dtype == np.float32 else torch.float64

    def pieces(self, size: int, start: int, stop: int | None) -> Iterator[Piece]:
        for first in range(start, len(self.x_ND) if stop is None else stop, size):
            rows = np.asarray(self.x_ND[first : min(first + size, len(self.x_ND) if stop is None else stop)])
            yield from_array(rows, self.columns, self.weight, self.dtype)


class Batches(Reader):
    """A function that gives an iterator of batches: arrays, tensors, frames, record batches; or pairs (batch, weights).

    The first batch says which columns there are and of which type they are.
    """

    ahead = False  # it is somebody else's code

    def __init__(
        self, make: Callable[[], Iterable[Any]], columns: Sequence[Any] | None, weight: Any, names: Any
    ) -> None:
        self.make, self.weight = make, weight
        self.name = f"what {getattr(make, '__name__', type(make).__name__)} gives"
        first = next(iter(self._made()), None)
        if first is None:
            raise ValueError(f"{self.name} has no rows: expected at least one batch")
        batch = first[0] if isinstance(first, tuple) else first
        refuse_lazy(batch)
        if (schema := getattr(batch, "schema", None)) is not None and hasattr(batch, "num_rows"):
            self.names = choose(schema.names, names if columns is None else columns, weight, self.name)
            kinds = [_kind(schema, name, self.name) for name in self.names]
        elif hasattr(batch, "columns"):
            there = [str(name) for name in batch.columns]
            self.names = choose(there, names if columns is None else columns, weight, self.name)
            kinds = [_frame_kind(batch[name], self.name) for name in self.names]
        else:
            table = batch if isinstance(batch, Tensor) else np.asarray(batch)
            if table.ndim != 2:
                raise ValueError(f"a batch of {self.name} has shape {tuple(table.shape)}: expected [samples, features]")
            self.columns = numbered(table.shape[1], columns, weight, self.name)
            kinds = ["float32" if str(table.dtype).endswith("float32") else "float64"]
            self.width = table.shape[1]
            self.device = batch.device if isinstance(batch, Tensor) else None
        self.dim = len(self.names if self.names is not None else self.columns)
        self.dtype = _common(kinds)

    def _made(self) -> Iterator[Any]:
        made = self.make()
        if not isinstance(made, Iterable):
            raise TypeError(f"{self.name} is {made!r}: expected an iterator of batches")
        return iter(made)

    def pieces(self, size: int, start: int, stop: int | None) -> Iterator[Piece]:
        for given in self._made():
            batch, weight = given if isinstance(given, tuple) else (given, None)
            x_ND, weight_N = self._of_batch(batch)
            if weight is not None:
                if weight_N is not None:
                    raise ValueError(
                        f"weights were given twice, in a pair of {self.name} and as weight={self.weight!r}: "
                        "give one of them"
                    )
                weight_N = torch.as_tensor(np.asarray(weight) if not isinstance(weight, Tensor) else weight)
                if weight_N.shape != x_ND.shape[:1]:
                    raise ValueError(
                        f"a batch of {self.name} has {len(x_ND)} rows and weights of shape {tuple(weight_N.shape)}: "
                        "expected one for each row"
                    )
            yield x_ND, weight_N

    def _of_batch(self, batch: Any) -> Piece:
        if self.names is None:
            table = batch if isinstance(batch, Tensor) else np.asarray(batch)
            if table.ndim != 2 or table.shape[1] != self.width:
                raise ValueError(
                    f"a batch of {self.name} has shape {tuple(table.shape)}: expected {self.width} columns, as before"
                )
            return from_array(table, self.columns, self.weight, self.dtype)
        if hasattr(batch, "num_rows"):
            return from_arrow(batch, self.names, self.weight, self.dtype, self.name)
        choose([str(name) for name in batch.columns], self.names, self.weight, self.name)
        kind = np.float32 if self.dtype == torch.float32 else np.float64
        columns = [np.asarray(batch[name], dtype=kind) for name in self.names]
        weight_N = None if self.weight is None else torch.from_numpy(np.array(batch[self.weight], dtype=np.float64))
        return torch.from_numpy(np.stack(columns)).T, weight_N


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise FileNotFoundError(f"there is no table at {str(path)!r}")
    found = [path] if path.is_file() else sorted(each for each in path.rglob("*.parquet") if each.is_file())
    if not found:
        raise FileNotFoundError(f"there is no .parquet file in {str(path)!r}")
    return found


# Columns


def choose(there: Sequence[str], columns: Sequence[str] | None, weight: str | None, where: str) -> list[str]:
    """The names of the columns to use, in order; all but the weight's where none are given."""
    wanted = [name for name in there if name != weight] if columns is None else list(columns)
    if isinstance(columns, str):
        raise TypeError(f"columns={columns!r} must be a list of names, such as [{columns!r}]")
    for name in [*wanted, *([weight] if weight is not None else [])]:
        if there.count(name) != 1:
            close = get_close_matches(str(name), there, 1)
            hint = f" (did you mean {close[0]!r}?)" if close and name not in there else ""
            some = ", ".join(map(repr, there[:20])) + (", ..." if len(there) > 20 else "")
            problem = "has two columns" if name in there else "has no column"
            raise ValueError(f"{where} {problem} {name!r}{hint}; its columns are {some}")
    if not wanted:
        raise ValueError(f"{where} has no columns to make a map of: expected at least one")
    return once(wanted)


def once(columns: Sequence[Any]) -> list[Any]:
    """The columns, each of which was named once."""
    twice = [name for i, name in enumerate(columns) if name in columns[:i]]
    if twice:
        raise ValueError(f"column {twice[0]!r} was named twice: a map takes each column once")
    return list(columns)


def refuse_lazy(X: Any) -> None:
    """Refuse a frame of polars that is a plan, and has no rows yet."""
    if type(X).__name__ == "LazyFrame" and type(X).__module__.startswith("polars"):
        raise TypeError(
            "a LazyFrame of polars has no rows yet: give its .collect(), or the path of its Parquet file, which is "
            "read in blocks"
        )


def numbered(count: int, columns: Sequence[int] | None, weight: int | None, where: str) -> list[int]:
    """The numbers of the columns to use of an array."""
    for name in [*(columns or ()), *([weight] if weight is not None else [])]:
        if not isinstance(name, (int, np.integer)) or not 0 <= name < count:
            raise ValueError(f"{where} has no column {name!r}: expected numbers from 0 to {count - 1}")
    return [i for i in range(count) if i != weight] if columns is None else once(columns)


def _kind(schema: Any, name: str, where: str) -> str:
    pyarrow = arrow()
    if name not in schema.names:
        raise ValueError(f"{where} has no column {name!r}, as the first file has")
    kind = schema.field(name).type
    numeric = pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind) or pyarrow.types.is_decimal(kind)
    if not numeric and not pyarrow.types.is_boolean(kind):
        raise ValueError(f"column {name!r} of {where} holds {kind}, not numbers: choose others (--columns, columns=)")
    return str(kind)


def _frame_kind(column: Any, where: str) -> str:
    try:
        return "float32" if str(column.dtype).lower() == "float32" else str(np.asarray(column, dtype=np.float64).dtype)
    except (TypeError, ValueError):
        raise ValueError(
            f"column {column.name!r} of {where} holds {column.dtype}, not numbers: choose others (--columns, columns=)"
        ) from None


def _common(kinds: Sequence[str]) -> torch.dtype:
    """float32 where all are; else float64, as scikit-learn does with arrays."""
    return torch.float32 if {*kinds} <= {"float32", "float"} else torch.float64


# Numbers


def from_arrow(batch: Any, names: Any, weight: str | None, dtype: torch.dtype, where: str) -> Piece:
    """A record batch as numbers, NaN where one is null. Columns stay together: a device turns them faster."""
    pyarrow = arrow()
    kind = pyarrow.float32() if dtype == torch.float32 else pyarrow.float64()
    x_DN = np.empty((len(names), batch.num_rows), np.float32 if dtype == torch.float32 else np.float64)
    for row_N, name in zip(x_DN, names):
        row_N[:] = _numbers(batch.column(name), kind)
    if weight is None:
        return torch.from_numpy(x_DN).T, None
    return torch.from_numpy(x_DN).T, torch.from_numpy(_numbers(batch.column(weight), pyarrow.float64()).copy())


def _numbers(column: Any, kind: Any) -> np.ndarray:
    cast = column if column.type == kind else column.cast(kind, safe=False)
    # A chunked column, of a table, has no such choice.
    return cast.to_numpy() if hasattr(cast, "chunks") else cast.to_numpy(zero_copy_only=False)


def from_array(rows: Any, columns: Sequence[int], weight: int | None, dtype: torch.dtype) -> Piece:
    x = rows if isinstance(rows, Tensor) else torch.from_numpy(rows.astype(rows.dtype.newbyteorder("="), copy=True))
    weight_N = None if weight is None else x[:, weight].double()
    whole = list(columns) == list(range(x.shape[1]))
    return (x if whole else x[:, list(columns)]).detach().to(dtype), weight_N


def arrow() -> Any:
    """pyarrow with its Parquet files."""
    try:
        import pyarrow
        import pyarrow.dataset
        import pyarrow.parquet
    except ImportError:
        raise MissingExtra("pyarrow, which Parquet files and Arrow need,", "som") from None
    return pyarrow
