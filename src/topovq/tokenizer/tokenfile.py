"""Token files: Parquet or npz, written and read a batch at a time.

Parquet has one row an image: `image` (its name) and `tokens` (the codes' numbers, row by row), or `tokens_0` (the
coarsest level), `tokens_1`, ... of a model with levels; the schema's metadata `topovq` holds the shapes and the id of
the model. An npz holds the same columns as arrays: `image` [N] and `tokens` [N, h, w]; the id is in the comment of the
archive. The id is the SHA-256 of the model's weights (`storage.model_id`); older files have none. Tokens coded by a
prior are a third form, .tvq (`token_coded`).

Pages of Parquet and members of an npz have checksums. What a file says of its sizes is compared with itself before
memory is taken for it, and whatever does not agree is refused with the file's name.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from torch import Tensor

from topovq.missing import MissingExtra
from topovq.storage import DamagedFile, atomic_file, first_sentence, remove_abandoned
from topovq.tokenizer.token_coded import SUFFIX, CodedWriter, Coder, coded_header, read_coded
from topovq.tokenizer.token_npz import Batch, NpzWriter, column_names, npz_model, read_npz
from topovq.tokenizer.token_parquet import ParquetWriter, parquet_model, read_parquet


class TokenWriter(Protocol):
    def write(self, names: Sequence[str], levels: Sequence[Tensor]) -> None:
        """Add images: their names, and for each level their tokens int64 [B, h, w]."""


@contextlib.contextmanager
def open_writer(
    path: Path,
    shapes: Sequence[tuple[int, ...]],
    codebook_size: int,
    model: str | None = None,
    coder: Coder | None = None,
) -> Iterator[TokenWriter]:
    """`with open_writer(path, shapes, codebook_size) as writer:` the file is there, whole, when the block ends well.

    `model` is the id of the model whose tokens they are, `coder` the prior that codes them (.tvq).
    """
    check_suffix(path, coder)
    columns = column_names(len(shapes))
    dtype = np.dtype(np.uint16 if codebook_size <= 1 << 16 else np.int32)
    make = ParquetWriter if path.suffix == ".parquet" else NpzWriter
    remove_abandoned(path.parent)
    with atomic_file(path) as temporary:
        writer: CodedWriter | ParquetWriter | NpzWriter
        if coder is not None:
            writer = CodedWriter(temporary, shapes, model, coder)
        else:
            writer = make(temporary, columns, [tuple(shape) for shape in shapes], dtype, model)
        try:
            yield writer
        except BaseException:
            writer.close(finish=False)
            raise
        writer.close(finish=True)


def read_tokens(path: Path, batch_size: int, coder: Coder | None = None) -> Iterator[Batch]:
    """The (names, levels of int64 [B, h, w]) of a token file, `batch_size` images at a time, or fewer large ones; of a
    coded one as many as its `coder` takes."""
    check_file(path, coder)
    if coder is not None:
        return _named(path, read_coded(path, coder))
    return _named(path, (read_parquet if path.suffix == ".parquet" else read_npz)(path, batch_size))


def model_of(path: Path) -> str | None:
    """The id of the model whose tokens the file holds; None where it does not say."""
    if path.suffix == SUFFIX:
        with _naming(path):
            return coded_header(path)["model"]
    check_file(path)
    with _naming(path):
        return parquet_model(path) if path.suffix == ".parquet" else npz_model(path)


def _named(path: Path, batches: Iterator[Batch]) -> Iterator[Batch]:
    with _naming(path):
        yield from batches


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Have whatever damaged bytes raise in the libraries that read them be one error with the file's name."""
    try:
        yield
    except DamagedFile as error:
        raise DamagedFile(f"{path} {error}") from None
    except MissingExtra:
        raise
    except OSError as error:
        if error.errno not in (None, errno.EINVAL):  # the disk's fault, or the user's; a place before 0 is the file's
            raise
        raise DamagedFile(_damaged(path, error)) from None
    except Exception as error:  # zlib, zipfile, numpy and Arrow have a dozen types for it
        raise DamagedFile(_damaged(path, error)) from None


def _damaged(path: Path, error: BaseException) -> str:
    kind = {".parquet": "Parquet", SUFFIX: "coded token"}.get(path.suffix, "npz")
    return f"{path} is damaged or no {kind} file: {first_sentence(error)}"


def check_file(path: Path, coder: Coder | None = None) -> None:
    if coder is not None and path.suffix != SUFFIX:
        raise ValueError(f"{str(path)!r} is not coded by a prior, as a {SUFFIX} file is: leave out --prior (coder)")
    check_suffix(path, coder)
    if not path.is_file():  # a named pipe would be waited at for ever
        raise FileNotFoundError(f"there is no token file at {path}")


def check_suffix(path: Path, coder: Coder | None = None) -> None:
    if coder is not None and path.suffix != SUFFIX:
        raise ValueError(f"{str(path)!r} must end in {SUFFIX}: it is coded by a prior")
    if coder is None and path.suffix == SUFFIX:
        raise ValueError(f"{str(path)!r} is coded by a prior: name that one (encode --compress, decode --prior)")
    if coder is None and path.suffix not in (".parquet", ".npz"):
        raise ValueError(f"{str(path)!r} must end in .parquet or .npz")


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
