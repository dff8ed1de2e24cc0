"""Clocks for benchmarks/layers.py: a step as users see it, a kernel alone, memory, and the floor under a step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

MOST_SECONDS = 2.0  # a step slower than this is timed once
SLOW_SECONDS = 0.05  # a step slower than this is timed in few stretches
STRETCHES, FEW = 7, 3


def finish(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wall_ms(call: Callable[[], object], device: torch.device, seconds: float = 0.25, warm: int = 3) -> float:
    """Milliseconds of a call by the host's clock: the median of some stretches, each the mean of calls in a row.

    The device is waited for before and after a stretch, not inside of it.
    """
    for _ in range(warm):
        call()
    finish(device)
    start = time.perf_counter()
    call()
    finish(device)
    once = time.perf_counter() - start
    if once > MOST_SECONDS:
        return once * 1e3
    calls = max(1, min(100, int(seconds / STRETCHES / once)))
    stretches = []
    for _ in range(STRETCHES if once < SLOW_SECONDS else FEW):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        finish(device)
        stretches.append((time.perf_counter() - start) / calls)
    return statistics.median(stretches) * 1e3


def device_ms(call: Callable[[], object], seconds: float = 0.1) -> float:
    """Milliseconds of a call by the clock of the GPU: the median over calls, each of them waited for."""
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


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """The call as a CUDA graph. Raises RuntimeError, before anything is captured, where it waits for the device."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
        torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def peak_mib(step: Callable[[], tuple[Tensor, ...]]) -> float:
    """The most memory a step holds on the GPU beyond the layer, its inputs and its outputs."""
    outputs = sum(t.numel() * t.element_size() for t in step())
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return max(0.0, torch.cuda.max_memory_allocated() - before - outputs) / 2**20


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


def ceilings() -> tuple[float, float]:
    """(bytes a second of a large copy, read and write counted; bf16 operations a second of a large matrix product)."""
    a = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    bandwidth = 2 * a.numel() / (device_ms(lambda: b.copy_(a)) / 1e3)
    m = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    return bandwidth, 2 * 8192**3 / (device_ms(lambda: m @ m) / 1e3)


def floor_ms(n: int, k: int, d: int, size: int, bandwidth: float, rate: float) -> float:
    """Bytes: x and q and their gradients once, x and q once more in the backward pass, codes and their statistics.

    Operations: one product in float16, which is enough for a choice that is as accurate as float32 and proven.
    """
    moved = 6 * n * d * size + 8 * n + 10 * k * d * 4
    return max(moved / bandwidth, 2 * n * k * d / rate) * 1e3
