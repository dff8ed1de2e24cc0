"""The commands `map` and `place`: maps of tables, which need not fit into memory."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from topovq.commands.engines import OnEngine
from topovq.exits import say
from topovq.loading import MAP_FILE, load
from topovq.storage import atomic_folder, refuse_to_overwrite, remove_abandoned

Table = Annotated[Positional[tuple[Path, ...]], arg(metavar="TABLE [TABLE ...]")]


@dataclass(kw_only=True)
class Map(OnEngine):
    """Fit a self-organizing map to a table of any size; the folder MAP gets the map and its report.

    A table is Parquet files or folders of them, one after another. It is read block by block: once in each pass, and
    four times more, for the means, the deviations, the start, and to measure the map.
    """

    table: Table
    """Parquet files, or folders of them."""
    out: Annotated[Path, arg(aliases=["-o"], metavar="MAP")]
    """Folder for the map and its report."""
    columns: tuple[str, ...] = ()
    """Columns to make the map of, by name; all by default, and then all must be numbers."""
    grid: str | None = None
    """Size of the map, such as 32x32; by default a square of about 5 sqrt(rows) codes."""
    topology: Literal["rectangular", "hexagonal"] = "rectangular"
    """How the places of the map lie."""
    weight: str | None = None
    """Column of the rows' weights: a row of weight 2 counts as two."""
    standardize: bool = True
    """Subtract each column's mean and divide by its standard deviation; the map keeps both for `topovq place`."""
    passes: int = 10
    """Passes over the table."""
    device: str = "auto"
    """auto (CUDA where there is one), cpu, cuda or cuda:N."""
    force: bool = False
    """Overwrite a map that is there."""

    def __call__(self) -> None:
        from topovq.som import Rows, SelfOrganizingMap
        from topovq.som.checks import check_number
        from topovq.view.report.map_page import write_map_page
        from topovq.view.report.page import REPORT_FILE

        self.refuse_torchrun("map")
        refuse_to_overwrite(self.out, self.force)
        if self.out.exists() and not (self.out / MAP_FILE).is_file():
            raise FileExistsError(f"{self.out} is no map, so it is not overwritten")
        check_number("--passes", self.passes, low=1, whole=True)
        shape = None if self.grid is None else shape_of(self.grid)
        rows = Rows(self.table, self.columns or None, self.weight)
        remove_abandoned(self.out.parent)
        som = SelfOrganizingMap(
            shape,
            topology=self.topology,
            standardize=self.standardize,
            max_iter=self.passes,
            device=self.device,
            verbose=True,
            engine=self.engine,
        )
        with self.joined():
            som.fit(rows)
        som.set_params(engine="local")  # whoever loads the map may have no cluster
        told = {"table": rows.reader().name, "rows": f"{rows.reader().n:,}", "columns": f"{som.n_features_in_:,}"}
        if self.weight is not None:
            told["weights"] = f"column {self.weight}"
        with atomic_folder(self.out) as folder:
            som.save(folder / MAP_FILE)
            write_map_page(som, folder / REPORT_FILE, self.out.resolve().name, told)
        say(f"quantization error {som.quantization_error_:.4g}, topographic error {som.topographic_error_:.4f}")
        say(f"the map: {self.out}\nits report: {self.out / REPORT_FILE}")


@dataclass(kw_only=True)
class Place(OnEngine):
    """Write where each row of a table lies on a map: code, row, column and distance, in the order of the table."""

    map: Annotated[Positional[Path], arg(metavar="MAP")]
    """Folder that `topovq map` wrote, or a file that `SelfOrganizingMap.save` wrote."""
    table: Table
    """Parquet files, or folders of them; the map's columns are looked up by name."""
    out: Annotated[Path, arg(aliases=["-o"])]
    """The .parquet file."""
    device: str = "auto"
    """auto (CUDA where there is one), cpu, cuda or cuda:N."""
    force: bool = False
    """Overwrite a file that is there."""

    def __call__(self) -> None:
        from topovq.som import Rows, SelfOrganizingMap
        from topovq.som.placing import write_places

        self.refuse_torchrun("place")
        refuse_to_overwrite(self.out, self.force)
        if self.out.suffix != ".parquet":
            raise ValueError(f"{self.out} must end in .parquet, which is what is written")
        if self.map.is_dir() and not (self.map / MAP_FILE).is_file():
            raise ValueError(
                f"{self.map} is no map of a table: expected a folder that topovq map wrote, with {MAP_FILE} in it, or "
                "a file that SelfOrganizingMap.save wrote"
            )
        som = load(self.map)
        if not isinstance(som, SelfOrganizingMap):
            raise ValueError(f"{self.map} holds no map of a table, but a {type(som).__name__}")
        som.set_params(device=self.device, engine=self.engine)
        with self.joined():
            count, distance = write_places(som, Rows(self.table), self.out, verbose=True)
        say(f"{count:,} rows placed in {self.out}, on average {distance:.4g} from their codes")


def shape_of(grid: str) -> tuple[int, ...]:
    """(32, 32) of "32x32"."""
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", grid):
        raise ValueError(f"--grid {grid!r} must be sizes such as 32x32")
    return tuple(map(int, grid.split("x")))
