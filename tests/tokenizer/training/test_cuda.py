"""What only a CUDA device can show: the graph does what the eager step does, and feeds give the batches they should."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from tiny import TinySource, tiny_config
from torch import Tensor

from topovq.tokenizer.training import World, read_record, train
from topovq.tokenizer.training.cost import LAST
from topovq.tokenizer.training.feed import AHEAD, CudaFeed, ResidentFeed, open_feed
from topovq.tokenizer.training.step import TrainStep, make_optimizer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Streamed(TinySource):
    def resident(self) -> Tensor | None:
        return None


def world() -> World:
    return World(0, 1, torch.device("cuda", 0))


@pytest.mark.parametrize(("source", "kind"), [(TinySource(), ResidentFeed), (Streamed(), CudaFeed)])
def test_feeds_give_the_batches_of_the_source(source: TinySource, kind: type) -> None:
    threads = threading.active_count()
    feed = open_feed(source, 8, 3, 5, world())
    assert isinstance(feed, kind)
    expected = source.train(8, seed=3, start=5)
    for _ in range(AHEAD + 3):
        feed.prepare()
        assert torch.equal(feed.batch().cpu(), next(expected))
    feed.close()
    assert threading.active_count() == threads


@pytest.mark.parametrize("source", [TinySource(), Streamed()])
@pytest.mark.parametrize("quantizer", ["kohonen", "ema", "gradient"])
@pytest.mark.parametrize("bf16", [False, True])
def test_the_graph_does_what_the_eager_step_does(
    source: TinySource, quantizer: str, bf16: bool, tmp_path: Path
) -> None:
    losses = []
    for graph in (False, True):
        torch.manual_seed(0)
        model = tiny_config(tmp_path, quantizer=quantizer).build_model(16, source.mean, source.std).cuda().train()
        optimizer = make_optimizer(model, 1e-3, 0.0, world().device)
        step = TrainStep(model, optimizer, open_feed(source, 8, 0, 0, world()), world(), graph=graph, bf16=bf16)
        values = []
        for _ in range(20):
            step()
            values.append(step.read().values()["loss"])
        losses.append(values)
    assert losses[1] == pytest.approx(losses[0], rel=2e-2 if bf16 else 1e-3)
    assert losses[0][-1] != losses[0][-2]


def test_a_compiled_run_stops_resumes_and_validates(tmp_path: Path) -> None:
    settings = {"device": "cuda", "steps": 24, "batch_size": 8}
    train(tiny_config(tmp_path / "a", **settings), source=TinySource(), quiet=True)
    train(tiny_config(tmp_path / "b", **{**settings, "steps": 12}), source=TinySource(), quiet=True)
    train(tiny_config(tmp_path / "b", **settings, resume=True), source=TinySource(), quiet=True)
    ours, theirs = (
        [line["loss"] for line in read_record(tmp_path / run / "record.jsonl") if line["event"] == "validation"]
        for run in "ab"
    )
    assert ours == pytest.approx(theirs, rel=0.02)


@pytest.mark.parametrize("neighborhood", ["hard", "exponential"])
def test_runs_that_take_turns_do_not_disturb_each_other(neighborhood: str, tmp_path: Path) -> None:
    def start() -> TrainStep:
        torch.manual_seed(0)
        options = {"neighborhood": neighborhood}
        model = tiny_config(tmp_path, quantizer_options=options).build_model(16, source.mean, source.std).cuda().train()
        optimizer = make_optimizer(model, 1e-3, 0.0, world().device)
        return TrainStep(model, optimizer, open_feed(source, 8, 0, 0, world()), world(), graph=True)

    source = TinySource()
    alone = start()
    for _ in range(100):
        alone()
    lanes = [(torch.cuda.Stream(), start()) for _ in range(3)]
    for _ in range(100):
        for stream, step in lanes:
            with torch.cuda.stream(stream):
                step()
    torch.cuda.synchronize()
    expected = alone.read().values()["loss"]
    for _, step in lanes:
        assert step.read().values()["loss"] == pytest.approx(expected, rel=1e-3)


def test_a_run_measures_what_its_steps_cost(tmp_path: Path) -> None:
    seldom = {"validate_every": 1_000, "checkpoint_every": 1_000, "log_every": 1_000}
    config = tiny_config(tmp_path, device="cuda", steps=LAST + 1, compile=False, **seldom)
    train(config, source=TinySource(), quiet=True)
    final = read_record(tmp_path / "record.jsonl")[-1]
    assert 0 < final["ms_per_step"] < 1_000
    assert 0 < final["peak_mib"] < 1_000
