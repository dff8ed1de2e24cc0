"""Token files as npz, which numpy reads: each member has a checksum; see tokenfile.py."""

from __future__ import annotations

import json
import math
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from topovq.storage import DamagedFile

CHUNK = 1 << 20  # bytes
HELD = 1 << 28  # bytes of tokens that are read at a time, at most
LONGEST = 4096  # characters of a name: no system has longer paths

Batch = tuple[list[str], tuple[Tensor, ...]]


class NpzWriter:
    """Spools to temporary files, since an array's header, which comes first, needs the number of images."""

    def __init__(
        self, path: Path, columns: list[str], shapes: list[tuple[int, ...]], dtype: np.dtype[Any], model: str | None
    ) -> None:
        self.path, self.columns, self.shapes, self.dtype, self.model = path, columns, shapes, dtype, model
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
            archive.comment = json.dumps({"topovq": {"model": self.model}}).encode()
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


COMMENT = b'{"topovq"'  # how ours begins


def npz_model(path: Path) -> str | None:
    """The id of the model that the archive names."""
    with zipfile.ZipFile(path) as archive:
        if not archive.comment.startswith(COMMENT):  # somebody else's, or none
            return None
        named = json.loads(archive.comment)["topovq"]["model"]  # fails where the end of the file was cut off
    return named if isinstance(named, str) else None


def read_npz(path: Path, batch_size: int) -> Iterator[Batch]:
    with zipfile.ZipFile(path) as archive:
        members = archive.namelist()
        columns = column_names(sum(name.startswith("tokens") for name in members))
        names = ["image", *columns]
        if len(columns) == 0 or len(set(members)) < len(members) or not {*members} >= {f"{name}.npy" for name in names}:
            raise DamagedFile(f"is not a token file: it holds {', '.join(sorted(members))}")
        arrays = [_Rows(archive, name, "U" if name == "image" else "ui") for name in names]
        if len({array.length for array in arrays}) > 1:
            counts = ", ".join(f"{array.length:,} of {name}" for name, array in zip(names, arrays))
            raise DamagedFile(f"has rows of different numbers: {counts}")
        step = rows_at_once([array.rest for array in arrays[1:]], batch_size)
        for array in arrays:
            array.verify()
        for first in range(0, arrays[0].length, step):
            rows = min(step, arrays[0].length - first)
            images, *levels = (array.read(rows) for array in arrays)
            yield images.tolist(), tuple(torch.from_numpy(level.astype(np.int64)) for level in levels)


class _Rows:
    """An array inside an archive, read some rows at a time."""

    def __init__(self, archive: zipfile.ZipFile, name: str, kinds: str) -> None:
        """`kinds` are those of numpy's types that the array may have."""
        self.archive, self.name = archive, f"{name}.npy"
        self.member = archive.open(self.name)
        version = np.lib.format.read_magic(self.member)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, self.dtype = read(self.member)
        if fortran or self.dtype.kind not in kinds or not shape or min(shape) < 0 or (kinds == "U" and len(shape) > 1):
            raise DamagedFile(f"has {name} of type {self.dtype} and shape {shape}, which no token file has")
        if kinds == "U" and self.dtype.itemsize > 4 * LONGEST:
            raise DamagedFile(f"has names of {self.dtype.itemsize // 4:,} characters; {LONGEST:,} can be read")
        self.length, self.rest = shape[0], tuple(shape[1:])
        told, found = math.prod(shape) * self.dtype.itemsize, archive.getinfo(self.name).file_size - self.member.tell()
        if told != found:
            raise DamagedFile(f"says that {name} has {told:,} bytes, and has {found:,}")

    def verify(self) -> None:
        """Read all of it once, at the end of which its checksum is compared, and go back to the first row."""
        first = self.member.tell()
        while self.member.read(CHUNK):
            pass
        self.member.close()
        self.member = self.archive.open(self.name)
        self.member.read(first)

    def read(self, rows: int) -> np.ndarray:
        size = rows * math.prod(self.rest) * self.dtype.itemsize
        return np.frombuffer(self.member.read(size), dtype=self.dtype).reshape(rows, *self.rest)


def column_names(levels: int) -> list[str]:
    return ["tokens"] if levels == 1 else [f"tokens_{level}" for level in range(levels)]


def rows_at_once(shapes: Sequence[tuple[int, ...]], batch_size: int) -> int:
    """How many images to read at a time, so that their tokens fit into HELD."""
    needed = 8 * sum(map(math.prod, shapes))
    if needed > HELD:
        raise DamagedFile(f"says that an image has {needed // 8:,} tokens; {HELD // 8:,} can be read")
    return max(1, min(batch_size, HELD // max(needed, 1)))
