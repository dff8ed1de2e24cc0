"""A CSV file whose rows are written as they come, so that a benchmark goes on where it stopped."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path


class Rows:
    """Rows by what they measure. A new row takes the place of an old one; rows that nothing replaces stay.

    out      the CSV file, read if it is there, unless `fresh`
    key      the columns that say what a row measures; `columns` are all of them
    same     the columns of `common` in which two runs agree that may be one
    common   what every row of this run says
    """

    def __init__(
        self, out: Path | None, key: Sequence[str], columns: Sequence[str], same: Sequence[str], common: dict[str, str],
        fresh: bool = False,
    ) -> None:  # fmt: skip
        self.out, self.key, self.columns, self.same, self.common = out, key, columns, same, common
        self.added = 0
        self.rows: dict[tuple[str, ...], dict[str, str]] = {}
        if out and out.exists() and not fresh:
            with open(out, newline="") as file:
                reader = csv.DictReader(file)
                if list(reader.fieldnames or ()) != list(columns):
                    raise ValueError(f"{out} has other columns than {', '.join(columns)}: move it away, or use --fresh")
                self.rows = {tuple(row[name] for name in key): row for row in reader}

    def found(self, *key: object) -> dict[str, str] | None:
        """The row, if this commit was measured already with the same hardware and versions."""
        row = self.rows.get(tuple(map(str, key)))
        return row if row is not None and all(row[name] == self.common[name] for name in self.same) else None

    def put(self, **values: object) -> None:
        """Add a row, and write the file whole."""
        row = {name: str(value) for name, value in {**values, **self.common}.items()}
        self.rows[tuple(row[name] for name in self.key)] = row
        self.added += 1
        if self.out:
            part = self.out.with_name(self.out.name + ".part")
            with open(part, "w", newline="") as file:
                writer = csv.DictWriter(file, self.columns, lineterminator="\n")
                writer.writeheader()
                writer.writerows(self.rows.values())
            part.replace(self.out)


def as_text(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
