"""`write_places`: where each row of a table lies on a map, as a Parquet file written block by block."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from topovq.som.bar import bar
from topovq.som.passes import Passes
from topovq.som.questions import Closest
from topovq.som.readers import arrow
from topovq.storage import atomic_file, remove_abandoned

if TYPE_CHECKING:
    from topovq.som import SelfOrganizingMap


def write_places(som: SelfOrganizingMap, X: Any, path: Path, verbose: bool = False) -> tuple[int, float]:
    """Write one row for each of X, in its order: (number of rows, their mean distance to the closest code).

    The columns are `code` (its number), `row` and `column` of its place (`axis_0`, `axis_1`, ... on a map that has not
    two axes), and `distance` to it. The file is there, whole, or it is not there.
    """
    passes = som._fitted_passes(X)
    remove_abandoned(path.parent)
    count, total = 0, 0.0
    with bar(passes, 1, "placing the rows", verbose), som._threads(), atomic_file(path) as temporary:
        writer = None
        try:
            for block in placed(som, passes):
                table = arrow().table(block)
                if writer is None:
                    writer = arrow().parquet.ParquetWriter(temporary, table.schema, write_page_checksum=True)
                writer.write_table(table)
                count += table.num_rows
                total += float(block["distance"].sum(dtype=np.float64))
        finally:
            if writer is not None:
                writer.close()
    return count, total / count


def placed(som: SelfOrganizingMap, passes: Passes) -> Iterator[dict[str, np.ndarray]]:
    """The columns of each block of rows."""
    codes_KD = som._codes(passes)
    place_KA = som.grid_.coords(torch.arange(som.grid_.size)).numpy().astype(np.int32)
    names = ["row", "column"] if place_KA.shape[1] == 2 else [f"axis_{i}" for i in range(place_KA.shape[1])]
    for index_N, distance_N in passes.told(Closest(codes_KD, som.metric, distances=True)):
        code_N = index_N.cpu().numpy().astype(np.int32)
        yield {
            "code": code_N,
            **{name: place_K[code_N] for name, place_K in zip(names, place_KA.T)},
            "distance": distance_N.cpu().numpy(),
        }
