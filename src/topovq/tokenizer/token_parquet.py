"""Token files as Parquet: checksums of its pages, and a digest of the whole; see tokenfile.py."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from topovq.missing import MissingExtra
from topovq.storage import DamagedFile
from topovq.tokenizer.thrift import parse
from topovq.tokenizer.token_npz import CHUNK, Batch, column_names, rows_at_once

ROWS = 4096  # of a row group, and of what is held in memory
SEAL = b"topovq sha256 "
# Fields of a footer, by their numbers in the format's definition (parquet.thrift).
ROW_GROUPS, COLUMNS, GROUP_ROWS, METADATA, NAME, VALUES = 4, 1, 3, 3, 3, 5


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.parquet
    except ImportError:
        raise MissingExtra("pyarrow, which Parquet files need,", "train") from None
    return pyarrow


class ParquetWriter:
    def __init__(
        self, path: Path, columns: list[str], shapes: list[tuple[int, ...]], dtype: np.dtype[Any], model: str | None
    ) -> None:
        self.arrow, self.columns, self.dtype = _pyarrow(), columns, dtype
        kind = self.arrow.list_(self.arrow.from_numpy_dtype(dtype))
        self.schema = self.arrow.schema(
            [("image", self.arrow.string()), *((column, kind) for column in columns)],
            metadata={"topovq": json.dumps({"shapes": dict(zip(columns, shapes)), "model": model})},
        )
        self.sink = _Sealed(path)
        self.writer = self.arrow.parquet.ParquetWriter(self.sink, self.schema, write_page_checksum=True)
        self.waiting: list[Any] = []

    def write(self, names: Sequence[str], levels: Sequence[Tensor]) -> None:
        rows = [self._lists(level) for level in levels]
        self.waiting.append(self.arrow.record_batch([self.arrow.array(names), *rows], schema=self.schema))
        if sum(batch.num_rows for batch in self.waiting) >= ROWS:
            self._flush()

    def _lists(self, level: Tensor) -> Any:
        flat = level.reshape(len(level), -1)
        offsets = np.arange(len(flat) + 1, dtype=np.int32) * flat.shape[1]
        values = self.arrow.array(flat.reshape(-1).cpu().numpy().astype(self.dtype))
        return self.arrow.ListArray.from_arrays(offsets, values)

    def _flush(self) -> None:
        if self.waiting:
            self.writer.write_table(self.arrow.Table.from_batches(self.waiting))
            self.waiting = []

    def close(self, finish: bool) -> None:
        if finish:
            self._flush()
        with self.sink:
            self.sink.holds = True
            self.writer.close()
            self.sink.seal()


class _Sealed:
    """A Parquet file that gets a digest of all its bytes before its footer, where readers of Parquet pass over it.

    Checksums of pages cover neither their headers nor the footer.
    """

    closed = False

    def __init__(self, path: Path) -> None:
        self.file = open(path, "wb")  # noqa: SIM115 (closed as a context)
        self.digest, self.holds, self.held, self.written = hashlib.sha256(), False, b"", 0

    def write(self, data: bytes) -> int:
        if self.holds:
            self.held += bytes(data)
        else:
            self.file.write(data)
            self.digest.update(data)
            self.written += len(data)
        return len(data)

    def seal(self) -> None:
        """Write what was held back, which ends with the footer, its length and the mark of a Parquet file."""
        self.digest.update(self.held)
        footer = len(self.held) - 8 - int.from_bytes(self.held[-8:-4], "little")
        self.file.write(self.held[:footer] + SEAL + self.digest.digest() + self.held[footer:])

    def tell(self) -> int:
        return self.written + len(self.held)

    def flush(self) -> None:
        self.file.flush()

    def close(self) -> None:
        """Of the writer: there is still the footer to write."""

    def __enter__(self) -> _Sealed:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


def _check_seal(path: Path) -> None:
    """Compare a Parquet file with its digest; one without has its pages checked at best."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 8))
        footer = size - 8 - int.from_bytes(file.read(4), "little")
        start = footer - len(SEAL) - 32
        if start < 0:
            return
        file.seek(start)
        seal = file.read(len(SEAL) + 32)
        if not seal.startswith(SEAL):
            return
        digest = hashlib.sha256()
        for first, last in ((0, start), (footer, size)):
            file.seek(first)
            while first < last and (data := file.read(min(CHUNK, last - first))):
                digest.update(data)
                first += len(data)
        if digest.digest() != seal[len(SEAL) :]:
            raise DamagedFile("is damaged: it is not what its digest says")


def parquet_model(path: Path) -> str | None:
    """The id of the model that the file names."""
    told = json.loads((_pyarrow().parquet.read_schema(path).metadata or {}).get(b"topovq", b"{}"))
    named = told.get("model") if isinstance(told, dict) else None
    return named if isinstance(named, str) else None


def read_parquet(path: Path, batch_size: int) -> Iterator[Batch]:
    arrow = _pyarrow()
    _check_seal(path)
    # Names as a dictionary: a long one that repeats would otherwise take its length times the rows.
    schema = arrow.parquet.read_schema(path)
    named = ["image"] * ("image" in schema.names)
    # Arrow keeps all that it read of a file, up to its end, unless it is told to read as it goes.
    as_it_goes = {"pre_buffer": False, "buffer_size": 1 << 16}
    with arrow.parquet.ParquetFile(path, page_checksum_verification=True, read_dictionary=named, **as_it_goes) as file:
        shapes = _told_shapes(file.schema_arrow.metadata or {})
        _check_types(arrow, file.schema_arrow, shapes)
        _check_numbers(path, shapes)
        rows = 0
        for batch in file.iter_batches(rows_at_once(list(shapes.values()), batch_size), columns=["image", *shapes]):
            names = batch.column("image")
            if names.null_count:
                raise DamagedFile("has an image without a name")
            levels = []
            for column, shape in shapes.items():
                lists = batch.column(column)
                values = lists.flatten()
                lengths = arrow.compute.list_value_length(lists).to_numpy(zero_copy_only=False)
                if lists.null_count or values.null_count or (lengths != math.prod(shape)).any():
                    raise DamagedFile(f"has images whose {column} are not the {math.prod(shape)} that its shape says")
                whole = values.to_numpy(zero_copy_only=False).astype(np.int64)
                levels.append(torch.from_numpy(whole).view(-1, *shape))
            rows += len(names)
            yield names.to_pylist(), tuple(levels)
        if rows != file.metadata.num_rows:
            raise DamagedFile(f"is damaged: it has {rows:,} images, and says {file.metadata.num_rows:,}")


def _told_shapes(metadata: dict[bytes, bytes]) -> dict[str, tuple[int, ...]]:
    """The columns of tokens and their shapes."""
    if b"topovq" not in metadata:
        raise DamagedFile("is not a token file of topovq: its metadata names no shapes")
    told = json.loads(metadata[b"topovq"])
    shapes = told.get("shapes") if isinstance(told, dict) else None
    if (
        not isinstance(shapes, dict)
        or list(shapes) != column_names(len(shapes))
        or not all(map(_is_shape, shapes.values()))
    ):
        raise DamagedFile(f"is not a token file of topovq: its metadata names the shapes {str(shapes)[:80]}")
    return {name: tuple(shape) for name, shape in shapes.items()}


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and 0 < len(value) < 8 and all(type(n) is int and 0 < n < 1 << 31 for n in value)


def _check_types(arrow: Any, schema: Any, shapes: dict[str, tuple[int, ...]]) -> None:
    """Refuse columns of other types."""
    types, found = arrow.types, schema.names
    if sorted(found) != sorted(["image", *shapes]):
        raise DamagedFile(f"has the columns {', '.join(found)}; expected {', '.join(['image', *shapes])}")
    if not types.is_dictionary(schema.field("image").type):  # text, that is: nothing else is read as a dictionary
        raise DamagedFile(f"has images of type {schema.field('image').type}; expected names")
    for column in shapes:
        kind = schema.field(column).type
        lists = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
        if not lists or not types.is_integer(kind.value_type):
            raise DamagedFile(f"has {column} of type {kind}; expected lists of whole numbers")


def _check_numbers(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Refuse row groups with more or fewer tokens than the shapes ask for: a run of one token takes a few bytes here,
    and as many as it likes in memory."""
    with open(path, "rb") as file:
        size = file.seek(-8, os.SEEK_END)
        length = int.from_bytes(file.read(4), "little")
        file.seek(size - length)
        footer = parse(file.read(length))
    for group in footer[ROW_GROUPS]:
        for column in group[COLUMNS]:
            name, values = column[METADATA][NAME][0].decode(), column[METADATA][VALUES]
            expected = group[GROUP_ROWS] * math.prod(shapes.get(name, ()))
            if values != expected:
                raise DamagedFile(f"has {values:,} values of {name}; its shape says {expected:,}")
