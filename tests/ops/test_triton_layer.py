"""A whole layer on the kernels, step after step, against the plain path in float64: codes, tokens, loss, gradients."""

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton")

from kernels import DEVICE

from topovq import KohonenVQ, Schedule
from topovq.ops import quantize, smooth, update

STEPS = 7
FALLING = Schedule.exponential(9.0, 0.3, 6)  # wide, then in between, then narrow
LAYERS = {
    "none": {"neighborhood": "none", "grid": (12, 11)},
    "hard": {"neighborhood": "hard", "grid": (12, 11)},
    "gaussian over a long axis": {"neighborhood": "gaussian", "schedule": FALLING, "grid": (66, 3)},
    "gaussian on a ring": {"neighborhood": "gaussian", "schedule": FALLING, "grid": (2, 100), "wrap": True},
    "exponential": {"neighborhood": "exponential", "grid": (6, 5)},
    "more codes than are copied": {"neighborhood": "hard", "grid": (12, 11), "few": 100},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_a_layer_learns_on_the_kernels_as_in_float64(monkeypatch, options, dtype):
    asked, options = [], dict(options)
    monkeypatch.setattr(quantize, "FEW", options.pop("few", quantize.FEW))

    def by_kernels(x: torch.Tensor) -> bool:
        asked.append(x.dtype != torch.float64)
        return asked[-1]

    for module in (quantize, update):
        monkeypatch.setattr(module, "_by_kernels", by_kernels)
    monkeypatch.setattr(smooth, "_by_kernels", lambda sums: sums.dtype != torch.float64)
    size = options["grid"][0] * options["grid"][1]
    torch.manual_seed(0)
    exact = KohonenVQ(9, size, **options).double()
    layer = KohonenVQ(9, size, **options)
    layer.load_state_dict(exact.state_dict())
    layer = layer.float().to(DEVICE)
    for _ in range(STEPS):
        x = torch.randn(150, 9).to(dtype)
        points = [x.double().requires_grad_(), x.to(DEVICE).requires_grad_()]
        weights = torch.randn(150, 9).to(dtype)
        (q64, index64, loss64), (q, index, loss) = (vq(each) for vq, each in zip((exact, layer), points))
        assert torch.equal(index.cpu(), index64)
        torch.testing.assert_close(loss.cpu().double(), loss64, rtol=1e-5, atol=0)
        # The interpreter rounds down to 16 bits.
        tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 2e-3}
        torch.testing.assert_close(q.cpu().double(), q64, **tolerance)
        ((q64 * weights.double()).sum() + loss64).backward()
        ((q * weights.to(DEVICE)).sum() + loss).backward()
        torch.testing.assert_close(points[1].grad.cpu().double(), points[0].grad, **tolerance)
        torch.testing.assert_close(layer.codebook.cpu().double(), exact.codebook, rtol=1e-4, atol=1e-5)
        layer.load_state_dict(exact.state_dict())  # one step at a time
    assert asked.count(True) == asked.count(False) == 3 * STEPS  # forward, update, backward


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_the_default_dtype_changes_nothing(monkeypatch, dtype):
    """Lightning's 16-true and bf16-true set torch's default dtype around a training step."""
    for module in (quantize, update):
        monkeypatch.setattr(module, "_by_kernels", lambda x: True)
    torch.manual_seed(0)
    x = torch.randn(150, 9).to(DEVICE)
    after = []
    for default in (torch.float32, dtype):
        torch.manual_seed(1)
        layer = KohonenVQ(9, 132, neighborhood="none").to(DEVICE)
        torch.set_default_dtype(default)
        try:
            _, index, loss = layer(x)
        finally:
            torch.set_default_dtype(torch.float32)
        after.append((index, loss, layer.codebook, layer.codebooks[0].counts))
    for one, two in zip(*after):  # on a device, sums are added in any order
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)
