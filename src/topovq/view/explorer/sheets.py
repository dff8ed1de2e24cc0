"""All codes of a map on one picture."""

from __future__ import annotations

import numpy as np

from topovq.view.explorer.schemas import Sheet
from topovq.view.report.images import data_uri


def sheet_of(tiles_Kss3: np.ndarray) -> Sheet:
    """Tiles uint8, code by code, in rows on a square."""
    number, side = tiles_Kss3.shape[:2]
    columns = int(np.ceil(number**0.5))
    rows = -(-number // columns)
    page = np.zeros((rows * columns, side, side, 3), np.uint8)
    page[:number] = tiles_Kss3
    whole = page.reshape(rows, columns, side, side, 3).swapaxes(1, 2).reshape(rows * side, columns * side, 3)
    return Sheet(image=data_uri(whole), columns=columns, side=side)
