"""What was measured: the CSV files of benchmarks/results that are drawn, and the shapes that are in them."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"

Row = dict[str, str]
Shape = tuple[int, int, int]
FIRST: Shape = (524_288, 512, 64)
SMALL: Shape = (16_384, 512, 64)
SHAPES: list[Shape] = [
    FIRST,
    (131_072, 8_192, 256),
    (65_536, 65_536, 64),
    (65_536, 262_144, 64),
    (65_536, 1_048_576, 64),
    SMALL,
]
STEP = "fwd+bwd+update"
PEERS = {
    "plain-torch": "plain torch EMA-VQ",
    "authors-formulation": "the paper's equations as written",
    "vector-quantize-pytorch": "vector-quantize-pytorch",
}


@dataclass
class Results:
    """The rows of each CSV file."""

    layers: list[Row]
    scale: list[Row]

    @classmethod
    def read(cls, folder: Path = RESULTS) -> Results:
        def rows(name: str) -> list[Row]:
            with open(folder / f"{name}.csv", newline="") as file:
                return list(csv.DictReader(file))

        return cls(*(rows(name) for name in cls.__dataclass_fields__))

    def layer(
        self, library: str, mode: str, run: str, kind: str, shape: Shape, what: str = STEP, column: str = "median_ms",
        dtype: str = "float32",
    ) -> float | None:  # fmt: skip
        """One figure of layers.csv; None where the layer was left out, or its row says why there is no figure."""
        wanted = [library, mode, run, kind, *map(str, shape), what, dtype]
        names = ["library", "mode", "run", "neighborhood", "N", "K", "d", "what", "dtype"]
        found = [row for row in self.layers if [row[name] for name in names] == wanted]
        if len(found) > 1:
            raise ValueError(f"{len(found)} rows of layers.csv are {wanted}; one would be right")
        return float(found[0][column]) if found and found[0][column] else None

    def ours(self, mode: str, run: str, kind: str, shape: Shape, column: str = "median_ms") -> float:
        figure = self.layer("topovq", mode, run, kind, shape, column=column)
        if figure is None:
            raise ValueError(f"layers.csv has no figure of topovq, {mode}, {run}, {kind} at N, K, d = {shape}")
        return figure

    def search(self, library: str, mode: str, dtype: str, shape: Shape) -> float | None:
        """The search alone: in a graph where it was timed so, since a short one takes longer to launch than to run."""
        graphed = self.layer(library, mode, "graph", "none", shape, "assignment", dtype=dtype)
        eager = self.layer(library, mode, "eager", "none", shape, "assignment", dtype=dtype)
        return eager if graphed is None else graphed

    def peer(self, library: str, shape: Shape, column: str = "median_ms") -> float | None:
        """A peer as it was called from Python."""
        kind = "hard" if library == "authors-formulation" else "none"
        return self.layer(library, "exact", "eager", kind, shape, column=column)
