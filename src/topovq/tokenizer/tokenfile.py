"""Token files: Parquet or npz, written and read a batch at a time.

Parquet has one row an image: `image` (its name) and `tokens` (the codes' numbers, row by row), or `tokens_0` (the
coarsest level), `tokens_1`, ... of a model with levels; the schema's metadata `topovq` holds the shapes. An npz holds
the same columns as arrays: `image` [N] and `tokens` [N, h, w].
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from topovq.missing import MissingExtra
from topovq.storage import atomic_file

ROWS = 4096  # of a Parquet row group, and of what is held in memory
CHUNK = 1 << 20  # bytes

Batch = tuple[list[str], tuple[Tensor, ...]]


class TokenWriter(Protocol):
    def write(self, names: Sequence[str], levels: Sequence[Tensor]) -> None:
        """Add images: their names, and for each level their tokens int64 [B, h, w]."""


@contextlib.contextmanager
def open_writer(path: Path, shapes: Sequence[tuple[int, ...]], codebook_size: int) -> Iterator[TokenWriter]:
    """`with open_writer(path, shapes, codebook_size) as writer:` the file is there, whole, when the block ends well."""
    check_suffix(path)
    columns = column_names(len(shapes))
    dtype = np.dtype(np.uint16 if codebook_size <= 1 << 16 else np.int32)
    make = _ParquetWriter if path.suffix == ".parquet" else _NpzWriter
    with atomic_file(path) as temporary:
        writer = make(temporary, columns, [tuple(shape) for shape in shapes], dtype)
        try:
            yield writer
        except BaseException:
            writer.close(finish=False)
            raise
        writer.close(finish=True)


def read_tokens(path: Path, batch_size: int) -> Iterator[Batch]:
    """The (names, levels of int64 [B, h, w]) of a token file, `batch_size` images at a time."""
    check_suffix(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no token file at {path}")
    return (_read_parquet if path.suffix == ".parquet" else _read_npz)(path, batch_size)


def check_suffix(path: Path) -> None:
    if path.suffix not in (".parquet", ".npz"):
        raise ValueError(f"{str(path)!r} must end in .parquet or .npz")


def column_names(levels: int) -> list[str]:
    return ["tokens"] if levels == 1 else [f"tokens_{level}" for level in range(levels)]


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MissingExtra("pyarrow, which Parquet files need,", "train") from None
    return pyarrow


class _ParquetWriter:
    def __init__(self, path: Path, columns: list[str], shapes: list[tuple[int, ...]], dtype: np.dtype[Any]) -> None:
        self.arrow, self.columns, self.dtype = _pyarrow(), columns, dtype
        kind = self.arrow.list_(self.arrow.from_numpy_dtype(dtype))
        self.schema = self.arrow.schema(
            [("image", self.arrow.string()), *((column, kind) for column in columns)],
            metadata={"topovq": json.dumps({"shapes": dict(zip(columns, shapes))})},
        )
        self.writer = self.arrow.parquet.ParquetWriter(path, self.schema)
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
        self.writer.close()


def _read_parquet(path: Path, batch_size: int) -> Iterator[Batch]:
    arrow = _pyarrow()
    try:
        opened = arrow.parquet.ParquetFile(path)
    except arrow.ArrowInvalid as error:
        raise ValueError(f"{path} is damaged or no Parquet file: {error}") from None
    with opened as file:
        metadata = file.schema_arrow.metadata or {}
        if b"topovq" not in metadata:
            raise ValueError(f"{path} is not a token file of topovq: its metadata names no shapes")
        shapes = json.loads(metadata[b"topovq"])["shapes"]
        for batch in file.iter_batches(batch_size):
            levels = []
            for column, shape in shapes.items():
                values = batch.column(column).flatten().to_numpy(zero_copy_only=False)
                levels.append(torch.from_numpy(values.astype(np.int64)).view(-1, *shape))
            yield batch.column("image").to_pylist(), tuple(levels)


class _NpzWriter:
    """Spools to temporary files, since an array's header, which comes first, needs the number of images."""

    def __init__(self, path: Path, columns: list[str], shapes: list[tuple[int, ...]], dtype: np.dtype[Any]) -> None:
        self.path, self.columns, self.shapes, self.dtype = path, columns, shapes, dtype
        self.names, *self.spools = (
            tempfile.TemporaryFile(dir=path.parent)  # noqa: SIM115 (closed by `close`)
            for _ in ["image", *columns]
        )
        self.images = self.longest = 0

    def write(self, names: Sequence[str], levels: Sequence[Tensor]) -> None:
        for spool, level in zip(self.spools, levels, strict=True):
            spool.write(level.cpu().numpy().astype(self.dtype).tobytes())
        for name in names:
            self.names.write(json.dumps(name).encode() + b"\n")
            self.longest = max(self.longest, len(name))
        self.images += len(names)

    def close(self, finish: bool) -> None:
        if finish:
            self._write()
        for file in (self.names, *self.spools):
            file.close()

    def _write(self) -> None:
        with zipfile.ZipFile(self.path, "w", zipfile.ZIP_DEFLATED) as archive:
            kind = np.dtype(f"<U{max(self.longest, 1)}")
            self._add(archive, "image", kind, (), self._encoded_names(kind))
            for column, shape, spool in zip(self.columns, self.shapes, self.spools):
                spool.seek(0)
                self._add(archive, column, self.dtype, shape, iter(partial(spool.read, CHUNK), b""))

    def _encoded_names(self, kind: np.dtype[Any]) -> Iterator[bytes]:
        self.names.seek(0)
        for line in self.names:
            yield np.array(json.loads(line), dtype=kind).tobytes()

    def _add(
        self, archive: zipfile.ZipFile, name: str, dtype: np.dtype[Any], shape: tuple[int, ...], data: Iterator[bytes]
    ) -> None:
        with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
            header = {"descr": dtype.str, "fortran_order": False, "shape": (self.images, *shape)}
            np.lib.format.write_array_header_2_0(member, header)
            for chunk in data:
                member.write(chunk)


def _read_npz(path: Path, batch_size: int) -> Iterator[Batch]:
    try:
        opened = zipfile.ZipFile(path)
    except zipfile.BadZipFile as error:
        raise ValueError(f"{path} is damaged or no npz file: {error}") from None
    with opened as archive:
        members = set(archive.namelist())
        found = sum(name.startswith("tokens") for name in members)
        columns = column_names(found)
        if not found or not members >= {f"{name}.npy" for name in ["image", *columns]}:
            raise ValueError(f"{path} is not a token file: it holds {', '.join(sorted(members))}")
        arrays = [_Rows(archive.open(f"{name}.npy")) for name in ["image", *columns]]
        for first in range(0, arrays[0].length, batch_size):
            rows = min(batch_size, arrays[0].length - first)
            names, *levels = (array.read(rows) for array in arrays)
            yield names.tolist(), tuple(torch.from_numpy(level.astype(np.int64)) for level in levels)


class _Rows:
    """An array inside an archive, read some rows at a time."""

    def __init__(self, member: IO[bytes]) -> None:
        version = np.lib.format.read_magic(member)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, self.dtype = read(member)
        if fortran or self.dtype.hasobject:
            raise ValueError(f"{member.name} is stored in a way that cannot be read row by row")
        self.member, self.length, self.rest = member, shape[0], shape[1:]

    def read(self, rows: int) -> np.ndarray:
        size = rows * int(np.prod(self.rest, dtype=np.int64)) * self.dtype.itemsize
        return np.frombuffer(self.member.read(size), dtype=self.dtype).reshape(rows, *self.rest)


def shard_path(path: Path, rank: int, world_size: int) -> Path:
    """The file of one process: tokens.parquet, or tokens-00001-of-00004.parquet where there are several."""
    return path if world_size == 1 else path.with_name(f"{path.stem}-{rank:05d}-of-{world_size:05d}{path.suffix}")


def token_files(path: Path) -> list[Path]:
    """The files that `path` stands for: itself, or the shards that several processes wrote under its name."""
    if path.exists():
        return [path]
    found = sorted(path.parent.glob(f"{path.stem}-*-of-*{path.suffix}"))
    if not found:
        raise FileNotFoundError(f"there is no token file at {os.fspath(path)}")
    return found
