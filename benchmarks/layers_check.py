"""What benchmarks/layers.py checks on the device before it times anything: searches, updates, gradients, in float64."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import torch

from topovq import Grid, KohonenVQ, Schedule
from topovq.ops.quantize import quantize
from topovq.ops.search import nearest

EDGES = [
    (0, 5, 8), (1, 1, 1), (1, 700, 3), (130, 200, 20), (333, 65, 64), (200, 130, 100), (77, 129, 150),
    (65, 300, 256), (70, 33, 600), (40, 40, 1024),
]  # fmt: skip


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


def check_edges() -> None:
    """Sizes that fit no tile, extremes and oddities, on the device, against float64 on the host."""
    cases = 0
    for n, k, d in EDGES:
        for scale, shift in [(1.0, 0.0), (1e4, 0.0), (1e-4, 0.0), (1.0, 100.0)]:
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                if dtype == torch.float16 and scale > 1:
                    continue
                torch.manual_seed(cases)
                codes = torch.randn(k, d) * scale + shift
                codes[k // 2 :] = codes[: k - k // 2].clone()  # each code twice: the first must win
                if cases % 2 and k > 32:
                    codes[3], codes[k // 2] = 1e6 * scale, -1e5 * scale  # two that lie far away
                x = (torch.randn(d, n) * scale + shift).T.to(dtype)  # not contiguous
                keep = torch.rand(n) > 0.3
                if n > 2:
                    x[1, 0], x[2, -1] = float("nan"), float("inf")
                finite = x.isfinite().all(1)
                for metric in ("euclidean", "dot", "cosine"):
                    torch.use_deterministic_algorithms(cases % 2 == 1)
                    choice = quantize(x.cuda(), codes.cuda(), keep.cuda(), metric, "exact", True)
                    torch.use_deterministic_algorithms(False)
                    index = choice.index_N.cpu()
                    assert bool(((index >= 0) & (index < k)).all()), "an index is not valid"
                    w = codes.double()
                    target = torch.nn.functional.normalize(w, dim=1) if metric == "cosine" else w
                    y = x[finite].double()
                    score = torch.cdist(y, w) if metric == "euclidean" else -(y @ target.T)
                    mine, best = score.gather(1, index[finite, None])[:, 0], score.amin(1)
                    size = (y.norm(dim=1) * target.norm(dim=1).max()).clamp(min=1e-30)
                    limit = 3e-6 * (size if metric != "euclidean" else (size.sqrt() + best))
                    assert bool((mine - best <= limit).all()), f"{metric} search at {n, k, d, scale, shift, dtype}"
                    valid = finite & keep
                    sums = torch.zeros(k, d, dtype=torch.float64).index_add_(0, index[valid], x[valid].double())
                    counts = torch.bincount(index[valid], minlength=k).float()
                    assert torch.equal(choice.counts_K.cpu(), counts)
                    assert (choice.sums_KD.cpu() - sums).abs().max() <= 1e-5 * (1 + sums.abs().max())
                    assert torch.equal(choice.q_ND.cpu(), codes[index].to(dtype))
                    assert choice.skipped.item() == (~finite).sum()
                    error = (x[valid].double() - w[index[valid]]).square().mean() if valid.any() else torch.zeros(())
                    assert abs(choice.error.item() - error.item()) <= 1e-5 * (1e-30 + abs(error.item()))
                    cases += 1
    print(f"{cases} edge cases agree with float64", flush=True)


def check_updates() -> None:
    """Whole training steps of the layer on the device, gradients included, against the CPU in float64."""
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
    for number, options in enumerate(layers):
        torch.manual_seed(number)
        grid = options["grid"]
        size = grid.size if isinstance(grid, Grid) else math.prod(grid) if isinstance(grid, tuple) else grid
        d = 24 if size < 16_384 else 64
        host = KohonenVQ(d, size, **options).double()
        host(torch.randn(3000, d).double())  # codes that start from vectors have started
        device = KohonenVQ(d, size, **options)
        device.load_state_dict(host.state_dict())
        device = device.float().cuda()
        for _ in range(8):
            x = torch.randn(3000, d)
            expected = x.double().requires_grad_()
            mine = x.cuda().requires_grad_()
            chosen = []
            for layer, points in ((host, expected), (device, mine)):
                quantized, indices, loss = layer(points)
                (quantized.square().mean() + loss).backward()
                chosen.append(indices.cpu())
            assert expected.grad is not None
            assert mine.grad is not None
            same = host.codebook[:, 0].isfinite()
            apart = (device.codebook.cpu().double() - host.codebook)[same].abs().max()
            # A vector between two codes may choose the other: then single codes differ, by one vector in many, and with
            # a wide neighborhood all do a little.
            assert apart < 0.2, f"codes are {apart} apart with {options}"
            others = int((chosen[0] != chosen[1]).sum())
            median = (device.codebook.cpu().double() - host.codebook)[same].abs().median()
            assert median < 1e-5 + others / len(x), (
                f"codes are {median} apart (median), {others} of {len(x):,} choices differ, with {options}"
            )
            assert (mine.grad.cpu().double() - expected.grad).abs().median() < 1e-8, f"gradients with {options}"
            device.load_state_dict(host.state_dict())
    print(f"{len(layers)} maps, neighborhoods and rules move their codes as float64 does", flush=True)
