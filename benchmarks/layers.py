"""Vector-quantization layers side by side: forward + backward + update, memory, and the floor under them.

    python -m benchmarks.layers --out benchmarks/results/layers.csv      on CUDA: this library, its peers, a roofline
    python -m benchmarks.layers --shapes 16384x512x64 --runs compiled    some rows; those in the file stay
    python -m benchmarks.layers --device cpu                             the search on one and two threads

Every row is measured in this run. What cannot run has a row that says why. `run` is how a step is started: eager;
compiled by torch.compile, in its default mode or with "reduce-overhead"; or captured in a CUDA graph. Ours is compiled
with fullgraph=True; the peers may break the graph. A step is timed by the host's clock, as users see it: the median of
stretches of steps in a row. A search or a sum alone is timed by the clock of the GPU (column `clock`).
Before anything is timed, the kernels are checked against float64. A run that is stopped, or ends by --limit, goes on
where it stopped when it is started again.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.compiling import compiled, graph_breaks, told
from benchmarks.layers_check import check, check_all
from benchmarks.layers_peers import LIBRARIES, layers
from benchmarks.layers_table import Shape, Table
from benchmarks.layers_timing import captured, ceilings, device_ms, floor_ms, host_peak_mib, peak_mib, wall_ms
from topovq import KohonenVQ
from topovq.ops.accumulate import accumulate
from topovq.ops.search import nearest

SMALL: Shape = (16_384, 512, 64)
# What people train: few vectors a step, or many short codes
COMMON: list[Shape] = [
    SMALL,
    (8_192, 4_096, 256),
    (32_768, 16_384, 8),
    (32_768, 16_384, 32),
    (100_000, 1_000, 96),
    (262_144, 1_024, 128),
    (65_536, 131_072, 16),
]
LARGE: list[Shape] = [
    (524_288, 512, 64),
    (131_072, 8_192, 256),
    (65_536, 65_536, 64),
    (65_536, 262_144, 64),
    (65_536, 1_048_576, 64),
]
STEP, SEARCH, ORDERED = "fwd+bwd+update", "assignment", "assignment, ordered codes"
RUNS = ("eager", "compiled", "reduce-overhead", "graph")
COMPILED = RUNS[1:3]
RECOMMENDED = "ride"
FIRST = ("topovq", "nothing", "plain-torch")  # the others are slow
LAST_COMPILATION = 25.0  # seconds before the limit: one that starts later would not end before it


def planned(shape: Shape, library: str, mode: str, neighborhood: str, run: str) -> bool:
    """Whether a row is measured where nobody chose the shapes. To compile a layer takes 5 to 20 s, so few are."""
    if run not in COMPILED:
        return True
    if library == "topovq":
        return mode == "exact" and shape in COMMON and (neighborhood == RECOMMENDED or shape == SMALL)
    return shape == SMALL or (library == "plain-torch" and shape == (32_768, 16_384, 8))


def timed(shape: Shape, library: str, mode: str, kind: str) -> bool:
    """Whether a layer is timed at a shape: with all neighborhoods where they are drawn, else those that people use."""
    drawn = shape in LARGE or shape == SMALL
    if library == "nothing":
        return shape == SMALL
    if library != "topovq":
        return True
    if mode == "fast":
        return kind == ("hard" if drawn else RECOMMENDED)
    return drawn or kind in ("none", "gaussian", RECOMMENDED)


def one_step(
    layer: nn.Module, called: Callable[..., tuple[Tensor, ...]], x: Tensor, grad: Tensor
) -> Callable[[], tuple[Tensor, ...]]:
    """A step of a layer that is called as `called`: itself, or what the compiler made of it."""
    takes_batches = type(layer).__module__.startswith("vector_quantize")
    inputs = x[None] if takes_batches else x

    def step() -> tuple[Tensor, ...]:
        quantized, index, loss = called(inputs)
        (dx,) = torch.autograd.grad((quantized, loss), x, (grad.view_as(quantized), torch.ones_like(loss)))
        return quantized, index, dx

    return step


class Bench:
    """The rows of one device: what is timed, where it is written, and until when."""

    def __init__(self, table: Table, device: torch.device, ends: float, ceiling: tuple[float, float] | None) -> None:
        self.table, self.device, self.ends, self.ceiling = table, device, ends, ceiling
        self.left: list[str] = []  # rows that the limit left out

    def in_time(self, what: str, seconds: float = 0.0) -> bool:
        late = time.perf_counter() + seconds > self.ends
        if late:
            self.left.append(what)
        return not late

    def layer(self, name: tuple[str, str, str], make: Callable[[], nn.Module], shape: Shape, runs: list[str]) -> None:
        """The rows of a layer at a shape, one for each way to run it; a row without a time says why."""
        library, mode, kind = name
        runs = [run for run in runs if not self.table.has(library, mode, run, kind, shape, STEP)]
        add = partial(self.table.add, library, mode)
        cuda = self.device.type == "cuda"
        if runs and cuda and (reason := too_large(library, *shape)):
            for run in runs:
                add(run, kind, shape, STEP, None, note=reason)
            return
        layer, mib = None, None
        floor = floor_ms(*shape, 4, *self.ceiling) if self.ceiling else None
        for run in runs:
            compiles = run in COMPILED
            if not self.in_time(f"{library} {kind} {run} at {shape}", LAST_COMPILATION if compiles else 0):
                continue
            try:
                if layer is None:
                    torch.manual_seed(0)
                    x = torch.randn(shape[0], shape[2], device=self.device, requires_grad=True)
                    grad = torch.randn(shape[0], shape[2], device=self.device)
                    layer = make().to(self.device)
                    eager = one_step(layer, layer, x, grad)
                    eager()  # codes that start from vectors have started, and are not compiled twice
                    mib = peak_mib(eager) if cuda else None
                if compiles:
                    step = one_step(layer, compiled(layer, run, library == "topovq"), x, grad)
                    ms, note = wall_ms(step, self.device, warm=8), graph_breaks()
                else:
                    ms, note = wall_ms(captured(eager) if run == "graph" else eager, self.device), ""
            except Exception as error:  # whatever a library raises is an answer; ours is checked before
                add(run, kind, shape, STEP, None, note=told(error))
            else:
                add(run, kind, shape, STEP, ms, None if compiles else mib, floor, note=note)
            if compiles:
                torch._dynamo.reset()

    def search(self, layer: nn.Module, mode: str, shape: Shape) -> None:
        """The search alone, of random codes and of codes that lie in order on their map."""
        assert isinstance(layer, KohonenVQ)
        n, k, d = shape
        codes, x = layer.codebook.detach().clone(), torch.randn(n, d, device=self.device)
        on_map = codes_on_a_map(layer.grid.shape, d, self.device)[:k]
        near = on_map[torch.randint(k, (n,), device=self.device)] + 0.1 * torch.randn(n, d, device=self.device)
        add = partial(self.table.add, "topovq", mode, clock="device")
        call = partial(nearest, x, codes, precision=mode)
        add("eager", "none", shape, SEARCH, device_ms(call))
        add("graph", "none", shape, SEARCH, device_ms(captured(call)))
        add("graph", "none", shape, ORDERED, device_ms(captured(partial(nearest, near, on_map, precision=mode))))

    def accumulate(self, shape: Shape) -> None:
        """Sums and counts alone, with all codes chosen alike and with one code chosen by all."""
        n, k, d = shape
        x = torch.randn(n, d, device=self.device)
        one_K = torch.full((n,), k // 2, device=self.device)
        for what, index in {"uniform": torch.randint(k, (n,), device=self.device), "one code": one_K}.items():
            for ending in ("", ", deterministic"):
                torch.use_deterministic_algorithms(bool(ending))
                ms = device_ms(captured(partial(accumulate, x, index, k)))
                torch.use_deterministic_algorithms(False)
                self.table.add(
                    "topovq", "exact", "graph", "none", shape, f"accumulate, {what}{ending}", ms, clock="device"
                )

    def flash_kmeans(self, shape: Shape) -> None:
        try:
            from flash_kmeans.assign_euclid_triton import euclid_assign_triton
        except ImportError:
            return
        n, k, d = shape
        for name, dtype in (("tf32", torch.float32), ("float16", torch.float16)):
            points = torch.randn(1, n, d, device=self.device, dtype=dtype)
            centers = torch.randn(1, k, d, device=self.device, dtype=dtype)
            call = partial(euclid_assign_triton, points, centers, points.float().square().sum(-1))
            add = partial(self.table.add, "flash-kmeans", "fast", dtype=name, clock="device")
            add("eager", "none", shape, SEARCH, device_ms(call))
            add("graph", "none", shape, SEARCH, device_ms(captured(call)))


def too_large(library: str, n: int, k: int, d: int) -> str | None:
    if library == "topovq":
        return None
    square = k * k if library == "authors-formulation" else 0
    if (3 * n * k + 3 * square) * 4 > torch.cuda.mem_get_info()[0]:
        return "its N x K or K x K tensors do not fit"
    return "N x K times K x K would take over 5 s" if 2.0 * n * square / 4e13 > 5 else None


def codes_on_a_map(shape: tuple[int, ...], d: int, device: torch.device) -> Tensor:
    """Codes [K, d] that change little from place to place, as those of a trained map do."""
    axes = [torch.linspace(0, 1, n, device=device) for n in shape]
    places_KA = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).flatten(0, -2)
    waves_AD = 4 * torch.randn(len(shape), d, device=device)
    codes_KD = torch.sin(places_KA @ waves_AD + 6.28 * torch.rand(d, device=device))
    return codes_KD + 0.05 * torch.randn_like(codes_KD)


def run_cuda(arguments: argparse.Namespace, began: float) -> Table:
    import triton

    device = torch.device("cuda")
    smi = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True
    )
    facts = {"gpu": torch.cuda.get_device_name(), "driver": smi.stdout.strip(), "triton": triton.__version__}
    table = open_table(arguments, **facts)
    if arguments.check != "none":
        check_all(arguments.check)
    print(f"{time.perf_counter() - began:.0f} s until the first row", flush=True)
    bench = Bench(table, device, began + arguments.limit, ceilings())
    print("{:.2f} TB/s copy, {:.0f} TFLOP/s bf16".format(*(value / 1e12 for value in bench.ceiling)), flush=True)  # type: ignore[union-attr]
    for shape, runs, libraries in stages(arguments):
        made = {name: make for name, make in layers(*shape[1:]).items() if name[0] in libraries}
        print("N={:,} K={:,} d={}".format(*shape), flush=True)
        if "eager" in runs and "topovq" in libraries and arguments.check != "none" and bench.in_time(f"all of {shape}"):
            check(*shape)
        for name, make in made.items():
            if not timed(shape, *name):
                continue
            wanted = [run for run in runs if arguments.shapes or planned(shape, *name, run)]
            bench.layer(name, make, shape, wanted)
            torch.cuda.empty_cache()
        if "eager" in runs:
            alone(bench, shape, libraries)
    if bench.left:
        print(
            f"left out by --limit {arguments.limit:.0f}: {len(bench.left)} rows, from {bench.left[0]} on; start again"
        )
    return table


def alone(bench: Bench, shape: Shape, libraries: list[str]) -> None:
    """What is no whole step: searches and sums. One that fails has a row that says why."""
    made = layers(*shape[1:])
    last = "accumulate, one code, deterministic"  # of the rows of a call, the one that is written last
    calls: list[tuple[str, str, str, str, Callable[[], None]]] = [
        *(
            ("topovq", mode, ORDERED, "float32",
             partial(lambda mode: bench.search(made["topovq", mode, "none"]().to(bench.device), mode, shape), mode))
            for mode in ("exact", "fast")
        ),
        ("topovq", "exact", last, "float32", partial(bench.accumulate, shape)),
        ("flash-kmeans", "fast", SEARCH, "float16", partial(bench.flash_kmeans, shape)),
    ]  # fmt: skip
    for library, mode, what, dtype, call in calls:
        where = (library, mode, "graph", "none", shape, what)
        if library not in libraries or bench.table.has(*where, dtype) or not bench.in_time(f"{what} at {shape}"):
            continue
        try:
            call()
        except Exception as error:
            torch.use_deterministic_algorithms(False)
            bench.table.add(*where, None, dtype=dtype, note=told(error))
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()


def stages(arguments: argparse.Namespace) -> Iterator[tuple[Shape, list[str], list[str]]]:
    """What is done in turn, (shape, runs, libraries): this library beside plain torch; what is compiled; the others."""
    plain = [run for run in arguments.runs if run not in COMPILED]
    slow = [run for run in arguments.runs if run in COMPILED]
    first = [library for library in arguments.libraries if library in FIRST]
    others = [library for library in arguments.libraries if library not in FIRST]
    shapes = arguments.shapes or [*COMMON, *LARGE]
    to_compile = arguments.shapes or COMMON
    for runs, libraries, some in (
        (plain, first, shapes),
        (slow, arguments.libraries, to_compile),
        (plain, others, shapes),
    ):
        if runs and libraries:
            yield from ((shape, runs, libraries) for shape in some)


def run_cpu(arguments: argparse.Namespace) -> Table:
    """The search alone: blocks against the whole N x K matrix."""
    table = open_table(arguments, gpu="", driver=platform.processor() or platform.machine(), triton="")
    device = torch.device("cpu")
    for n, k, d in arguments.shapes or [(16_384, 512, 64), (16_384, 8_192, 64), (65_536, 1_024, 32)]:
        print(f"N={n:,} K={k:,} d={d}")
        x, codes = torch.randn(n, d), torch.randn(k, d)
        for what, threads in ((f"{SEARCH}, 1 thread", 1), (f"{SEARCH}, 2 threads", 2)):
            torch.set_num_threads(threads)
            for library, search in (("topovq", nearest), ("plain-torch", whole_matrix)):
                if table.has(library, "exact", "eager", "none", (n, k, d), what):
                    continue
                call: Callable[[], Tensor] = partial(search, x, codes)
                ms = wall_ms(call, device, warm=1)
                table.add(library, "exact", "eager", "none", (n, k, d), what, ms, host_peak_mib(call))
    return table


def whole_matrix(x: Tensor, codes: Tensor) -> Tensor:
    return (codes.square().sum(1) - 2 * x @ codes.T).argmin(1)


def open_table(arguments: argparse.Namespace, **facts: str) -> Table:
    today = datetime.date.today().isoformat()
    return Table(arguments.out, arguments.fresh, **facts, torch=torch.__version__, commit=arguments.commit, date=today)


def as_shape(text: str) -> Shape:
    n, k, d = map(int, text.lower().split("x"))
    return n, k, d


def main(argv: list[str] | None = None) -> None:
    began = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="the CSV file: what it has of this commit is not measured again")
    parser.add_argument("--fresh", action="store_true", help="forget what is in the file")
    parser.add_argument("--shapes", nargs="*", type=as_shape, help="NxKxd, each with all its compiled rows")
    parser.add_argument("--runs", nargs="*", choices=RUNS, default=list(RUNS))
    parser.add_argument("--libraries", nargs="*", choices=LIBRARIES, default=list(LIBRARIES))
    parser.add_argument("--check", choices=["device", "host", "none"], default="device", help="where float64 runs")
    parser.add_argument("--limit", type=float, default=255.0, help="seconds after which nothing new is started")
    parser.add_argument("--commit", default=os.environ.get("COMMIT") or commit(), help="what the rows say was measured")
    arguments = parser.parse_args(argv)
    table = run_cuda(arguments, began) if arguments.device == "cuda" else run_cpu(arguments)
    print(f"{table.added} rows" + (f" in {arguments.out}" if arguments.out else ""), file=sys.stderr)


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
