"""What benchmarks/layers.py checks on the device before it times anything: searches, updates, gradients, in float64.

Most of the time goes into compiling kernels for odd sizes, so the cases are shared out among processes.
"""

from __future__ import annotations

import math
import os
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor

from topovq import Grid, KohonenVQ, Schedule
from topovq.ops.quantize import quantize
from topovq.ops.search import nearest

EDGES = [
    (0, 5, 8), (1, 1, 1), (1, 700, 3), (130, 200, 20), (333, 65, 64), (200, 130, 100), (77, 129, 150),
    (65, 300, 256), (70, 33, 600), (40, 40, 1024),
]  # fmt: skip
SCALES = [(1.0, 0.0), (1e4, 0.0), (1e-4, 0.0), (1.0, 100.0)]  # and shifts
TYPES = (torch.float32, torch.bfloat16, torch.float16)
METRICS = ("euclidean", "dot", "cosine")
MOST_PROCESSES = 14


def check(n: int, k: int, d: int) -> None:
    """Both precisions against float64: the share of other indices, and what those cost in distance."""
    torch.manual_seed(0)
    x, codes = torch.randn(n, d, device="cuda"), torch.randn(k, d, device="cuda")
    rows = torch.randperm(n, device="cuda")[:1024]
    distance = torch.cat([torch.cdist(x[rows].double(), part.double()) for part in codes.split(65_536)], 1)
    best = distance.min(1)
    for precision in ("exact", "fast"):
        index = nearest(x, codes, precision=precision)[rows]
        other = index != best.indices
        extra = (distance.gather(1, index[:, None])[:, 0] / best.values - 1).max()
        print(f"  {precision}: {other.float().mean():.2%} other indices, at most {extra:.1e} farther", flush=True)
        limit = 1e-6 if precision == "exact" else 1e-2
        if not extra <= limit:
            raise AssertionError(f"{precision} search at N={n}, K={k}, d={d} is off by {extra:.1e} > {limit}")


def check_all(reference: str = "device", device: str = "cuda") -> None:
    """Edge cases and whole updates on `device`, on all cores; float64 runs on the device, too, or on the "host"."""
    began = time.perf_counter()
    host = device if reference == "device" else "cpu"  # no kernel of ours computes in float64
    processes = min(MOST_PROCESSES, os.cpu_count() or 1)
    threads = 1 if host == device == "cuda" else max(1, (os.cpu_count() or 1) // processes)
    with ProcessPoolExecutor(processes, get_context("spawn"), torch.set_num_threads, (threads,)) as pool:
        updates = [
            pool.submit(check_update, number, host, device) for number in reversed(range(len(layers_to_check())))
        ]
        edges = [
            pool.submit(check_edge, n, dtype, host, device) for n in reversed(range(len(EDGES))) for dtype in TYPES
        ]
        cases = sum(future.result() for future in edges)
        for future in updates:
            future.result()
    print(f"{cases} edge cases agree with float64", flush=True)
    print(f"{len(updates)} maps, neighborhoods and rules move their codes as float64 does", flush=True)
    print(f"the check took {time.perf_counter() - began:.0f} s in {processes} processes", flush=True)


def check_edge(number: int, dtype: torch.dtype, host: str, device: str) -> int:
    """Sizes that fit no tile, extremes and oddities, on the device, against float64 on `host`. How many they were."""
    n, k, d = EDGES[number]
    cases = 0
    for place, (scale, shift) in enumerate(SCALES):
        if dtype == torch.float16 and scale > 1:
            continue
        seed = (number * len(SCALES) + place) * len(TYPES) + TYPES.index(dtype)
        torch.manual_seed(seed)
        codes = torch.randn(k, d) * scale + shift
        codes[k // 2 :] = codes[: k - k // 2].clone()  # each code twice: the first must win
        if seed % 2 and k > 32:
            codes[3], codes[k // 2] = 1e6 * scale, -1e5 * scale  # two that lie far away
        x = (torch.randn(d, n) * scale + shift).T.to(dtype)  # not contiguous
        keep = torch.rand(n) > 0.3
        if n > 2:
            x[1, 0], x[2, -1] = float("nan"), float("inf")
        for metric in METRICS:
            torch.use_deterministic_algorithms((seed + cases) % 2 == 1)
            choice = quantize(x.to(device), codes.to(device), keep.to(device), metric, "exact", True)
            torch.use_deterministic_algorithms(False)
            compare(choice, x.to(host), codes.to(host), keep.to(host), metric)
            cases += 1
    return cases


def compare(choice: Any, x: Tensor, codes: Tensor, keep: Tensor, metric: str) -> None:
    """What the kernels chose and summed, against float64 where x lies."""
    k, d = codes.shape
    index = choice.index_N.to(x.device)
    finite = x.isfinite().all(1)
    assert bool(((index >= 0) & (index < k)).all()), "an index is not valid"
    w = codes.double()
    target = torch.nn.functional.normalize(w, dim=1) if metric == "cosine" else w
    y = x[finite].double()
    score = torch.cdist(y, w) if metric == "euclidean" else -(y @ target.T)
    mine, best = score.gather(1, index[finite, None])[:, 0], score.amin(1)
    size = (y.norm(dim=1) * target.norm(dim=1).max()).clamp(min=1e-30)
    limit = 3e-6 * (size if metric != "euclidean" else (size.sqrt() + best))
    assert bool((mine - best <= limit).all()), f"{metric} search at {x.shape, k, codes.std(), x.dtype}"
    valid = finite & keep
    sums = torch.zeros(k, d, dtype=torch.float64, device=x.device).index_add_(0, index[valid], x[valid].double())
    counts = torch.bincount(index[valid], minlength=k).float()
    assert torch.equal(choice.counts_K.to(x.device), counts)
    assert (choice.sums_KD.to(x.device) - sums).abs().max() <= 1e-5 * (1 + sums.abs().max())
    assert torch.equal(choice.q_ND.to(x.device), codes[index].to(x.dtype))
    assert choice.skipped.item() == (~finite).sum()
    error = (x[valid].double() - w[index[valid]]).square().mean() if valid.any() else torch.zeros(())
    assert abs(choice.error.item() - error.item()) <= 1e-5 * (1e-30 + abs(error.item()))


def layers_to_check() -> list[dict[str, Any]]:
    """Options of layers: maps, neighborhoods and rules in many combinations."""
    maps: list[dict[str, Any]] = [
        {"grid": (16, 32)},
        {"grid": 70},
        {"grid": (5, 6, 7), "wrap": (True, False, True)},
        {"grid": (9, 12), "topology": "hexagonal"},
        {"grid": (33, 40), "wrap": True},
        {"grid": (70, 66), "wrap": (False, True)},
        {"grid": Grid((17, 20), size=333)},  # the last row of these is partly empty
        {"grid": Grid((9, 12), topology="hexagonal", size=101)},
        {"grid": Grid((70, 66), wrap=(False, True), size=4603)},
    ]
    widths: list[dict[str, Any]] = [
        {"neighborhood": "none"},
        {"neighborhood": "hard"},
        {"neighborhood": "gaussian"},
        {"neighborhood": "gaussian", "schedule": Schedule.exponential(9.0, 0.3, 6)},
        {"neighborhood": "exponential", "tau": 0.5},
        {"neighborhood": "ride"},
    ]
    rules: list[dict[str, Any]] = [{}, {"update_empty": False, "count_init": 0.0}, {"count_smoothing": "copy"}]
    layers = [
        {**where, **width, **rules[number % len(rules)]} for number, (where, width) in enumerate(product(maps, widths))
    ]
    # Axes long enough for points between them while the width is wide
    large: dict[str, Any] = {"grid": (130, 128), "wrap": (True, False), **widths[3]}
    layers += [large, {**large, "update_empty": False}, {"grid": Grid((130, 128), size=16_547), **widths[3]}]
    return layers


def check_update(number: int, host: str, device: str) -> None:
    """Whole training steps of a layer on the device, gradients included, against float64 on `host`."""
    options = layers_to_check()[number]
    torch.manual_seed(number)
    grid = options["grid"]
    size = grid.size if isinstance(grid, Grid) else math.prod(grid) if isinstance(grid, tuple) else grid
    d = 24 if size < 16_384 else 64
    expected = KohonenVQ(d, size, **options).double().to(host)
    expected(torch.randn(3000, d).double().to(host))  # codes that start from vectors have started
    tested = KohonenVQ(d, size, **options)
    tested.load_state_dict(expected.state_dict())
    tested = tested.float().to(device)
    for _ in range(8):
        x = torch.randn(3000, d)
        points = x.double().to(host).requires_grad_(), x.to(device).requires_grad_()
        chosen = []
        for layer, x_ND in zip((expected, tested), points):
            quantized, indices, loss = layer(x_ND)
            (quantized.square().mean() + loss).backward()
            chosen.append(indices.to(host))
        same = expected.codebook[:, 0].isfinite()
        away = (tested.codebook.to(host).double() - expected.codebook)[same].abs()
        # A vector between two codes may choose the other: then single codes differ, by one vector in many, and with
        # a wide neighborhood all do a little.
        assert away.max() < 0.2, f"codes are {away.max()} apart with {options}"
        others = int((chosen[0] != chosen[1]).sum())
        assert away.median() < 1e-5 + others / len(x), (
            f"codes are {away.median()} apart (median), {others} of {len(x):,} choices differ, with {options}"
        )
        gradients = [x_ND.grad.to(host).double() for x_ND in points if x_ND.grad is not None]
        assert (gradients[1] - gradients[0]).abs().median() < 1e-8, f"gradients with {options}"
        tested.load_state_dict(expected.state_dict())
