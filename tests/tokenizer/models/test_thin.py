"""Thin convolutions with their ReLU, in the shape that GPUs are fast at, give what torch's convolutions give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton", reason="the kernels are written in Triton")

from topovq.tokenizer.models import blocks
from topovq.tokenizer.models.blocks import Decoder, Encoder
from topovq.tokenizer.models.ends import narrowed, padded, widened

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter has no numbers of type bfloat16.
DTYPES = [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float16]
SHAPES = [  # images, few channels, many, height and width of the wide map
    (2, 3, 64, 8, 12),
    (1, 1, 16, 1, 1),
    (3, 4, 40, 7, 5),
    (1, 2, 3, 1, 70),
    (2, 7, 128, 3, 4),
    (5, 3, 64, 13, 11),
]


def draw(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(*shape, generator=generator) * scale).to(DEVICE, dtype).requires_grad_()


def check(ours: Tensor, theirs: Tensor, inputs: list[Tensor], exact: list[Tensor]) -> None:
    """Values and gradients, to what rounding the result leaves of them."""
    assert ours.shape == theirs.shape
    by = draw(*theirs.shape, dtype=inputs[0].dtype).detach()
    got = [ours, *torch.autograd.grad(ours, inputs, by)]
    right = [theirs, *torch.autograd.grad(theirs, exact, by.double())]
    tolerance = 2 * torch.finfo(inputs[0].dtype).eps
    for g, r in zip(got, right, strict=True):
        assert g.dtype == inputs[0].dtype
        size = r.detach().abs().max().item()
        torch.testing.assert_close(g.double(), r, rtol=0, atol=tolerance * size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("b", "c", "m", "h", "w"), SHAPES)
def test_widened_and_its_gradients(dtype: torch.dtype, b: int, c: int, m: int, h: int, w: int) -> None:
    x = draw(b, c, 2 * h, 2 * w, dtype=dtype).detach()
    inputs = [draw(m, c, 4, 4, dtype=dtype, scale=0.2), draw(m, dtype=dtype)]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    check(widened(x, *inputs), F.conv2d(x.double(), *exact, stride=2, padding=1).relu(), inputs, exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("b", "c", "m", "h", "w"), SHAPES)
def test_narrowed_and_its_gradients(dtype: torch.dtype, b: int, c: int, m: int, h: int, w: int) -> None:
    x = draw(b, m, h, w, dtype=dtype).detach().to(memory_format=torch.channels_last).requires_grad_()
    inputs = [x, draw(m, dtype=dtype), draw(m, c, 4, 4, dtype=dtype, scale=0.2), draw(c, dtype=dtype)]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    # Both see what is rounded to 16 bits after the ReLU.
    taken = (exact[0] + exact[1].view(-1, 1, 1)).relu()
    check(narrowed(*inputs), F.conv_transpose2d(taken, *exact[2:], stride=2, padding=1), inputs, exact)


def test_narrowed_without_a_bias_of_the_layer_before() -> None:
    x, weight, bias = (draw(*shape, dtype=torch.float16) for shape in ((2, 8, 3, 4), (8, 3, 4, 4), (3,)))
    assert torch.equal(narrowed(x, None, weight, bias), narrowed(x, torch.zeros_like(x[0, :, 0, 0]), weight, bias))


def test_no_images() -> None:
    weight, bias = draw(8, 3, 4, 4, dtype=torch.float16), draw(8, dtype=torch.float16)
    wide = widened(torch.zeros(0, 3, 8, 8, dtype=torch.float16, device=DEVICE), weight, bias)
    assert wide.shape == (0, 8, 4, 4)
    assert narrowed(wide, bias, weight, draw(3, dtype=torch.float16)).shape == (0, 3, 8, 8)
    of_weight, of_bias = torch.autograd.grad(wide.sum(), [weight, bias])
    assert not of_weight.any()
    assert not of_bias.any()


def test_a_nan_shows_and_an_infinity_below_zero_does_not() -> None:
    weight, bias = draw(8, 3, 4, 4, dtype=torch.float16), draw(8, dtype=torch.float16)
    x = torch.ones(1, 3, 8, 8, dtype=torch.float16, device=DEVICE)
    x[0, 0, 0, 0] = float("nan")
    wide = widened(x, weight, bias)
    assert wide[0, :, 0, 0].isnan().all()
    assert wide[0, :, 1:, 1:].isfinite().all()
    u = torch.ones(1, 8, 4, 4, dtype=torch.float16, device=DEVICE)
    u[0, 0] = -float("inf")
    assert narrowed(u, bias, weight, draw(3, dtype=torch.float16)).isfinite().all()


def test_rows_of_patches_are_a_power_of_two() -> None:
    assert [padded(channels) for channels in (1, 3, 4, 5, 7)] == [16, 16, 16, 32, 32]


@pytest.mark.parametrize("stride", [2, 4, 8])
@pytest.mark.parametrize("layers", [0, 2])
def test_encoder_and_decoder_take_that_way(stride: int, layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same parts of a network either way; on a CPU the way is opened for the test, in float16."""
    torch.manual_seed(0)
    size = (32, layers, 8, "plain", stride)
    encoder = Encoder(3, *size).to(DEVICE, torch.float16)
    decoder = Decoder(16, 3, *size).to(DEVICE, torch.float16)
    x = draw(2, 3, 16, 16, dtype=torch.float16).detach()
    q = draw(2, 16, 16 // stride, 16 // stride, dtype=torch.float16)
    taken: list[str] = []

    def through(name: str) -> Any:
        function = getattr(blocks, name)

        def call(*inputs: Any) -> Tensor:
            taken.append(name)
            return function(*inputs)

        return call

    monkeypatch.setattr(blocks, "is_thin", lambda x, weight: False)
    usual = [encoder(x), decoder(q)]
    assert not taken
    monkeypatch.setattr(blocks, "is_thin", lambda x, weight: weight.shape[1] == 3)
    for name in ("widened", "narrowed"):
        monkeypatch.setattr(blocks, name, through(name))
    ours = [encoder(x), decoder(q)]
    assert taken == ["widened", "narrowed"]
    for module, g, r in zip((encoder, decoder), ours, usual):
        torch.testing.assert_close(g, r, rtol=2e-2, atol=2e-3)
        parameters = list(module.parameters())
        by = torch.ones_like(g)
        for p, e in zip(torch.autograd.grad(g, parameters, by), torch.autograd.grad(r, parameters, by)):
            # The sign of what is next to zero may differ by rounding, and with it what a ReLU lets through.
            assert (p - e).float().norm() < 2e-2 * e.float().norm()
    wants = x.clone().requires_grad_()
    encoder(wants).sum().backward()  # `widened` has no gradient for images
    assert wants.grad is not None
    assert taken == ["widened", "narrowed"]
