"""Bias, skip connection and ReLU as one operation: against the formulas in float64, and inside the networks."""

import copy

import pytest
import torch
from torch import nn

from topovq.models.blocks import Decoder, Encoder, Network
from topovq.ops.join import _compute, _compute_backward

pytest.importorskip("triton", reason="the kernels are written in Triton")

from topovq.ops.triton_join import join_backward_triton, join_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(2, 5, 3, 4), (3, 64, 7, 9), (1, 128, 1, 1), (2, 3, 70, 41), (0, 4, 2, 2)]


def maps(shape: tuple[int, ...], n: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.randn(shape, device=DEVICE).to(dtype) for _ in range(n)]


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 8e-3, "atol": 1e-6} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}


@pytest.mark.parametrize("forward", [join_triton, _compute], ids=["kernel", "plain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("bias", "skip", "keep"), [(1, 1, 1), (1, 0, 0), (0, 1, 1), (0, 0, 0)])
def test_forward_is_the_formula(forward, dtype, shape, bias, skip, keep):
    y, x = maps(shape, 2, dtype)
    b = torch.randn(shape[1], device=DEVICE) if bias else None
    s, r = forward(y, b, x if skip else None, bool(keep))
    wanted = y.double()
    if b is not None:
        wanted = wanted + b.double()[:, None, None]
    if skip:
        wanted = wanted + x.double()
    torch.testing.assert_close(r.double(), wanted.relu(), **tolerance(dtype))
    assert r.dtype == dtype
    if keep:
        torch.testing.assert_close(s.double(), wanted, **tolerance(dtype))
    else:
        assert s.numel() == 0


@pytest.mark.parametrize("backward", [join_backward_triton, _compute_backward], ids=["kernel", "plain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("has_s", "has_r", "bias"), [(1, 1, 1), (0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_backward_is_the_formula(backward, dtype, shape, has_s, has_r, bias):
    ds, dr, r = maps(shape, 3, dtype)
    # The kernel reads r as the forward pass left it: channels last.
    r = r.relu().contiguous(memory_format=torch.channels_last)
    g, bias_grad = backward(ds if has_s else None, dr if has_r else None, r, bool(bias))
    wanted = torch.zeros(shape, dtype=torch.float64, device=DEVICE)
    if has_s:
        wanted = wanted + ds.double()
    if has_r:
        wanted = wanted + dr.double() * (r > 0)
    torch.testing.assert_close(g.double(), wanted, **tolerance(dtype))
    if bias:
        # Of the gradient as it is handed on, which is what a convolution's own backward would sum.
        torch.testing.assert_close(bias_grad.double(), g.double().sum((0, 2, 3)), rtol=1e-5, atol=1e-4)
    else:
        assert bias_grad.numel() == 0


NETWORKS = {
    "encoder": lambda layers, kind: (Encoder(3, 16, layers, 8, kind, 4), (2, 3, 16, 16)),
    "decoder": lambda layers, kind: (Decoder(6, 3, 16, layers, 8, kind, 4), (2, 6, 4, 4)),
    "wide decoder": lambda layers, kind: (Decoder(6, 12, 16, layers, 8, kind, 2), (2, 6, 4, 4)),
}


def gradients(net: Network, x: torch.Tensor, forward) -> list[torch.Tensor]:
    """The output and the gradients of the input and all parameters, for one and the same loss."""
    x = x.clone().requires_grad_()
    out = forward(net, x)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view(out.shape)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), [x, *net.parameters()])]


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("kind", ["plain", "activated"])
@pytest.mark.parametrize("layers", [0, 1, 2])
def test_joined_network_is_the_sequence_of_its_parts(name, kind, layers):
    torch.manual_seed(0)
    net, shape = NETWORKS[name](layers, kind)
    net.to(DEVICE)
    x = torch.randn(shape, device=DEVICE)
    on_cpu = copy.deepcopy(net).cpu().double()
    wanted = gradients(on_cpu, x.cpu().double(), nn.Sequential.forward)
    with torch.backends.cudnn.flags(allow_tf32=False):
        found = gradients(net, x, Network.joined)
    for want, have in zip(wanted, found, strict=True):
        torch.testing.assert_close(have.cpu().double(), want, rtol=1e-4, atol=1e-4)


def test_joined_network_compiles_in_one_graph():
    torch.manual_seed(0)
    net, shape = NETWORKS["encoder"](2, "plain")
    net.to(DEVICE)
    x = torch.randn(shape, device=DEVICE)
    wanted = gradients(net, x, Network.joined)
    torch._dynamo.reset()
    compiled = torch.compile(Network.joined, backend="aot_eager", fullgraph=True)
    for want, have in zip(wanted, gradients(net, x, compiled), strict=True):
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-4)
