"""A data set from what a person typed: the name of a source, a folder of images, or tar shards."""

from __future__ import annotations

from pathlib import Path

from topovq.tokenizer.data import NEED_PATH, SOURCES, Source, are_shards, open_source
from topovq.tokenizer.models import check_name


def open_data(data: str, path: Path | None = None, size: int | None = None, workers: int | None = None) -> Source:
    """Open `data` (see tokenizer/data): a name in SOURCES, or the path of a folder, a .tar file or a folder of them."""
    if data in NEED_PATH and path is None:
        raise ValueError(f"the data set {data!r} needs the path of its images: --data-path PATH (data_path in Python)")
    if data in SOURCES:
        return open_source(data, path, size=size, workers=workers)
    if not Path(data).exists() and not are_shards(data):
        if Path(data).name != data:  # a path and no name
            raise FileNotFoundError(f"there is no folder {data!r}; DATA is a folder of images or {', '.join(SOURCES)}")
        check_name("data set (and no such folder)", data, SOURCES)
    if path is not None:
        raise ValueError(
            f"{data!r} is a path already; --data-path (here {str(path)!r}) goes with a name: {', '.join(SOURCES)}"
        )
    return open_source("shards" if are_shards(data) else "folder", data, size=size, workers=workers)
