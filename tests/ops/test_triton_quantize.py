"""The forward pass as kernels (search, gather, error and statistics) and its gradient."""

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton")

from kernels import DEVICE, noise

from topovq.ops import quantize as module
from topovq.ops.accumulate import accumulate_reference
from topovq.ops.quantize import Choice, quantize
from topovq.ops.search import METRICS
from topovq.ops.triton.quantize import backward_triton, quantize_triton

NAN, INF = float("nan"), float("inf")

# NumPy, which the interpreter computes with, warns where a kernel meets NaN or fills a tile up with zeros.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:divide by zero encountered")


def kernel_quantize(
    x: torch.Tensor, codes: torch.Tensor, keep: torch.Tensor | None = None, metric: str = "euclidean", learns=False
) -> Choice:
    keep = keep if keep is None else keep.to(DEVICE)
    parts = quantize_triton(x.to(DEVICE), codes.to(DEVICE), keep, metric, "exact", True, learns)[:6]
    return Choice(*(part.cpu() for part in parts))


def kernel_backward(*arguments: torch.Tensor | None) -> torch.Tensor:
    return backward_triton(*(argument if argument is None else argument.to(DEVICE) for argument in arguments)).cpu()


def odd_batch(n: int, d: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Vectors, some of them with NaN or infinity, and which of them to keep."""
    x = noise(n, d)
    x[3::11, 0] = NAN
    x[5::13] = INF
    return x, torch.arange(n) % 4 != 2


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(("n", "k", "d"), [(1, 1, 1), (70, 9, 3), (130, 140, 20)])
@pytest.mark.parametrize("masked", [False, True])
def test_quantize(metric, n, k, d, masked):
    x, keep = odd_batch(n, d)
    codes = noise(k, d, seed=1)
    if metric == "cosine":
        x, codes = torch.nn.functional.normalize(x, dim=1), torch.nn.functional.normalize(codes, dim=1)
    keep = keep if masked else None
    got, plain = kernel_quantize(x, codes, keep, metric), quantize(x, codes, keep, metric, stats=True)
    finite = x.isfinite().all(1)
    valid = finite if keep is None else finite & keep
    assert torch.equal(got.index_N[finite], plain.index_N[finite])
    assert ((got.index_N >= 0) & (got.index_N < k)).all()
    assert torch.equal(got.q_ND, codes[got.index_N])
    assert got.skipped.item() == (~finite).sum().item()
    # In float64, by definition.
    x, codes, index = x[valid].double(), codes.double(), got.index_N[valid]
    error = (x - codes[index]).square().mean() if valid.any() else torch.zeros(())
    assert got.error.item() == pytest.approx(error.item(), rel=1e-5)
    sums, counts = accumulate_reference(x, index, k)
    torch.testing.assert_close(got.sums_KD.double(), sums, rtol=1e-5, atol=1e-5)
    assert torch.equal(got.counts_K.double(), counts)


@pytest.mark.parametrize(
    ("n", "k", "d", "dtype", "length"),
    [
        (1, 3, 2, torch.float32, 1.0),
        *((70, 9, 3, torch.float32, length) for length in (1e-3, 1.0, 1e6)),
        (70, 9, 3, torch.bfloat16, 1e6),
        (20, 2100, 4, torch.float32, 1.0),
        (40, 33, 130, torch.bfloat16, 1e-3),
    ],
)
def test_what_is_far_from_all_others_is_left_out_as_on_the_cpu(n, k, d, dtype, length):
    x = length * noise(n, d)
    x[::3] = 0  # padding is not what vectors are compared with
    longest = max(x.abs().sum(1).sort(descending=True).values[n // 8].item(), noise(k, d, seed=1).abs().sum(1).max())
    x[0] = 1e12
    x[-1] = 3e37  # its square overflows
    x[n // 2, 0] = 400 * longest
    x = x.to(dtype)
    codes = noise(k, d, seed=1)
    codes[k // 2, 0] = NAN
    got, plain = kernel_quantize(x, codes, learns=True), quantize(x, codes, stats=True, learns=True)
    assert got.skipped.item() == plain.skipped.item() == min(n, 2)
    assert torch.equal(got.counts_K, plain.counts_K)
    torch.testing.assert_close(got.sums_KD, plain.sums_KD, rtol=1e-5, atol=1e-5)
    assert got.error.item() == pytest.approx(plain.error.item(), rel=1e-4)
    fixed = quantize_triton(x.to(DEVICE), codes.to(DEVICE), None, "euclidean", "exact", True, True, deterministic=True)
    torch.testing.assert_close(fixed[3].cpu(), plain.sums_KD, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(("k", "d"), [(2, 3), (70, 3), (70, 130)])
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_a_code_that_is_not_finite_is_never_chosen(metric, k, d):
    x, codes = noise(50, d), noise(k, d, seed=1)
    bad = [0, k // 2, k // 3][: k - 1]
    for code, value in zip(bad, (NAN, INF, 1e20 if metric == "euclidean" else -INF)):
        codes[code, d // 2] = value
    good = [code for code in range(k) if code not in bad]
    expected = torch.tensor(good)[kernel_quantize(x, codes[good], metric=metric).index_N]
    assert torch.equal(kernel_quantize(x, codes, metric=metric).index_N, expected)
    assert torch.equal(quantize(x, codes, metric=metric).index_N, expected)


def test_quantize_nothing():
    got = kernel_quantize(torch.zeros(0, 3), noise(5, 3))
    assert got.q_ND.shape == (0, 3)
    assert got.index_N.shape == (0,)
    assert got.error.item() == 0
    assert torch.equal(got.sums_KD, torch.zeros(5, 3))
    assert torch.equal(got.counts_K, torch.zeros(5))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_quantize_keeps_the_type_of_vectors_and_statistics_in_float32(dtype):
    x, codes = noise(70, 5).to(dtype), noise(9, 5, seed=1)
    got, wide = kernel_quantize(x, codes), kernel_quantize(x.float(), codes)
    assert got.q_ND.dtype == dtype
    torch.testing.assert_close(got.q_ND.float(), wide.q_ND, rtol=2**-7, atol=0)  # the interpreter rounds down
    for name in ("error", "index_N", "sums_KD", "counts_K"):
        assert torch.equal(getattr(got, name), getattr(wide, name)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_quantize(dtype):
    # grad_q + 2 * grad_error * weight * (x - q); a vector of weight 0 passes grad_q on, whatever it holds.
    x, grad, q = (noise(70, 5, seed=seed).to(dtype) for seed in range(3))
    valid = torch.arange(70) % 3 != 0
    x[::6] = NAN
    # Codes that 16 bits hold: the interpreter rounds down.
    book = noise(9, 5, seed=3).to(dtype).float()
    for rows, row_of in ((q, None), (book, torch.arange(70, dtype=torch.int16) % 9)):
        chosen = rows if row_of is None else rows[row_of.long()].to(dtype)
        got = kernel_backward(grad.T.contiguous().T, torch.tensor(1.5), x, rows, row_of, valid, torch.tensor(0.2))
        assert got.dtype == dtype
        expected = torch.where(valid[:, None], 2 * 1.5 * 0.2 * (x.double() - chosen.double()), 0) + grad.double()
        torch.testing.assert_close(got.double(), expected, rtol=2**-7 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)


@pytest.mark.parametrize("few", [9, 8])
def test_the_gradient_is_of_the_codes_that_were_chosen(few, monkeypatch):
    """Not of what an update has made of them since, nor of what the caller makes of q, whichever of them was copied."""
    monkeypatch.setattr(module, "_by_kernels", lambda x: True)
    monkeypatch.setattr(module, "FEW", few)
    x, book = noise(70, 5).to(DEVICE).requires_grad_(), noise(9, 5, seed=1).to(DEVICE)
    choice = quantize(x, book, stats=True)
    gap = x.detach() - book[choice.index_N]
    book.zero_()
    choice.index_N.fill_(-1)  # the caller's, to do with it what they want
    (choice.q_ND.mul_(3).sum() + choice.error).backward()
    torch.testing.assert_close(x.grad, 3 + 2 * gap / gap.numel())
