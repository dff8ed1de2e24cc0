"""The fused step does what torch's clipping and AdamW do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from topovq.tokenizer.training.adamw import BLOCK, ClippedAdamW

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = [(BLOCK + 7,), (3, 5, 4, 4), (8, 3, 1, 1), (1,), (2, BLOCK)]


def parameters(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=generator).to(DEVICE) for shape in SHAPES]
    return [nn.Parameter(p.to(memory_format=torch.channels_last) if p.ndim == 4 else p) for p in made]


def gradients(step: int, scale: float) -> list[torch.Tensor]:
    return [scale * p.detach() for p in parameters(100 + step)]


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])  # below the clipping norm and far above it
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("half", [False, True])
def test_steps_are_those_of_torch(scale: float, weight_decay: float, half: bool) -> None:
    theirs, ours = parameters(), parameters()
    expected = torch.optim.AdamW(theirs, 1e-2, weight_decay=weight_decay)
    optimizer = torch.optim.AdamW(ours, 1e-2, weight_decay=weight_decay)
    working = [p.detach().bfloat16().requires_grad_() for p in ours] if half else ours
    step = ClippedAdamW(optimizer, working, clip=1.0)
    sums_3 = torch.zeros(3, device=DEVICE)
    for number in range(5):
        for p, w, g in zip(theirs, working, gradients(number, scale)):
            w.grad = g.to(w.dtype)
            p.grad = w.grad.float()
        nn.utils.clip_grad_norm_(theirs, 1.0)
        expected.step()
        step.step(sums_3, torch.tensor(2.0, device=DEVICE), torch.tensor(0.5, device=DEVICE))
    for p, w, q in zip(ours, working, theirs):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(w.float(), p, rtol=2**-7 if half else 0, atol=0)  # the interpreter cuts off
        for name in ("step", "exp_avg", "exp_avg_sq"):
            got, right = optimizer.state[p][name].cpu(), expected.state[q][name].cpu()
            torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-6 * float(right.abs().max()))
    assert sums_3.tolist() == [10.0, 2.5, 5.0]


def test_a_parameter_without_a_gradient_stays_as_it_is() -> None:
    ours = parameters()
    before = [p.detach().clone() for p in ours]
    optimizer = torch.optim.AdamW(ours, 1e-2)
    step = ClippedAdamW(optimizer, ours, clip=1.0)
    for p, g in zip(ours[1:], gradients(0, 1.0)[1:]):
        p.grad = g
    zero = torch.zeros((), device=DEVICE)
    step.step(torch.zeros(3, device=DEVICE), zero, zero)
    assert torch.equal(ours[0], before[0])
    assert optimizer.state[ours[0]]["step"] == 0
    assert all(not torch.equal(p, b) for p, b in zip(ours[1:], before[1:]))


def test_a_norm_that_is_no_number_reaches_the_parameters() -> None:
    """As with torch's clipping: a broken run shows itself."""
    ours = parameters()
    step = ClippedAdamW(torch.optim.AdamW(ours, 1e-2), ours, clip=1.0)
    for p, g in zip(ours, gradients(0, 1.0)):
        p.grad = g
    ours[0].grad[0] = torch.nan
    zero = torch.zeros((), device=DEVICE)
    step.step(torch.zeros(3, device=DEVICE), zero, zero)
    assert all(p.isnan().all() for p in ours)


def test_a_gradient_in_another_order_is_refused() -> None:
    weight = nn.Parameter(torch.randn(3, 5, 4, 4, device=DEVICE))
    step = ClippedAdamW(torch.optim.AdamW([weight], 1e-2), [weight], clip=1.0)
    weight.grad = torch.randn_like(weight).to(memory_format=torch.channels_last)
    zero = torch.zeros((), device=DEVICE)
    with pytest.raises(RuntimeError, match="different orders"):
        step.step(torch.zeros(3, device=DEVICE), zero, zero)
