"""Images in Parquet files: a column of encoded bytes, and one of names if there is one.

The column is called as in the data sets that are about: `image` (bytes, or the struct of bytes and path that the
library `datasets` writes), `bytes`, `jpg`, `png`, and so on. A row group is read at once and kept until another is
asked for.
"""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Callable, Iterable
from typing import Any, BinaryIO

import numpy as np

from topovq.missing import MissingExtra
from topovq.storage import first_sentence
from topovq.tokenizer.data.decode import EXTENSIONS
from topovq.tokenizer.data.files import DataError, PathLike
from topovq.tokenizer.data.folder import holds_images
from topovq.tokenizer.data.shards import LARGEST, expand

COLUMNS = ("image", "bytes", "img", "image_bytes", *sorted(EXTENSIONS))
NAMES = ("name", "__key__", "key", "path", "file_name", "filename", "id")
MOST_BYTES = 1 << 32  # of the images of a row group, which are in memory together


class ParquetRecords:
    """Images that are rows of Parquet files."""

    def __init__(self, paths: list[str], names: list[list[bytes]], groups: list[list[int]], columns: list[str]) -> None:
        """Of each file: the names of its rows, the numbers of rows of its row groups, and the column of the images."""
        self.paths, self.columns = paths, columns
        self.damage: list[str] = []
        self.shard_N = np.repeat(np.arange(len(paths)), [len(each) for each in names])
        self.names_N = np.array([name for each in names for name in each], dtype=np.bytes_)
        self.file_G = np.repeat(np.arange(len(paths)), [len(each) for each in groups])
        self.group_G = np.concatenate([np.arange(len(each)) for each in groups])
        self.start_G = np.cumsum([0, *(rows for each in groups for rows in each)])[:-1]
        self.first = 0  # of these, among all images of the files
        self._held: tuple[int, Any] = (-1, None)

    def __len__(self) -> int:
        return len(self.names_N)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_held": (-1, None)}

    def take(self, numbers: range) -> ParquetRecords:
        """Those of `numbers` alone."""
        taken, rows = copy.copy(self), slice(numbers.start, numbers.stop)
        taken.names_N, taken.shard_N = self.names_N[rows], self.shard_N[rows]
        taken.first, taken._held = self.first + numbers.start, (-1, None)
        return taken

    def name(self, index: int) -> str:
        return f"{self.paths[self.shard_N[index]]}: {os.fsdecode(self.names_N[index])}"

    def open(self, index: int) -> BinaryIO:
        number = index + self.first
        group = int(np.searchsorted(self.start_G, number, side="right")) - 1
        if self._held[0] != group:
            self._held = (-1, None)  # the old one goes before the new one comes
            self._held = (group, self._read(group))
        data = self._held[1][number - int(self.start_G[group])].as_buffer()
        if data is None:
            raise ValueError("the row has no image")
        if data.size > LARGEST:
            raise ValueError(f"{data.size:,} bytes are more than the limit of {LARGEST:,}")
        return io.BytesIO(data)

    def _read(self, group: int) -> Any:
        import pyarrow.parquet as parquet

        shard = int(self.file_G[group])
        with parquet.ParquetFile(self.paths[shard]) as file:
            images = file.read_row_group(int(self.group_G[group]), columns=[self.columns[shard]])
        column = images.column(0).combine_chunks()
        return column.field("bytes") if hasattr(column, "field") else column


def are_tables(path: PathLike) -> bool:
    """Whether `path` is of Parquet files, or a folder that holds some and no image: tokens may lie beside theirs."""
    where = os.fspath(path)
    if not os.path.isdir(where):
        return where.endswith(".parquet")
    return any(name.endswith(".parquet") for name in os.listdir(where)) and not holds_images(where)


def find_rows(path: PathLike, each: Callable[..., Iterable[Any]] = map) -> ParquetRecords:
    """The images in the Parquet files at `path` (a folder, a file, a glob or a brace pattern), in their order."""
    paths = expand(os.fspath(path), "parquet")
    names, groups, columns = zip(*each(_look, paths))
    records = ParquetRecords(paths, list(names), list(groups), list(columns))
    if not len(records):
        raise DataError(f"{os.fspath(path)!r} ({len(paths)} Parquet files) holds no image: there are no rows")
    return records


def _look(path: str) -> tuple[list[bytes], list[int], str]:
    """The names of a file's images, the rows of its row groups, and the column that the images are in."""
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise MissingExtra("pyarrow, which Parquet files need,", "train") from None
    try:
        with parquet.ParquetFile(path) as file:
            schema, rows = file.schema_arrow, file.metadata.num_rows
            column = _image_column(schema, path)
            groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
            named = _name_column(schema, column)
            stem = os.path.splitext(os.path.basename(path))[0]
            told = [None] * rows if named is None else _strings(file.read(columns=[named]).column(0), named)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is damaged or no Parquet file: {first_sentence(error)}") from None
    for group in groups:
        if group.total_byte_size > MOST_BYTES:
            raise DataError(
                f"{path} has a row group of {group.total_byte_size:,} bytes; at most {MOST_BYTES:,} are read at once: "
                "write it with fewer rows in a group (row_group_size=1000)"
            )
    names = [f"{stem}/{row:08d}" if name is None else name for row, name in enumerate(told)]
    return [name.encode(errors="surrogateescape") for name in names], [group.num_rows for group in groups], column


def _image_column(schema: Any, path: str) -> str:
    import pyarrow.types as types

    for column in COLUMNS:
        if column in schema.names:
            kind = schema.field(column).type
            if types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
                kind = kind.field("bytes").type
            if types.is_binary(kind) or types.is_large_binary(kind):
                return column
    raise DataError(
        f"{path} has no column of images among {', '.join(schema.names) or 'none'}; one of bytes called "
        f"{', '.join(COLUMNS[:4])} or as a format ({COLUMNS[-2]}) was looked for"
    )


def _name_column(schema: Any, column: str) -> str | None:
    """The path to the column of names, which may be inside of that of the images."""
    import pyarrow.types as types

    kind = schema.field(column).type
    if types.is_struct(kind) and kind.get_field_index("path") >= 0:
        return f"{column}.path"
    texts = (name for name in NAMES if name in schema.names)
    return next((name for name in texts if types.is_string(schema.field(name).type)), None)


def _strings(column: Any, named: str) -> list[str | None]:
    values = column.to_pylist()
    return [value["path"] for value in values] if named.endswith(".path") else values
