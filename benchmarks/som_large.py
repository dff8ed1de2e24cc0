"""Maps of tables that are large: a billion rows made on the device, and 59 million in memory and from Parquet.

    python -m benchmarks.som_large billion --out FOLDER [--limit SECONDS]
    python -m benchmarks.som_large cells --out FOLDER [--limit SECONDS] [--scratch FOLDER]

billion  1,000,000,000 x 64, a bent sheet made in batches on the device, onto 256 x 256 in three passes. Seconds of the
         start, of each pass and of the measuring pass; memory of the device and of the process after each
cells    59,000,000 x 14 onto 14 x 14 in ten passes with the label of every row: once as a tensor on the device, once
         read from Parquet files on disk, which are written first and are not timed

Sizes can be made smaller, to try it: --samples, --side, --device. Each case appends to FOLDER/som_large.csv as soon as
it has a figure, and stops before --limit.
"""

from __future__ import annotations

import argparse
import csv
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import torch
from torch import Tensor

from topovq.som import Rows, SelfOrganizingMap
from topovq.tokenizer.training.record import environment

BATCH = 2**20
CASES = {"billion": (1_000_000_000, 64, 256, 3), "cells": (59_000_000, 14, 14, 10)}


class Bench:
    """Seconds and memory by what was done, written as they come."""

    def __init__(self, out: Path, device: torch.device, limit: float, common: dict[str, Any]) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.path, self.device, self.common = out / "som_large.csv", device, common
        self.ends = time.monotonic() + limit
        self.facts = environment(device, 1)

    @property
    def left(self) -> float:
        return self.ends - time.monotonic()

    def timed(self, measure: str, call: Callable[[], Any]) -> tuple[float, Any]:
        self._wait()
        began = time.perf_counter()
        result = call()
        self._wait()
        seconds = time.perf_counter() - began
        self.note(measure, seconds)
        return seconds, result

    def note(self, measure: str, seconds: float, **more: Any) -> None:
        cuda = self.device.type == "cuda"
        row = {
            **self.common,
            "measure": measure,
            "seconds": round(seconds, 3),
            "rows_per_second": round(self.common["samples"] / seconds),
            "device_peak_mib": round(torch.cuda.max_memory_allocated() / 2**20) if cuda else "",
            "process_peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10),
            "quantization_error": more.get("quantization_error", ""),
            "topographic_error": more.get("topographic_error", ""),
            **self.facts,
        }
        fresh = not self.path.exists()
        with open(self.path, "a", newline="") as file:
            writer = csv.DictWriter(file, row)
            if fresh:
                writer.writeheader()
            writer.writerow(row)
        print(f"{measure}: {seconds:.2f} s, peak {row['device_peak_mib']} MiB on the device, "
              f"{row['process_peak_mib']} MiB in the process; {self.left:.0f} s left", flush=True)  # fmt: skip

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def batch(number: int, rows: int, dim: int, device: torch.device) -> Tensor:
    """A bent sheet of 4 dimensions in `dim` with noise: the same for the same number."""
    into = torch.randn(4, dim, generator=torch.Generator(device).manual_seed(0), device=device)
    generator = torch.Generator(device).manual_seed(number + 1)
    latent = torch.randn(rows, 4, generator=generator, device=device)
    x_ND = torch.tanh(latent @ into).mul_(3)
    return x_ND.add_(torch.randn(rows, dim, generator=generator, device=device), alpha=0.5)


def batches(samples: int, dim: int, device: torch.device) -> Iterator[Tensor]:
    for number, first in enumerate(range(0, samples, BATCH)):
        yield batch(number, min(BATCH, samples - first), dim, device)


def billion(bench: Bench, samples: int, dim: int, side: int, passes: int, scratch: Path) -> None:
    device = bench.device
    warm = SelfOrganizingMap((side, side), max_iter=2, device=str(device))
    warm.fit(lambda: batches(min(samples, 2 * BATCH), dim, device))  # kernels are compiled here
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    som = SelfOrganizingMap((side, side), max_iter=passes, device=str(device))
    rows = Rows(lambda: batches(samples, dim, device))
    total, _ = bench.timed("start", lambda: som.start(rows))
    longest = 0.0
    for number in range(passes):
        if bench.left < 1.2 * longest:
            print(f"stopped after {number} of {passes} passes, for the limit")
            return
        seconds, _ = bench.timed(f"pass {number + 1}", lambda: som.update(som.statistics(rows)))
        total, longest = total + seconds, max(longest, seconds)
    bench.note(f"start and {passes} passes", total)
    if bench.left < 2.5 * longest:
        print("the measuring pass was left out, for the limit")
        return
    measured = som._fitted_passes(rows)
    seconds, _ = bench.timed("measuring pass", lambda: som._finish(measured))
    errors = {"quantization_error": som.quantization_error_, "topographic_error": som.topographic_error_}
    bench.note("fit, all of it", total + seconds, **errors)


def cells(bench: Bench, samples: int, dim: int, side: int, passes: int, scratch: Path) -> None:
    device = bench.device
    whole = [torch.cat(list(batches(samples, dim, device)))]
    som = SelfOrganizingMap((side, side), max_iter=passes, device=str(device))
    som.fit(whole[0][:BATCH])  # kernels are compiled here
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds, _ = bench.timed("fit in memory", lambda: som.fit(whole[0]))
    errors = {"quantization_error": som.quantization_error_, "topographic_error": som.topographic_error_}
    bench.note("fit in memory, with labels", seconds, **errors)
    labels, codes = som.labels_, som.codes_
    folder = scratch / "cells"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    began = time.monotonic()
    for number, part in enumerate(whole[0].split(8 * BATCH)):
        columns = part.T.contiguous().cpu().numpy()
        table = pyarrow.table({f"marker_{i}": column for i, column in enumerate(columns)})
        pyarrow.parquet.write_table(table, folder / f"{number:03}.parquet", use_dictionary=False)
        if bench.left < 2 * seconds:
            print("stopped while the Parquet files were written, for the limit")
            return
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{size / 2**30:.2f} GiB of Parquet written in {time.monotonic() - began:.0f} s", flush=True)
    whole.clear()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    read, _ = bench.timed("fit from Parquet", lambda: som.fit(folder))
    placed, found = bench.timed("labels from Parquet", lambda: som.predict(folder))
    apart = float(np.abs(som.codes_ - codes).max())
    errors = {"quantization_error": som.quantization_error_, "topographic_error": som.topographic_error_}
    bench.note("fit from Parquet, with labels", read + placed, **errors)
    print(f"codes differ by {apart:.2g} at most from those in memory, {(found != labels).sum():,} labels differ")
    shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=list(CASES))
    parser.add_argument("--out", type=Path, required=True, help="folder for som_large.csv")
    parser.add_argument("--limit", type=float, default=550, help="seconds after which nothing new is begun")
    parser.add_argument("--scratch", type=Path, default=Path("/tmp/som_large"), help="folder for the Parquet files")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--samples", type=int)
    parser.add_argument("--side", type=int)
    options = parser.parse_args()
    samples, dim, side, passes = CASES[options.case]
    samples, side = options.samples or samples, options.side or side
    common = {"case": options.case, "samples": samples, "features": dim, "codes": side * side, "passes": passes}
    bench = Bench(options.out, torch.device(options.device), options.limit, common)
    {"billion": billion, "cells": cells}[options.case](bench, samples, dim, side, passes, options.scratch)


if __name__ == "__main__":
    main()
