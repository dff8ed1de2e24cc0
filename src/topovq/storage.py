"""Files and folders that are either whole or not there, and manifests that tell when they have changed since."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import platform
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger("topovq")

CONFIG, WEIGHTS, MANIFEST = "config.json", "model.safetensors", "manifest.json"
JSON_BYTES = 1 << 20  # a configuration has a few thousand


# Files


def write_atomic(path: Path, data: bytes) -> None:
    """Write `data` beside `path`, flush it to the disk, then rename it over `path`."""
    with atomic_file(path) as temporary:
        temporary.write_bytes(data)


def refuse_to_overwrite(path: Path, force: bool) -> None:
    """Refuse a path at which something is, unless `force` says that it may go."""
    if path.exists() and not force:
        raise FileExistsError(f"{path} is there already; --force (force=True) overwrites it")


def append(path: Path, data: bytes) -> None:
    """Add `data` to the end of `path` and flush it to the disk; after a failure the file may end in a part of it."""
    with naming(path), open(path, "ab") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Have the error of a full disk say what could not be written: the system's own names no file."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) and error.filename is None:
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        raise


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a name beside `path` to write to; if nothing fails that file becomes `path`, else it is removed.

    The folder is made if it is not there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _beside(path)
    try:
        with naming(path):
            yield temporary
            _sync(temporary)
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):  # a name too long, or a disk that is gone
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None and error.filename == str(temporary):
            raise OSError(error.errno, error.strerror, str(path)) from error  # nobody knows the other name
        raise
    _sync(path.parent)


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder beside `path` to fill; if nothing fails it becomes `path`, else it is removed."""
    temporary = _beside(path)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for file in temporary.iterdir():
            _sync(file)
        if path.exists():
            shutil.rmtree(path)
        os.replace(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _sync(path.parent)


@contextlib.contextmanager
def no_empty_folder(path: Path) -> Iterator[None]:
    """Have the folder `path` go after a failure, and those above it, if they came in the meantime and are empty."""
    new = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        yield
    except BaseException:
        for folder in new:
            with contextlib.suppress(OSError):  # another process has something there
                folder.rmdir()
        raise


def remove_leftovers(folder: Path) -> None:
    """Remove what an interrupted write left in `folder`: nothing that has its final name."""
    for path in folder.glob(".*.tmp"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def remove_leftovers_of(paths: Sequence[Path]) -> None:
    """Remove what interrupted writes of `paths`, all in one folder, left there on any machine."""
    names = {f".{path.name}" for path in paths}
    for path in paths[0].parent.glob(".*.tmp"):
        if path.name.removesuffix(".tmp").rpartition(".")[0] in names:
            path.unlink(missing_ok=True)


def remove_abandoned(folder: Path, below: bool = False) -> None:
    """Remove what dead processes of this machine left half-written in `folder`, where others may be writing; if asked
    for in the folders below it as well."""
    for path in folder.glob(f"{'**/' * below}.*.{_machine()}-*.tmp"):
        number = path.name.removesuffix(".tmp").rpartition("-")[2]
        if number.isdecimal() and not _runs(int(number)):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _runs(process: int) -> bool:
    if os.name == "nt":  # where the question would end it
        return True
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # it is somebody else's
        return True
    return True


def _machine() -> str:
    """A short name of this machine: a folder may be shared by several, each with processes of the same numbers."""
    return hashlib.sha256(platform.node().encode()).hexdigest()[:6]


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{_machine()}-{os.getpid()}.tmp")


def _sync(path: Path) -> None:
    """Have the disk hold a file's bytes or a folder's names, so that they last through a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# Manifests: `manifest.json` beside files says what they were when they were written


class DamagedFile(ValueError):
    """A file that is not what was written: the message names it and says what is wrong with it."""


def first_sentence(error: BaseException) -> str:
    """What a library says is wrong with a file, in one line and without what it adds; else the error's type."""
    return one_line(error).partition(". ")[0].rstrip(".: ") or type(error).__name__


def one_line(error: BaseException) -> str:
    """What an error says, in one line and without bytes of the file that no terminal should get."""
    return " ".join("".join(c if c.isprintable() else " " for c in str(error)).split())


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hex digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def model_id(folder: Path) -> str:
    """What tells the model in `folder` from every other one: the SHA-256 of its weights."""
    return sha256(folder / WEIGHTS)


def manifest(files: Mapping[str, bytes | Path], **facts: Any) -> bytes:
    """The text of manifest.json for `files`, by name, in memory or on disk; `facts` are what else it says."""
    told = {**facts, "bytes": {}, "sha256": {}}
    for name, data in sorted(files.items()):
        told["bytes"][name] = data.stat().st_size if isinstance(data, Path) else len(data)
        told["sha256"][name] = sha256(data) if isinstance(data, Path) else hashlib.sha256(data).hexdigest()
    return json.dumps({**told, "own_sha256": _sum_of(told)}, indent=2).encode() + b"\n"


def _sum_of(told: Mapping[str, Any]) -> str:
    """The SHA-256 of what a manifest says, as JSON."""
    said = {name: value for name, value in told.items() if name != "own_sha256"}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write `files` into `folder`, each whole or not at all, and their manifest last.

    The manifest that was there goes first: a process that is killed in between leaves none, and not a wrong one.
    """
    (folder / MANIFEST).unlink(missing_ok=True)
    for name, data in files.items():
        write_atomic(folder / name, data)
    write_atomic(folder / MANIFEST, manifest(files))


def read_manifest(folder: Path, names: Sequence[str]) -> dict[str, Any]:
    """The manifest of `folder`, after the files `names` were compared with it; {} where it has none.

    Raises DamagedFile where a file differs.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return {}
    told = read_json(path)
    if told.get("own_sha256") != _sum_of(told):
        raise DamagedFile(f"{path} is damaged or was changed: it is not what its own SHA-256 says")
    sizes, digests = told["bytes"], told["sha256"]
    if not {*names} <= sizes.keys():
        raise DamagedFile(f"{path} must have the SHA-256 of {', '.join(names)}")
    for name in names:
        if not (folder / name).is_file():
            raise DamagedFile(f"{folder / name} is missing, but {MANIFEST} names it")
        size = (folder / name).stat().st_size
        if size != sizes[name]:  # before gigabytes are read to tell
            wrong = f"its {size:,} bytes are not the {sizes[name]!r} in {MANIFEST}"
        elif (found := sha256(folder / name)) != digests[name]:
            wrong = f"its SHA-256, {found[:12]}..., is not the one in {MANIFEST}"
        else:
            continue
        raise DamagedFile(f"{folder / name} is damaged or was changed: {wrong}. If you changed it, delete {path}")
    return told


def note_without(told: Mapping[str, Any], where: Path, what: str = MANIFEST) -> None:
    """Say in the log that there is no manifest, where nothing was `told` by one."""
    if not told:
        logger.warning("note: %s has no %s, so damage to it may go unnoticed", where, what)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object of a file that a person may have edited; the error names the file."""
    if path.stat().st_size > JSON_BYTES:
        raise DamagedFile(f"{path} has {path.stat().st_size:,} bytes; no such file has more than {JSON_BYTES:,}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"{path} is damaged or no JSON file: {error}") from None
    if not isinstance(value, dict):
        raise DamagedFile(f"{path} holds {str(value)[:80]!r}; expected a JSON object, {{...}}")
    return value


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{max(names, key=names.count)!r} is there twice")
    return found
