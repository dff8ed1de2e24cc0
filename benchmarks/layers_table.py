"""The rows of benchmarks/layers.py."""

from __future__ import annotations

from pathlib import Path

from benchmarks.rows import Rows, as_text

Shape = tuple[int, int, int]
KEY = ("library", "mode", "run", "neighborhood", "N", "K", "d", "dtype", "what")
FIGURES = ("median_ms", "peak_mib", "roofline_ms")
FACTS = ("gpu", "driver", "torch", "triton", "commit", "date")
COLUMNS = (*KEY, "clock", *FIGURES, "note", *FACTS)


class Table(Rows):
    """Layers at their shapes; `common` has the FACTS."""

    def __init__(self, out: Path | None, fresh: bool = False, **common: str) -> None:
        super().__init__(out, KEY, COLUMNS, ("gpu", "torch", "triton", "commit"), common, fresh)

    def has(
        self, library: str, mode: str, run: str, neighborhood: str, shape: Shape, what: str, dtype: str = "float32"
    ) -> bool:
        """Whether this commit was measured there already."""
        return self.found(library, mode, run, neighborhood, *shape, dtype, what) is not None

    def add(self, library: str, mode: str, run: str, neighborhood: str, shape: Shape, what: str,
            ms: float | None, mib: float | None = None, floor: float | None = None, *,
            dtype: str = "float32", clock: str = "wall", note: str = "") -> None:  # fmt: skip
        """Print a row and write it. Where `ms` is None, `note` says why."""
        key = dict(zip(KEY, (library, mode, run, neighborhood, *shape, dtype, what)))
        figures = dict(zip(FIGURES, (as_text(ms, 4), as_text(mib, 1), as_text(floor, 4))))
        told = "" if ms is None else f"{ms:9.3f} ms"
        told += ("" if mib is None else f"{mib:10.1f} MiB") + ("" if floor is None else f"{floor:9.3f} floor")
        print(f"  {library:<24}{mode:<6}{run:<16}{neighborhood:<12}{what:<27}{told}  {note}".rstrip(), flush=True)
        self.put(**key, clock=clock if ms is not None else "", **figures, note=note)
