"""Whole training steps: data, forward, backward, clipping, AdamW, codebook update and logging, per step.

    python -m benchmarks.training --out benchmarks/results

Three files: training.csv has the paper's models with several quantizers and ways of running the step, scale.csv the
CIFAR-10 model over codebook sizes, at_once.csv several runs that share the device. The images are random but smooth, of
the size that the paper's data sets have. A step is timed as training runs it: batches from the feed, figures read back
every 100 steps, the clock read only where the device is idle. Each number is the median of some stretches.
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
from torch import Tensor

import experiments.peers  # noqa: F401  the names of vector-quantize-pytorch's quantizers
from topovq.distributed import pick_device
from topovq.tokenizer.models import can_be_graphed
from topovq.tokenizer.training import TrainConfig, World
from topovq.tokenizer.training.feed import open_feed
from topovq.tokenizer.training.record import environment
from topovq.tokenizer.training.step import TrainStep, fastest_convolutions, make_optimizer

LOG_EVERY = 100
WARM = 5  # steps before the clock runs
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
    "som-vae": {"quantizer": "som-vae"},
    "vector-quantize-pytorch": {"quantizer": "vqp"},
}
CODEBOOKS = (512, 1_024, 4_096, 16_384, 65_536, 262_144)
SCALED = ("ema", "kohonen hard", "kohonen")
PEERS = ("vqp", "vqp-rotation", "simvq", "fsq", "lfq")  # of the study `scale`
STUDIES = ["training", "scale", "at_once"]
AT_ONCE = (1, 2, 3, 4, 6, 8)
# How the step is run: (bf16, compile, CUDA graph)
WAYS = {
    "eager fp32": (False, False, False),
    "eager bf16": (True, False, False),
    "compiled bf16, graph": (True, True, True),
}
GRAPHED = "compiled bf16, graph"


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


def start(
    source: Smooth, config: TrainConfig, way: tuple[bool, bool, bool], device: torch.device, seed: int = 0
) -> TrainStep:
    """A step that is compiled, captured and has run."""
    bf16, compile, graph = way
    world = World(0, 1, device)
    torch.manual_seed(seed)
    model = config.build_model(source.size, source.mean, source.std).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.train()
    assert config.learning_rate is not None
    assert config.batch_size is not None
    optimizer = make_optimizer(model, config.learning_rate, 0.0, device)
    feed = open_feed(source, config.batch_size, seed, 0, world)
    graph = graph and device.type == "cuda"
    if graph and not can_be_graphed(model):
        raise RuntimeError("its quantizer waits for the device: no graph can hold it")
    step = TrainStep(model, optimizer, feed, world, bf16=bf16, compile=compile, graph=graph)
    for _ in range(WARM):
        step()
    finish(device)
    return step


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(
    source: Smooth, config: TrainConfig, way: tuple[bool, bool, bool], steps: int, device: torch.device
) -> dict[str, float]:
    """Milliseconds a step (median and fastest stretch), images a second, peak memory in MiB, seconds to start."""
    cuda = device.type == "cuda"
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    step = start(source, config, way, device)
    started = time.perf_counter() - began
    return timed(step, config, steps, device) | {"start_s": started}


def timed(step: TrainStep, config: TrainConfig, steps: int, device: torch.device) -> dict[str, float]:
    cuda = device.type == "cuda"
    for _ in range(WARM):
        step()
    stretches, pending = [], step.read()
    for _ in range(5):
        began = time.perf_counter()
        for i in range(steps):
            step()
            if (i + 1) % LOG_EVERY == 0 or i + 1 == steps:
                pending.values()  # of the interval before, as in training
                pending = step.read()
        finish(device)
        stretches.append((time.perf_counter() - began) / steps)
    median = statistics.median(stretches)
    assert config.batch_size is not None
    return {
        "ms": 1e3 * median,
        "ms_fastest": 1e3 * min(stretches),
        "images_per_second": config.batch_size / median,
        # From the first step on: a graph's memory is counted while it is captured, not while it is replayed.
        "peak_mib": torch.cuda.max_memory_allocated() / 2**20 if cuda else float("nan"),
        "reserved_mib": torch.cuda.memory_reserved() / 2**20 if cuda else float("nan"),
        "loss": pending.values()["loss"],
    }


def measure_at_once(source: Smooth, config: TrainConfig, steps: int, device: torch.device) -> Iterator[dict[str, Any]]:
    """Milliseconds per step of one run, with more and more runs that take turns, each on a stream of its own."""
    lanes: list[tuple[TrainStep, torch.cuda.Stream]] = []
    for runs in AT_ONCE:
        while len(lanes) < runs:
            lanes.append((start(source, config, WAYS[GRAPHED], device, seed=len(lanes)), torch.cuda.Stream()))
        stretches = []
        for _ in range(5):
            began = time.perf_counter()
            for _ in range(steps):
                for step, stream in lanes:
                    with torch.cuda.stream(stream):
                        step()
            finish(device)
            stretches.append((time.perf_counter() - began) / steps / runs)
        yield {"runs": runs, "ms_per_step_of_a_run": 1e3 * statistics.median(stretches)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the CSV files")
    parser.add_argument("--studies", nargs="*", choices=STUDIES, default=STUDIES)
    parser.add_argument("--peers", action="store_true", help="in scale.csv also vector-quantize-pytorch's quantizers")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--steps", type=int, default=200, help="steps of a stretch; a fifth of it for vqvae2")
    parser.add_argument("--cases", nargs="*", choices=["vqvae", "vqvae2"], default=["vqvae", "vqvae2"])
    parser.add_argument("--ways", nargs="*", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--quantizers", nargs="*", choices=list(QUANTIZERS), default=list(QUANTIZERS))
    arguments = parser.parse_args()
    device = pick_device(arguments.device)
    facts = environment(device, 1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    with fastest_convolutions():
        if "training" in arguments.studies:
            write(arguments.out / "training.csv", the_models(arguments, device), facts)
        config = TrainConfig(model="vqvae", model_options=PAPER, **QUANTIZERS["kohonen hard"]).resolve(device.type)
        case = CASES["vqvae 32x32, batch 256"]
        source = Smooth(case["size"], case["images"], case["resident"])
        if "scale" in arguments.studies:
            write(arguments.out / "scale.csv", the_codebooks(source, arguments.steps, arguments.peers, device), facts)
        if "at_once" in arguments.studies and device.type == "cuda":
            write(arguments.out / "at_once.csv", measure_at_once(source, config, arguments.steps, device), facts)


def the_models(arguments: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    for name, case in CASES.items():
        if case["model"] not in arguments.cases:
            continue
        source = Smooth(case["size"], case["images"], case["resident"])
        steps = arguments.steps if case["model"] == "vqvae" else max(1, arguments.steps // 5)
        for label in arguments.quantizers:
            # The slower ways are there for comparison: one quantizer shows it.
            ways = arguments.ways if label == "kohonen hard" else [w for w in arguments.ways if w == GRAPHED]
            if label == "vector-quantize-pytorch":  # it waits for the device, so that no graph can hold it
                ways = [w for w in arguments.ways if w == "eager bf16"]
            for way in ways:
                config = TrainConfig(model=case["model"], model_options=PAPER, **QUANTIZERS[label])
                figures = measure(source, config.resolve(device.type), WAYS[way], steps, device)
                yield {"case": name, "quantizer": label, "way": way, **figures}


def the_codebooks(source: Smooth, steps: int, peers: bool, device: torch.device) -> Iterator[dict[str, Any]]:
    """Ours in a graph; the others in one where that is possible, else eagerly, and not at all where memory ends."""
    for size in CODEBOOKS:
        for label in (*SCALED, *PEERS * peers):
            options = QUANTIZERS.get(label, {"quantizer": label})
            config = TrainConfig(model="vqvae", model_options=PAPER, codebook_size=size, **options)
            for way in (GRAPHED, "eager bf16") if label in PEERS else (GRAPHED,):
                try:
                    figures = measure(source, config.resolve(device.type), WAYS[way], max(20, steps // 4), device)
                except (RuntimeError, torch.OutOfMemoryError) as error:
                    if label not in PEERS:
                        raise
                    print(f"{label}, {size:,} codes, {way}: {str(error).splitlines()[0]}", flush=True)
                else:
                    yield {"codebook_size": size, "quantizer": label, "way": way, **figures}
                    break


def write(path: Path, rows: Iterator[dict[str, Any]], facts: dict[str, Any]) -> None:
    """Print each row and append it to the file as it comes."""
    with open(path, "w", newline="") as file:
        writer = None
        for row in rows:
            if writer is None:
                writer = csv.DictWriter(file, [*row, *facts])
                writer.writeheader()
            writer.writerow({**row, **facts})
            file.flush()
            shown = (f"{value:,.3f}" if isinstance(value, float) else str(value) for value in row.values())
            print(path.name, *shown, sep="  ", flush=True)


if __name__ == "__main__":
    main()
