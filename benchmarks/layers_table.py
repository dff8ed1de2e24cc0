"""The file of benchmarks/layers.py: rows that are written as they come, and a run that goes on where one stopped."""

from __future__ import annotations

import csv
from pathlib import Path

Shape = tuple[int, int, int]
KEY = ("library", "mode", "run", "neighborhood", "N", "K", "d", "dtype", "what")
FIGURES = ("median_ms", "peak_mib", "roofline_ms")
FACTS = ("gpu", "driver", "torch", "triton", "commit", "date")
COLUMNS = (*KEY, "clock", *FIGURES, "note", *FACTS)
SAME = ("gpu", "torch", "triton", "commit")  # of two runs that may be one


class Table:
    """Rows by what they measure. A new row takes the place of an old one; rows that nothing replaces stay.

    out      the CSV file, read if it is there, unless `fresh`
    common   what every row of this run says: FACTS
    """

    def __init__(self, out: Path | None, fresh: bool = False, **common: str) -> None:
        self.out, self.common, self.added = out, common, 0
        self.rows: dict[tuple[str, ...], dict[str, str]] = {}
        if out and out.exists() and not fresh:
            with open(out, newline="") as file:
                reader = csv.DictReader(file)
                if tuple(reader.fieldnames or ()) != COLUMNS:
                    raise ValueError(f"{out} has other columns than {', '.join(COLUMNS)}: move it away, or use --fresh")
                self.rows = {tuple(row[name] for name in KEY): row for row in reader}

    def has(
        self, library: str, mode: str, run: str, neighborhood: str, shape: Shape, what: str, dtype: str = "float32"
    ) -> bool:
        """Whether this commit was measured there already, with the same hardware and versions."""
        row = self.rows.get((library, mode, run, neighborhood, *map(str, shape), dtype, what))
        return row is not None and all(row[name] == self.common[name] for name in SAME)

    def add(self, library: str, mode: str, run: str, neighborhood: str, shape: Shape, what: str,
            ms: float | None, mib: float | None = None, floor: float | None = None, *,
            dtype: str = "float32", clock: str = "wall", note: str = "") -> None:  # fmt: skip
        """Print a row and write the file. Where `ms` is None, `note` says why."""
        key = (library, mode, run, neighborhood, *map(str, shape), dtype, what)
        figures = [_text(ms, 4), _text(mib, 1), _text(floor, 4)]
        values = dict(zip((*KEY, *FIGURES), (*key, *figures)))
        self.rows[key] = {**values, "clock": clock if ms is not None else "", "note": note, **self.common}
        self.added += 1
        told = "" if ms is None else f"{ms:9.3f} ms"
        told += ("" if mib is None else f"{mib:10.1f} MiB") + ("" if floor is None else f"{floor:9.3f} floor")
        print(f"  {library:<24}{mode:<6}{run:<16}{neighborhood:<12}{what:<27}{told}  {note}".rstrip(), flush=True)
        if self.out:
            self._write(self.out)

    def _write(self, out: Path) -> None:
        part = out.with_name(out.name + ".part")
        with open(part, "w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows.values())
        part.replace(out)


def _text(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
