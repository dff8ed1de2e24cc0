"""What fills a training step on a GPU: its kernels, by kind.

    python -m benchmarks.kernels --out benchmarks/results/kernels.csv

The VQ-VAE-2 step of benchmarks/training.py, in its CUDA graph. One row a kernel (names are cut), with what a step takes
of it: calls and milliseconds. They follow each other on one stream, but for the copy of the next images, which runs
beside them.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.training import CASES, GRAPHED, PAPER, QUANTIZERS, WAYS, Smooth, start, write
from topovq.tokenizer.training import TrainConfig
from topovq.tokenizer.training.record import environment
from topovq.tokenizer.training.step import fastest_convolutions

CASE, QUANTIZER = "vqvae2 256x256, batch 128", "kohonen hard"
STEPS = 5  # profiled
LONGEST_NAME = 100
BESIDE = "copy of the next images"
# What a kernel is for, by its name: the first that fits
KINDS = {
    BESIDE: r"Memcpy HtoD",
    "convolutions": r"xmma|cutlass|cask_plugin|nvjet|cublas|splitK|^_(widen|narrow|thin)_kernel",
    "sums of gradients": r"^triton_(red|per)_",  # of biases, and of the loss
    "activations, additions": r"^triton_poi_",
    "quantizers": r"^_(search|codes|gather|total|backward|counts|which|width|axis|points|dense)_kernel",
    "optimizer": r"^_\w+_kernel",
    "copies and zeros": r".",
}


def kind(kernel: str) -> str:
    return next(name for name, pattern in KINDS.items() if re.search(pattern, kernel))


def kernels(device: torch.device) -> Iterator[dict[str, Any]]:
    case = CASES[CASE]
    source = Smooth(case["size"], case["images"], case["resident"])
    config = TrainConfig(model=case["model"], model_options=PAPER, **QUANTIZERS[QUANTIZER]).resolve(device.type)
    step = start(source, config, WAYS[GRAPHED], device)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    found = [(event.device_time_total / 1e3 / STEPS, event.count / STEPS, event.key) for event in seen.key_averages()]
    for ms, calls, name in sorted(found, reverse=True):
        if ms > 0:
            row = {"case": CASE, "quantizer": QUANTIZER, "kind": kind(name), "kernel": name[:LONGEST_NAME]}
            yield {**row, "calls": calls, "ms": ms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the CSV file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a step's kernels can be seen on a CUDA device alone, and there is none")
    device = torch.device("cuda")
    with fastest_convolutions():
        write(arguments.out, kernels(device), environment(device, 1))


if __name__ == "__main__":
    main()
