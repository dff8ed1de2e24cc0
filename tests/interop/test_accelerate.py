"""Accelerate: prepare, mixed precision, accumulation, save_state and load_state."""

from contextlib import nullcontext

import pytest
import torch
from autoencoder import Autoencoder, data, statistics

accelerate = pytest.importorskip("accelerate", reason="pip install accelerate")


@pytest.fixture(autouse=True)
def _fresh():
    """Accelerate keeps its settings for the life of a process; each test is to have its own."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def train(accelerator, model, optimizer, batches, accumulate_codes=False):
    for batch in batches:
        with accelerator.accumulate(model):
            vq = accelerator.unwrap_model(model).vq
            waits = accumulate_codes and not accelerator.sync_gradients
            with vq.accumulate() if waits else nullcontext():
                loss = model(batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


def prepared(accelerator):
    torch.manual_seed(0)
    model = Autoencoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return accelerator.prepare(model, optimizer)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_every_step_learns(precision):
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
    model, optimizer = prepared(accelerator)
    vq = accelerator.unwrap_model(model).vq
    before = vq.codebook.clone()
    train(accelerator, model, optimizer, data())
    assert vq.step == 4
    assert vq.skipped == 0
    assert (vq.codebook - before).abs().amax(1).min() > 0
    assert {value.dtype for value in statistics(vq).values()} == {torch.float32}


@pytest.mark.parametrize(("accumulate_codes", "steps"), [(False, 4), (True, 2)])
def test_accumulation_updates_at_each_forward_or_once_per_optimizer_step(accumulate_codes, steps):
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = prepared(accelerator)
    train(accelerator, model, optimizer, data(), accumulate_codes)
    assert accelerator.unwrap_model(model).vq.step == steps


def test_a_resumed_run_ends_where_an_unbroken_one_does(tmp_path):
    accelerator = accelerate.Accelerator(cpu=True)
    whole, optimizer = prepared(accelerator)
    train(accelerator, whole, optimizer, data()[:2])
    accelerator.save_state(str(tmp_path / "state"))
    x = data(1, seed=1)[0]
    tokens = whole.tokens(x)
    train(accelerator, whole, optimizer, data()[2:])

    accelerator = accelerate.Accelerator(cpu=True)
    resumed, optimizer = prepared(accelerator)
    accelerator.load_state(str(tmp_path / "state"))
    assert torch.equal(resumed.tokens(x), tokens)
    train(accelerator, resumed, optimizer, data()[2:])
    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name
