"""Sums and counts as a kernel."""

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton")

from kernels import DEVICE, noise

from topovq.ops.accumulate import accumulate, accumulate_reference
from topovq.ops.triton.accumulate import accumulate_triton

NAN, INF = float("nan"), float("inf")

# NumPy, which the interpreter computes with, warns where a kernel meets NaN or fills a tile up with zeros.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:divide by zero encountered")


def kernel_accumulate(
    x: torch.Tensor, index: torch.Tensor, num_codes: int, deterministic: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    sums, counts = accumulate_triton(x.to(DEVICE), index.to(DEVICE), num_codes, deterministic)
    return sums.cpu(), counts.cpu()


def assert_sums_as_good_as_plain(x: torch.Tensor, index: torch.Tensor, k: int) -> None:
    exact_sums, exact_counts = accumulate_reference(x.double(), index, k)
    sums, counts = kernel_accumulate(x, index, k)
    plain, _ = accumulate(x, index, k)
    assert sums.shape == exact_sums.shape
    assert sums.dtype == counts.dtype == torch.float32
    kernel_error, plain_error = (sums - exact_sums).abs().amax(), (plain - exact_sums).abs().amax()
    assert kernel_error <= 2 * plain_error + 1e-7 * exact_sums.abs().amax()
    assert torch.equal(counts.double(), exact_counts)


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize(("n", "k", "d"), [(1, 1, 1), (1, 9, 3), (63, 5, 17), (64, 64, 64), (200, 3, 70), (130, 1, 2)])
def test_accumulate(n, k, d, scale):
    index = torch.randint(-1, k, (n,), generator=torch.Generator().manual_seed(n))
    assert_sums_as_good_as_plain(noise(n, d) * scale, index, k)


def test_accumulate_nothing():
    for x, index in (
        (torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64)),
        (torch.ones(70, 3), torch.full((70,), -1)),
    ):
        sums, counts = kernel_accumulate(x, index, 4)
        assert torch.equal(sums, torch.zeros(4, 3))
        assert torch.equal(counts, torch.zeros(4))


def test_accumulate_leaves_out_whatever_has_no_index():
    x, index = noise(70, 5), torch.arange(70) % 6
    x[::7], index[::7] = NAN, -1
    x[3::7], index[3::7] = INF, -1
    sums, counts = kernel_accumulate(x, index, 6)
    kept = index >= 0
    expected_sums, expected_counts = accumulate(x[kept], index[kept], 6)
    torch.testing.assert_close(sums, expected_sums)
    assert torch.equal(counts, expected_counts)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_accumulate_adds_half_precision_up_in_float32(dtype):
    # 600 ones: in bfloat16 the sum would stop at 256.
    sums, counts = kernel_accumulate(torch.ones(600, 2, dtype=dtype), torch.zeros(600, dtype=torch.int64), 1)
    assert sums.tolist() == [[600, 600]]
    assert counts.tolist() == [600]


def test_accumulate_in_fixed_point():
    x, index = noise(200, 70) * 1e4, torch.arange(200) % 5 - 1
    x[0], x[5] = NAN, 1e30  # left out: their index is -1
    for deterministic in (True, False):
        sums, counts = kernel_accumulate(x, index, 4, deterministic)
        exact_sums, exact_counts = accumulate_reference(x.double(), index, 4)
        assert sums.dtype == torch.float32
        torch.testing.assert_close(sums.double(), exact_sums, rtol=1e-6, atol=1e-1)
        assert torch.equal(counts.double(), exact_counts)
    # Only the order of tiles may change from run to run: integers add up to the same.
    shuffled = torch.cat([torch.arange(64, 128), torch.arange(64), torch.arange(128, 200)])
    again, _ = kernel_accumulate(x[shuffled], index[shuffled], 4, True)
    assert torch.equal(again, kernel_accumulate(x, index, 4, True)[0])


def test_accumulate_takes_any_layout():
    x, index = noise(70, 6), torch.arange(70) % 5 - 1
    expected_sums, expected_counts = kernel_accumulate(x, index, 4)
    for vectors in (x.T.contiguous().T, x.repeat_interleave(2, 0)[::2], torch.stack([x, x], 2)[..., 0]):
        for indices in (index, index.repeat_interleave(2)[::2]):
            sums, counts = kernel_accumulate(vectors, indices, 4)
            torch.testing.assert_close(sums, expected_sums)
            assert torch.equal(counts, expected_counts)
