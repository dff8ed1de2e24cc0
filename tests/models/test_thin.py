"""Thin convolutions in their fast shape give what torch's convolutions give."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from topovq.models.thin import ThinConv, ThinConvTranspose, coarse_conv, coarse_conv_transpose


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape) + shape[1]))


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("bias", [True, False])
def test_both_directions_and_their_gradients(channels: int, bias: bool) -> None:
    weight = draw(5, channels, 4, 4).requires_grad_()
    cases = [
        (coarse_conv, F.conv2d, draw(2, channels, 12, 16), 5),
        (coarse_conv_transpose, F.conv_transpose2d, draw(2, 5, 6, 8), channels),
    ]
    for ours, theirs, x, out in cases:
        x.requires_grad_()
        b = draw(1, out)[0].requires_grad_() if bias else None
        inputs = [x, weight, *([b] if bias else [])]
        y, expected = ours(x, weight, b), theirs(x, weight, b, stride=2, padding=1)
        torch.testing.assert_close(y, expected)
        by = draw(*expected.shape)
        got, right = torch.autograd.grad(y, inputs, by), torch.autograd.grad(expected, inputs, by)
        for g, r in zip(got, right):
            torch.testing.assert_close(g, r)


def test_they_are_torch_modules_with_the_same_parameters() -> None:
    torch.manual_seed(0)
    thin = [ThinConv(3, 8), ThinConvTranspose(8, 3)]
    torch.manual_seed(0)
    usual = [nn.Conv2d(3, 8, 4, stride=2, padding=1), nn.ConvTranspose2d(8, 3, 4, stride=2, padding=1)]
    for ours, theirs in zip(thin, usual):
        assert all(torch.equal(ours.state_dict()[name], value) for name, value in theirs.state_dict().items())
        x = torch.randn(2, ours.in_channels, 8, 8)
        assert torch.equal(ours(x), theirs(x))
