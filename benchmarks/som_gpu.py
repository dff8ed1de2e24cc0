"""A self-organizing map of 256 x 256 fitted to 10 million x 64 on one GPU, beside what the search alone takes.

    python -m benchmarks.som_gpu --out benchmarks/results/som_gpu.csv

First the device's map of a small table is compared with the CPU's. Then the large one, whose data are made on the
device: passes of the batch rule with a Gaussian neighborhood whose sigma falls from half the side to 1. Seconds are
wall-clock, of the whole fit as a user calls it, and of each part.
"""

from __future__ import annotations

import argparse
import csv
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from topovq.ops.search import nearest
from topovq.som import SelfOrganizingMap
from topovq.tokenizer.training.record import environment

PASSES = 10


def sheet(n: int, dim: int, device: torch.device) -> Tensor:
    """A bent sheet of 4 dimensions in `dim`, with noise."""
    generator = torch.Generator(device).manual_seed(0)
    into = torch.randn(4, dim, generator=generator, device=device)
    parts = []
    for first in range(0, n, 2**20):
        latent = torch.randn(min(2**20, n - first), 4, generator=generator, device=device)
        noise = torch.randn(len(latent), dim, generator=generator, device=device)
        parts.append(torch.tanh(latent @ into) * 3 + 0.5 * noise)
    return torch.cat(parts)


def timed(call: Any) -> tuple[float, Any]:
    torch.cuda.synchronize()
    began = time.perf_counter()
    result = call()
    torch.cuda.synchronize()
    return time.perf_counter() - began, result


def check(device: torch.device) -> float:
    """How far apart the quantization errors of the device's map and the CPU's are, from the same start.

    Codes themselves may differ: one sample that is as far from two codes, rounded differently, moves both.
    """
    x = sheet(20_000, 16, device)
    start = x[:400].cpu().numpy()
    fits = [SelfOrganizingMap((20, 20), init=start, max_iter=5, device=d).fit(x.to(d)) for d in ("cpu", "cuda")]
    errors = [som.quantization_error_ for som in fits]
    apart = abs(errors[0] / errors[1] - 1)
    median = float(np.median(abs(fits[0].codes_ - fits[1].codes_)))
    assert apart < 1e-3, f"the device's map has quantization error {errors[1]}, the CPU's {errors[0]}"
    assert median < 1e-3, f"half of the device's codes differ from the CPU's by more than {median}"
    return float(apart)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the CSV file")
    parser.add_argument("--samples", type=int, default=10_000_000)
    parser.add_argument("--side", type=int, default=256)
    arguments = parser.parse_args()
    device = torch.device("cuda", 0)
    print(f"the device's quantization error is within {check(device):.1e} of the CPU's", flush=True)
    x = sheet(arguments.samples, 64, device)
    side = arguments.side
    som = SelfOrganizingMap((side, side), max_iter=PASSES, device="cuda")
    som.fit(x[: side * side])  # kernels are compiled here
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fit, _ = timed(lambda: som.fit(x))
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    codes = torch.from_numpy(som.codes_).to(device)
    search = min(timed(lambda: nearest(x, codes))[0] for _ in range(3))
    predict, _ = timed(lambda: som.predict(x))
    common: dict[str, Any] = {"samples": len(x), "features": x.shape[1], "codes": side * side, "passes": som.n_iter_}
    measured = {
        "fit": fit,
        "fit, a pass": fit / som.n_iter_,
        "search alone, a pass": search,
        "predict": predict,
    }
    errors = {"quantization_error": som.quantization_error_, "topographic_error": som.topographic_error_}
    facts = environment(device, 1)
    with open(arguments.out, "w", newline="") as file:
        writer = csv.DictWriter(file, [*common, "measure", "seconds", "peak_mib", *errors, *facts])
        writer.writeheader()
        for measure, seconds in measured.items():
            print(f"{measure}: {seconds:.3f} s", flush=True)
            row = {**common, "measure": measure, "seconds": seconds, "peak_mib": peak, **errors, **facts}
            writer.writerow(row)


if __name__ == "__main__":
    main()
