"""Whole training steps: data, forward, backward, clipping, AdamW, codebook update and logging, per step.

    PYTHONPATH=src python -m benchmarks.training --out benchmarks/results

The images are random but smooth, of the size that the paper's data sets have. A step is timed as training runs it:
batches from the feed, figures read back every 100 steps, the clock read only where the device is idle. Each number is
the median of some stretches. Writes training.csv with the hardware and versions in it.
"""

from __future__ import annotations

import argparse
import csv
import gc
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from topovq.training import TrainConfig, World
from topovq.training.distributed import pick_device
from topovq.training.feed import open_feed
from topovq.training.record import environment
from topovq.training.step import TrainStep, fastest_convolutions, make_optimizer

LOG_EVERY = 100
PAPER = {"hidden": 128}
CASES: dict[str, dict[str, Any]] = {
    "vqvae 32x32, batch 256": {"model": "vqvae", "size": 32, "images": 40_053, "resident": True},
    "vqvae2 256x256, batch 128": {"model": "vqvae2", "size": 256, "images": 512, "resident": False},
}
QUANTIZERS: dict[str, dict[str, Any]] = {
    "kohonen": {"quantizer": "kohonen"},
    "kohonen hard": {"quantizer": "kohonen", "quantizer_options": {"neighborhood": "hard"}},
    "kohonen gaussian": {"quantizer": "kohonen", "quantizer_options": {"neighborhood": "gaussian"}},
    "ema": {"quantizer": "ema"},
    "gradient": {"quantizer": "gradient"},
}
# How the step is run: (bf16, compile, CUDA graph)
WAYS = {
    "eager fp32": (False, False, False),
    "eager bf16": (True, False, False),
    "compiled bf16, graph": (True, True, True),
}


class Smooth:
    """A data source of smooth random images, either whole on the device or streamed from memory."""

    name, mean, std = "smooth", (127.5,) * 3, (64.0,) * 3

    def __init__(self, size: int, images: int, resident: bool) -> None:
        self.size, self.stays = size, resident
        coarse = torch.rand(images, 3, 8, 8, generator=torch.Generator().manual_seed(0)) * 255
        parts = [F.interpolate(part, size=(size, size), mode="bilinear") for part in coarse.split(256)]
        self.images = torch.cat([part.to(torch.uint8) for part in parts])

    def resident(self) -> Tensor | None:
        return self.images if self.stays else None

    def indices(self, i: int, batch_size: int, seed: int) -> Tensor:
        return (torch.arange(batch_size) * 7919 + i * batch_size + seed) % len(self.images)

    def train(
        self, batch_size: int, *, seed: int, start: int = 0, rank: int = 0, world_size: int = 1
    ) -> Iterator[Tensor]:
        batches = [self.images[self.indices(i, batch_size, seed)] for i in range(4)]
        i = start
        while True:
            yield batches[i % len(batches)]
            i += 1


def measure(
    source: Smooth, config: TrainConfig, way: tuple[bool, bool, bool], steps: int, device: torch.device
) -> dict[str, float]:
    """Milliseconds a step (median and fastest stretch), images a second, peak memory in MiB, seconds to start."""
    bf16, compile, graph = way
    cuda = device.type == "cuda"
    world = World(0, 1, device)
    torch.manual_seed(0)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    model = config.build_model(source.size, source.mean, source.std).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.train()
    assert config.learning_rate is not None
    assert config.batch_size is not None
    optimizer = make_optimizer(model, config.learning_rate, 0.0, device)
    feed = open_feed(source, config.batch_size, 0, 0, world)
    pixels = config.batch_size * source.size**2
    step = TrainStep(model, optimizer, feed, world, bf16=bf16, compile=compile, graph=graph and cuda, pixels=pixels)
    for _ in range(5):
        step()
    if cuda:
        torch.cuda.synchronize()
    started = time.perf_counter() - began
    stretches, pending = [], step.read()
    for _ in range(5):
        began = time.perf_counter()
        for i in range(steps):
            step()
            if (i + 1) % LOG_EVERY == 0 or i + 1 == steps:
                pending.values()  # of the interval before, as in training
                pending = step.read()
        if cuda:
            torch.cuda.synchronize()
        stretches.append((time.perf_counter() - began) / steps)
    median = statistics.median(stretches)
    return {
        "ms": 1e3 * median,
        "ms_fastest": 1e3 * min(stretches),
        "images_per_second": config.batch_size / median,
        # From the first step on: a graph's memory is counted while it is captured, not while it is replayed.
        "peak_mib": torch.cuda.max_memory_allocated() / 2**20 if cuda else float("nan"),
        "reserved_mib": torch.cuda.memory_reserved() / 2**20 if cuda else float("nan"),
        "start_s": started,
        "loss": pending.values()["loss"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for training.csv")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--steps", type=int, default=200, help="steps of a stretch; a fifth of it for vqvae2")
    parser.add_argument("--cases", nargs="*", choices=["vqvae", "vqvae2"], default=["vqvae", "vqvae2"])
    parser.add_argument("--ways", nargs="*", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--quantizers", nargs="*", choices=list(QUANTIZERS), default=list(QUANTIZERS))
    arguments = parser.parse_args()
    device = pick_device(arguments.device)
    facts = environment(device, 1)
    rows = []
    for name, case in CASES.items():
        if case["model"] not in arguments.cases:
            continue
        source = Smooth(case["size"], case["images"], case["resident"])
        steps = arguments.steps if case["model"] == "vqvae" else max(1, arguments.steps // 5)
        for label, options in QUANTIZERS.items():
            # The slower ways are there for comparison: one quantizer shows it.
            ways = arguments.ways if label == "kohonen hard" else [w for w in arguments.ways if "graph" in w]
            for way in ways if label in arguments.quantizers else []:
                config = TrainConfig(model=case["model"], model_options=PAPER, **options).resolve(device.type)
                with fastest_convolutions():
                    figures = measure(source, config, WAYS[way], steps, device)
                rows.append({"case": name, "quantizer": label, "way": way, **figures})
                print(f"{name}, {label}, {way}: {figures['ms']:.3f} ms, {figures['peak_mib']:,.0f} MiB", flush=True)
                torch.compiler.reset()
                gc.collect()
                if device.type == "cuda":
                    torch.cuda.empty_cache()
    table = Table(title=f"Training steps on {facts['hardware']}, torch {facts['version_torch']}")
    for column in rows[0]:
        table.add_column(column)
    for row in rows:
        table.add_row(*(f"{value:,.3f}" if isinstance(value, float) else str(value) for value in row.values()))
    Console(width=160).print(table)
    arguments.out.mkdir(parents=True, exist_ok=True)
    with open(arguments.out / "training.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *facts])
        writer.writeheader()
        writer.writerows({**row, **facts} for row in rows)


if __name__ == "__main__":
    main()
