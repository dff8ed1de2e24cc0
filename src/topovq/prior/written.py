"""The files that `topovq sample` wrote into a folder, so that another one may replace them and nothing else.

`samples.json` has their names, below `files`, and how they were drawn.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from topovq.storage import refuse_to_overwrite, write_atomic
from topovq.tokenizer.tokens import image_name

LIST = "samples.json"
OTHERWISE = "choose another folder (-o), or take it away yourself"


def check_folder(out: Path, names: Sequence[str], force: bool) -> list[str]:
    """Refuse a folder that cannot take `names`; the files of an earlier sample in it, which may go.

    names  files, and folders of files, that are to be written
    force  lets go what an earlier sample wrote; whatever else has one of these names is refused all the same
    """
    there = next(path for path in (out, *out.parents) if path.exists())
    if not there.is_dir():
        raise FileExistsError(f"{there} is a file; -o names a folder for the samples")
    earlier = _listed(out)
    known = {out / name for name in earlier}
    for name in names:
        for path in _visible(out / name):
            if path not in known:  # first: --force, which the next message names, would refuse it
                listed = (out / LIST).is_file()
                why = f"{out / LIST} names no such sample" if listed else f"there is no {out / LIST} that names it"
                raise FileExistsError(f"{path} is there, and {why}: {OTHERWISE}")
    for name in (*names, LIST):
        refuse_to_overwrite(out / name, force)
    return earlier


def replace(out: Path, earlier: Sequence[str], files: Sequence[str], how: Mapping[str, Any]) -> None:
    """Remove the files of an earlier sample, and list those that are about to be written."""
    for name in earlier:
        (out / name).unlink(missing_ok=True)
    folders = {out / folder for name in earlier for folder in PurePosixPath(name).parents if folder.name}
    for folder in sorted(folders, reverse=True):  # the deepest first
        with contextlib.suppress(OSError):  # what is not empty stays
            folder.rmdir()
    write_atomic(out / LIST, json.dumps({**how, "files": list(files)}, indent=1).encode() + b"\n")


def _visible(path: Path) -> list[Path]:
    """The file at `path`, or the visible files below the folder there."""
    if not path.is_dir():
        return [path] if path.exists() or path.is_symlink() else []
    found = (Path(folder, file) for folder, _, files in os.walk(path) for file in files if not file.startswith("."))
    return sorted(found)


def _listed(out: Path) -> list[str]:
    """The names in the list of an earlier sample, all of them below `out`; none where there is no list."""
    path = out / LIST
    if not path.is_file():
        return []
    try:
        names = json.loads(path.read_text(encoding="utf-8"))["files"]
        for name in names:
            image_name(name)
            if not (out / name).parent.resolve().is_relative_to(out.resolve()):
                raise ValueError(f"{name!r} lies outside of the folder")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{path} is no list of samples ({error}): {OTHERWISE}") from None
    return list(names)
