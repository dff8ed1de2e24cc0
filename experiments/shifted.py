"""Who keeps its codes? Gaussian vectors far from where the codes start, under several settings and layers.

    python -m experiments.shifted --out docs/results/shifted.csv

D = 32, K = 512, vectors N(5, 1), batches of 1,024. After 100, 1,000 and 3,000 updates: how many codes are chosen for
20,000 fresh vectors, how many have drained (their mean is nearer to 0 than to 5), and the mean squared error.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import nn

from experiments.peers import MissingPackage, their
from topovq import KohonenVQ

D, K, SHIFT, BATCH = 32, 512, 5.0, 1024
CHECKS = (100, 1000, 3000)
SETTINGS: dict[str, dict[str, object]] = {
    "EMA-VQ (none)": {"neighborhood": "none"},
    "hard, tau 0.1": {"neighborhood": "hard"},
    "hard, tau 0.01": {"neighborhood": "hard", "tau": 0.01},
    "gaussian, tau 0.1": {"neighborhood": "gaussian"},
    "exponential, tau 0.1": {"neighborhood": "exponential"},
    "exponential, tau 0.01": {"neighborhood": "exponential", "tau": 0.01},
    "narrowing": {"neighborhood": "narrowing"},
    "narrowing, steps=3000": {"neighborhood": "narrowing", "steps": 3000},
    "default": {},
}


def layers() -> dict[str, Callable[[], nn.Module]]:
    def ours(options: dict[str, object]) -> Callable[[], nn.Module]:
        return lambda: KohonenVQ(D, K, **options)  # type: ignore[arg-type]

    made = {name: ours(options) for name, options in SETTINGS.items()}
    try:
        theirs = their("VectorQuantize")
    except MissingPackage as error:
        print(f"vector-quantize-pytorch is left out: {error}")
    else:
        made["vector-quantize-pytorch, defaults"] = lambda: theirs(dim=D, codebook_size=K)
    return made


def run(make: Callable[[], nn.Module], seed: int) -> list[dict[str, object]]:
    torch.manual_seed(seed)
    layer: Any = make()
    rows: list[dict[str, object]] = []
    for step in range(1, max(CHECKS) + 1):
        layer.train()(torch.randn(1, BATCH, D) + SHIFT)
        if step in CHECKS:
            x = torch.randn(1, 20_000, D) + SHIFT
            codes = layer.codebook
            index = torch.cdist(x[0], codes).argmin(1)
            rows.append({
                "updates": step,
                "used": index.unique().numel(),
                "drained": int((codes.mean(1) < SHIFT / 2).sum()),
                "error": f"{(x[0] - codes[index]).square().mean().item():.4f}",
            })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the rows to this CSV file")
    parser.add_argument("--seeds", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    facts = {
        "cpu": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }
    jobs = [(name, make, seed) for name, make in layers().items() for seed in range(arguments.seeds)]
    rows = []
    for name, make, seed in track(jobs, "settings x seeds"):
        rows += [{"layer": name, "seed": seed, **row, **facts} for row in run(make, seed)]
    for row in rows:
        print("  ".join(str(value) for value in list(row.values())[:6]))
    if arguments.out:
        with open(arguments.out, "w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
