"""Rows a second of a fit in memory and of the same fit from a table that is read: Parquet, an array on disk, batches.

    python -m benchmarks.som_rows [--samples 500000] [--out benchmarks/results/som_rows.csv]

float32, 16 features, maps of 16 x 16 and 32 x 32, five passes, one thread (reading has one of its own). Seconds are
CPU-seconds of all threads, so that other load on the machine counts for little: the best of the repeats, which take
turns. Rows a second count each row once for each of the five passes. All maps are compared: they are the same bit for
bit.
"""

from __future__ import annotations

from benchmarks.som import commit, facts  # first: it sets the number of threads

# isort: split
import argparse
import csv
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from benchmarks.measured import RESULTS
from topovq.som import SelfOrganizingMap

DIM, PASSES, BATCH = 16, 5, 100_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=500_000)
    parser.add_argument("--sides", type=int, nargs="+", default=[16, 32])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "som_rows.csv")
    options = parser.parse_args()
    generator = np.random.default_rng(0)
    latent = generator.standard_normal((options.samples, 4), dtype=np.float32)
    x_ND = np.tanh(latent @ generator.standard_normal((4, DIM), dtype=np.float32)) * 2
    x_ND += 0.3 * generator.standard_normal(x_ND.shape, dtype=np.float32)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        pyarrow.parquet.write_table(pyarrow.table({f"c{i}": x_ND[:, i] for i in range(DIM)}), path / "x.parquet")
        x_ND.tofile(path / "x.bin")
        sources: dict[str, Any] = {
            "array in memory": x_ND,
            "Parquet": path / "x.parquet",
            "array on disk": np.memmap(path / "x.bin", np.float32, "r", shape=x_ND.shape),
            "batches": lambda: (x_ND[first : first + BATCH] for first in range(0, len(x_ND), BATCH)),
        }
        for side in options.sides:
            best: dict[str, float] = {}
            codes = {}
            for _ in range(options.repeats):
                for name, source in sources.items():
                    som = SelfOrganizingMap((side, side), max_iter=PASSES, device="cpu")
                    began = time.process_time()
                    codes[name] = som.fit(source).codes_
                    best[name] = min(best.get(name, np.inf), time.process_time() - began)
            for name, seconds in best.items():
                assert (codes[name] == codes["array in memory"]).all(), f"{name} gives another map"
                rows.append({"samples": len(x_ND), "features": DIM, "codes": side * side, "passes": PASSES,
                             "source": name, "cpu_seconds": f"{seconds:.4g}",
                             "rows_per_second": round(len(x_ND) * PASSES / seconds),
                             "share_of_memory": f"{best['array in memory'] / seconds:.2f}"})  # fmt: skip
                print(rows[-1], flush=True)
    with open(options.out, "w", newline="") as file:
        writer = csv.DictWriter(file, [*facts(), *commit(), *rows[0]])
        writer.writeheader()
        writer.writerows(facts() | commit() | row for row in rows)


if __name__ == "__main__":
    main()
