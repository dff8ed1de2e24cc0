"""Vector-quantization layers side by side: forward + backward + update, medians, peak memory, and the floor under them.

    python -m benchmarks.layers --out benchmarks/results/layers.csv      on CUDA: this library, its peers, a roofline
    python -m benchmarks.layers --device cpu                             the search on one and two threads

Every row is measured in this run. Peers that are not installed, or whose N x K tensors do not fit, are named and left
out. Before anything is timed, the kernels are checked against float64.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.layers_check import check, check_edges, check_updates
from benchmarks.layers_peers import layers
from topovq import KohonenVQ
from topovq.ops.accumulate import accumulate
from topovq.ops.search import nearest

COLUMNS = (
    *("library", "mode", "neighborhood", "N", "K", "d", "dtype", "what", "median_ms", "peak_mib", "roofline_ms"),
    *("gpu", "driver", "torch", "triton", "commit", "date"),
)
SHAPES = [
    (524_288, 512, 64),
    (131_072, 8_192, 256),
    (65_536, 65_536, 64),
    (65_536, 262_144, 64),
    (16_384, 512, 64),
    (65_536, 1_048_576, 64),
]
STEP = "fwd+bwd+update"
ORDERED = "assignment, ordered codes"
MOST_SECONDS = 2.0  # a layer slower than this per step is timed once


def one_step(layer: nn.Module, x: Tensor, grad: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    takes_batches = type(layer).__module__.startswith("vector_quantize")
    inputs = x[None] if takes_batches else x

    def step() -> tuple[Tensor, ...]:
        quantized, index, loss = layer(inputs)
        (dx,) = torch.autograd.grad((quantized, loss), x, (grad.view_as(quantized), torch.ones_like(loss)))
        return quantized, index, dx

    return step


def captured(step: Callable[[], object]) -> Callable[[], object]:
    """The step as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def median_ms(call: Callable[[], object], seconds: float = 0.2) -> float:
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    once = time.perf_counter() - start
    if once > MOST_SECONDS:
        return once * 1e3
    times = []
    for _ in range(max(5, min(200, int(seconds / once)))):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        call()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last))
    return statistics.median(times)


def peak_mib(step: Callable[[], tuple[Tensor, ...]]) -> float:
    """The most memory a step holds beyond the layer, its inputs and its outputs."""
    outputs = sum(t.numel() * t.element_size() for t in step())
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return max(0.0, torch.cuda.max_memory_allocated() - before - outputs) / 2**20


def ceilings() -> tuple[float, float]:
    """(bytes a second of a large copy, read and write counted; bf16 operations a second of a large matrix product)."""
    a = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    bandwidth = 2 * a.numel() / (median_ms(lambda: b.copy_(a)) / 1e3)
    m = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    return bandwidth, 2 * 8192**3 / (median_ms(lambda: m @ m) / 1e3)


def floor_ms(n: int, k: int, d: int, size: int, exact: bool, bandwidth: float, rate: float) -> float:
    """Bytes: x and q and their gradients once, x and q once more in the backward pass, codes and their statistics.

    Operations: one product in float16, three for float32's accuracy.
    """
    moved = 6 * n * d * size + 8 * n + 10 * k * d * 4
    return max(moved / bandwidth, 2 * n * k * d * (3 if exact else 1) / rate) * 1e3


class Table:
    """Rows, printed and appended to the CSV file as they are measured."""

    def __init__(self, out: Path | None, **common: str) -> None:
        self.out, self.common, self.rows = out, common, 0
        if out:
            out.write_text(",".join(COLUMNS) + "\n")

    def add(self, library: str, mode: str, neighborhood: str, shape: tuple[int, int, int], what: str, ms: float,
            mib: float | None = None, floor: float | None = None, dtype: str = "float32") -> None:  # fmt: skip
        n, k, d = shape
        row = {"library": library, "mode": mode, "neighborhood": neighborhood, "N": n, "K": k, "d": d,
               "dtype": dtype, "what": what,
               "median_ms": f"{ms:.4f}", "peak_mib": "" if mib is None else f"{mib:.1f}",
               "roofline_ms": "" if floor is None else f"{floor:.4f}", **self.common}  # fmt: skip
        memory = "" if mib is None else f"{mib:10.1f} MiB"
        below = "" if floor is None else f"{floor:9.3f} floor"
        print(f"  {library:<24}{mode:<16}{neighborhood:<12}{what:<27}{ms:9.3f} ms{memory}{below}", flush=True)
        self.rows += 1
        if self.out:
            with open(self.out, "a", newline="") as file:
                csv.DictWriter(file, COLUMNS).writerow(row)


def run_cuda(arguments: argparse.Namespace) -> int:
    import triton

    smi = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True
    )
    table = Table(
        arguments.out,
        gpu=torch.cuda.get_device_name(),
        driver=smi.stdout.strip(),
        torch=torch.__version__,
        triton=triton.__version__,
        commit=arguments.commit,
        date=datetime.date.today().isoformat(),
    )
    check_edges()
    check_updates()
    bandwidth, rate = ceilings()
    print(f"{bandwidth / 1e12:.2f} TB/s copy, {rate / 1e12:.0f} TFLOP/s bf16", flush=True)
    for shape in SHAPES:
        print("N={:,} K={:,} d={}".format(*shape), flush=True)
        check(*shape)
        for (library, mode, neighborhood), make in layers(*shape[1:]).items():
            reason = too_large(library, *shape)
            if reason:
                print(f"  {library:<24}left out: {reason}")
                continue
            try:
                time_layer(table, library, mode, neighborhood, shape, make, bandwidth, rate)
            except torch.OutOfMemoryError:
                print(f"  {library:<24}left out: out of memory")
            torch.cuda.empty_cache()
        time_flash_kmeans(table, shape, bandwidth, rate)
        time_accumulate(table, shape)
        torch.cuda.empty_cache()
    return table.rows


def too_large(library: str, n: int, k: int, d: int) -> str | None:
    if library == "topovq":
        return None
    square = k * k if library == "authors-formulation" else 0
    if (3 * n * k + 3 * square) * 4 > torch.cuda.mem_get_info()[0]:
        return "its N x K or K x K tensors do not fit"
    return "N x K times K x K would take over 5 s" if 2.0 * n * square / 4e13 > 5 else None


def time_layer(
    table: Table, library: str, mode: str, neighborhood: str, shape: tuple[int, int, int],
    make: Callable[[], nn.Module], bandwidth: float, rate: float,
) -> None:  # fmt: skip
    n, k, d = shape
    torch.manual_seed(0)
    x = torch.randn(n, d, device="cuda", requires_grad=True)
    layer = make().cuda()
    step = one_step(layer, x, torch.randn(n, d, device="cuda"))
    floor = floor_ms(n, k, d, 4, mode != "fast", bandwidth, rate)
    mib = peak_mib(step)
    table.add(library, mode, neighborhood, shape, STEP, median_ms(step), mib, floor)
    if isinstance(layer, KohonenVQ):
        table.add(library, mode + "+graph", neighborhood, shape, STEP, median_ms(captured(step)), mib, floor)
        if neighborhood == ("none" if mode == "exact" else "hard"):
            codes, points = layer.codebook.clone(), x.detach()
            search = partial(nearest, points, codes, precision=mode)
            table.add(library, mode, "none", shape, "assignment", median_ms(search))
            table.add(library, mode + "+graph", "none", shape, "assignment", median_ms(captured(search)))
            codes = codes_on_a_map(layer.grid.shape, d)
            points = codes[torch.randint(k, (n,), device="cuda")] + 0.1 * torch.randn(n, d, device="cuda")
            search = partial(nearest, points, codes, precision=mode)
            table.add(library, mode + "+graph", "none", shape, ORDERED, median_ms(captured(search)))


def codes_on_a_map(shape: tuple[int, ...], d: int) -> Tensor:
    """Codes [K, d] that change little from place to place, as those of a trained map do."""
    axes = [torch.linspace(0, 1, n, device="cuda") for n in shape]
    places_KA = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).flatten(0, -2)
    waves_AD = 4 * torch.randn(len(shape), d, device="cuda")
    codes_KD = torch.sin(places_KA @ waves_AD + 6.28 * torch.rand(d, device="cuda"))
    return codes_KD + 0.05 * torch.randn_like(codes_KD)


def time_accumulate(table: Table, shape: tuple[int, int, int]) -> None:
    """Sums and counts alone, with all codes chosen alike and with one code chosen by all."""
    n, k, d = shape
    x = torch.randn(n, d, device="cuda")
    chosen = {"uniform": torch.randint(k, (n,), device="cuda"), "one code": torch.full((n,), k // 2, device="cuda")}
    for what, index in chosen.items():
        for mode in ("atomic", "deterministic"):
            torch.use_deterministic_algorithms(mode == "deterministic")
            ms = median_ms(captured(lambda index=index: accumulate(x, index, k)))  # type: ignore[misc]
            torch.use_deterministic_algorithms(False)
            table.add("topovq", mode, "none", shape, f"accumulate, {what}", ms)


def time_flash_kmeans(table: Table, shape: tuple[int, int, int], bandwidth: float, rate: float) -> None:
    try:
        from flash_kmeans.assign_euclid_triton import euclid_assign_triton
    except ImportError as error:
        print(f"  flash-kmeans is left out: {error}")
        return
    n, k, d = shape
    for mode, dtype in (("tf32", torch.float32), ("fp16", torch.float16)):
        points = torch.randn(1, n, d, device="cuda", dtype=dtype)
        centers = torch.randn(1, k, d, device="cuda", dtype=dtype)
        squares = points.float().square().sum(-1)
        call = partial(euclid_assign_triton, points, centers, squares)
        name = str(dtype).split(".")[1]
        table.add("flash-kmeans", mode, "none", shape, "assignment", median_ms(call), dtype=name)
        table.add("flash-kmeans", mode + "+graph", "none", shape, "assignment", median_ms(captured(call)), dtype=name)


def run_cpu(arguments: argparse.Namespace) -> int:
    """The search alone: blocks against the whole N x K matrix."""
    table = Table(
        arguments.out,
        gpu="",
        driver=platform.processor() or platform.machine(),
        torch=torch.__version__,
        triton="",
        commit=arguments.commit,
        date=datetime.date.today().isoformat(),
    )
    for n, k, d in [(16_384, 512, 64), (16_384, 8_192, 64), (65_536, 1_024, 32)]:
        print(f"N={n:,} K={k:,} d={d}")
        x, codes = torch.randn(n, d), torch.randn(k, d)
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for library, search in (("topovq", nearest), ("plain-torch", whole_matrix)):
                search(x, codes)
                times = []
                for _ in range(5):
                    start = time.perf_counter()
                    search(x, codes)
                    times.append(time.perf_counter() - start)
                ms = statistics.median(times) * 1e3
                peak = host_peak_mib(lambda search=search, x=x, codes=codes: search(x, codes))
                table.add(library, f"cpu-{threads}-threads", "none", (n, k, d), "assignment", ms, peak)
    return table.rows


def host_peak_mib(call: Callable[[], object]) -> float:
    """The most memory that torch allocates on the host during a call, beyond what it keeps in the end."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
        result = call()
    held = peak = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    del result
    return (peak - held) / 2**20


def whole_matrix(x: Tensor, codes: Tensor) -> Tensor:
    return (codes.square().sum(1) - 2 * x @ codes.T).argmin(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="write the rows to this CSV file")
    parser.add_argument(
        "--commit", default=os.environ.get("COMMIT") or _commit(), help="what the rows say was measured"
    )
    arguments = parser.parse_args()
    rows = run_cuda(arguments) if arguments.device == "cuda" else run_cpu(arguments)
    print(f"{rows} rows" + (f" in {arguments.out}" if arguments.out else ""), file=sys.stderr)


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
