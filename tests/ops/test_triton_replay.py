"""Launches that are run again with other addresses: the same results, whatever the inputs are then."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton")

import triton
import triton.language as tl
from kernels import DEVICE, noise

from topovq.ops.triton import replay
from topovq.ops.triton.replay import Replay, Work, replayed

CUDA = DEVICE == "cuda"
on_a_gpu = pytest.mark.skipif(not CUDA, reason="launches are noted on a GPU alone")


@triton.jit
def _add(a_ptr, b_ptr, out_ptr, N, factor, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    total = tl.load(a_ptr + i, i < N, 0.0) + factor * tl.load(b_ptr + i, i < N, 0.0)
    tl.store(out_ptr + i, total, i < N)


def add_twice(work: Work, a: torch.Tensor, b: torch.Tensor, factor: float, runs: list[int]) -> tuple[torch.Tensor]:
    """a + 2 factor b, by way of memory of its own."""
    runs.append(1)
    n = len(a)
    between, out = (work.empty(n, dtype=torch.float32, device=a.device) for _ in range(2))
    work.launch(_add, (1,), a, b, between, n, factor, BLOCK=64)
    work.launch(_add, (1,), between, b, out, n, factor, BLOCK=64)
    return (out,)


def test_a_body_is_run_once_on_a_gpu_and_gives_the_same_afterwards(monkeypatch):
    monkeypatch.setattr(replay, "_known", {})
    runs: list[int] = []
    for seed in range(4):
        a, b = noise(50, 1, seed=seed)[:, 0].to(DEVICE), noise(50, 1, seed=seed + 9)[:, 0].to(DEVICE)
        (out,) = replayed(("add", 50), (a, b), add_twice, 0.5, runs)
        torch.testing.assert_close(out, a + b)
    assert len(runs) == (1 if CUDA else 4)


def test_addresses_that_are_not_aligned_run_as_they_are(monkeypatch):
    monkeypatch.setattr(replay, "_known", {})
    runs: list[int] = []
    for offset in (0, 1, 0, 3, 0):
        a = noise(60, 1)[:, 0].to(DEVICE)[offset : offset + 50]
        (out,) = replayed(("add", 50), (a, a), add_twice, 0.5, runs)
        torch.testing.assert_close(out, 2 * a)
    assert len(runs) == (3 if CUDA else 5)


@on_a_gpu
def test_what_comes_from_elsewhere_is_never_run_again(monkeypatch):
    monkeypatch.setattr(replay, "_known", {})
    a = noise(50, 1)[:, 0].to(DEVICE)
    runs: list[int] = []

    def elsewhere(work: Work, a: torch.Tensor) -> tuple[torch.Tensor]:
        return add_twice(work, a, a + len(runs), 0.5, runs)

    def returned(work: Work, a: torch.Tensor) -> tuple[torch.Tensor]:
        return (add_twice(work, a, a, 0.5, runs)[0].view(5, 10),)

    for turn in range(3):
        torch.testing.assert_close(replayed("elsewhere", (a,), elsewhere)[0], 2 * a + turn)
    for _ in range(3):
        torch.testing.assert_close(replayed("returned", (a,), returned)[0], (2 * a).view(5, 10))
    assert len(runs) == 6
    work = Work((a,))
    outputs = elsewhere(work, a)
    with pytest.raises(LookupError):
        Replay(work, outputs, 0)


@on_a_gpu
def test_known_keys_are_forgotten_when_there_are_many(monkeypatch):
    monkeypatch.setattr(replay, "_known", {})
    monkeypatch.setattr(replay, "MOST", 3)
    a = noise(50, 1)[:, 0].to(DEVICE)
    for key in range(8):
        replayed(key, (a, a), add_twice, 0.5, [])
        assert len(replay._known) <= 3


@on_a_gpu
def test_a_version_that_launches_otherwise_runs_the_body(monkeypatch):
    monkeypatch.setattr(replay, "_known", {})
    a = noise(50, 1)[:, 0].to(DEVICE)
    runs: list[int] = []
    replayed("other", (a, a), add_twice, 0.5, runs)
    (known,) = replay._known.values()
    known.launches = [(lambda: None, *launch[1:]) for launch in known.launches]  # which takes no arguments
    for _ in range(2):
        torch.testing.assert_close(replayed("other", (a, a), add_twice, 0.5, runs)[0], 2 * a)
    assert len(runs) == 3


@on_a_gpu
def test_a_cuda_graph_takes_what_is_run_again(monkeypatch):
    monkeypatch.setattr(replay, "_known", {})
    a = noise(50, 1)[:, 0].to(DEVICE)
    replayed("graph", (a, a), add_twice, 0.5, [])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (out,) = replayed("graph", (a, a), add_twice, 0.5, [])
    a.add_(1)
    graph.replay()
    torch.testing.assert_close(out, 2 * a)
