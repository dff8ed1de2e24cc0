"""Derivatives of a quantizer beyond one backward pass: of second order, in forward mode, and through torch.func.

By definition, with the code q that was chosen a constant: dq/dx = I, or the rotation from x to q; and for the
commitment loss of N vectors of D dimensions d loss/dx = 2 (x - q) / (N D), d^2 loss/dx^2 = 2 / (N D) I.
"""

import pytest
import torch
from torch.autograd import forward_ad

from topovq import GradientVQ, KohonenVQ, ResidualVQ
from topovq.ops import quantize as ops
from topovq.ops.direct import plain
from topovq.ops.quantize import quantize
from topovq.quantizers.rotation import rotate_to

N, D = 6, 3


def layer(**options):
    torch.manual_seed(0)
    return KohonenVQ(D, 4, neighborhood="none", **options).double()


def vectors(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (N, D)), generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def apart(vq: KohonenVQ, x: torch.Tensor) -> torch.Tensor:
    return x - vq.codebook[torch.cdist(x, vq.codebook).argmin(-1)]


@pytest.fixture(params=["plain", "operation"])
def way(request, monkeypatch):
    """As a function, and as the operation that is called where something looks on."""
    if request.param == "operation":
        monkeypatch.setattr(ops, "plain", lambda *tensors: False)


@pytest.mark.parametrize("training", [True, False])
def test_second_derivative_of_the_loss(way, training):
    vq, x = layer(commitment_weight=0.5).train(training), vectors().requires_grad_()
    expected = 0.5 * 2 * apart(vq, x.detach()) / (N * D)
    (first,) = torch.autograd.grad(vq(x).loss, x, create_graph=True)
    torch.testing.assert_close(first.detach(), expected)
    weight = vectors().flip(0)
    (second,) = torch.autograd.grad((first * weight).sum(), x)
    torch.testing.assert_close(second, 0.5 * 2 / (N * D) * weight)


def test_second_derivative_past_masked_vectors_and_through_the_output(way):
    """f = q^3 . v / 6 + loss has f'' = q v + 2/(N D): the straight-through output counts, and masked ones do not."""
    vq, x, v = layer().eval(), vectors().requires_grad_(), vectors().flip(0)
    mask = torch.arange(N) % 2 == 0

    def f(x):
        quantized, _, loss = vq(x, mask=mask)
        return (quantized**3 * v).sum() / 6 + loss

    (first,) = torch.autograd.grad(f(x), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    q = x.detach() - apart(vq, x.detach())
    expected = torch.where(mask[:, None], q * v + 2 / (N // 2 * D), 0)
    torch.testing.assert_close(second, expected)


@pytest.mark.parametrize("neighborhood", ["none", "hard"])
def test_second_derivative_by_the_codes(neighborhood):
    """Of mean |w_k* - x|^2 + mean sum_k A[k*, k] |w_k - x|^2 by w_k: 2 c_k / (N D) + 2 (A^T c - c)_k / N."""
    torch.manual_seed(0)
    vq = GradientVQ(D, 4, grid=4, neighborhood=neighborhood).double()
    vq.freeze([0])
    matrix = vq.neighborhood.matrix(0).double()
    _, indices, loss = vq(vectors())
    (first,) = torch.autograd.grad(loss, vq.codebook, create_graph=True)
    weight = vectors(4, D)
    (second,) = torch.autograd.grad((first * weight).sum(), vq.codebook)
    counts = torch.bincount(indices, minlength=4).double()
    expected = 2 * counts / (N * D) + 2 * (matrix.T @ counts - counts) / N
    expected[0] = 0
    torch.testing.assert_close(second, expected[:, None] * weight)


def test_forward_mode_by_the_codes():
    vq, x, d_codes = GradientVQ(D, 4, neighborhood="hard").double(), vectors(), vectors(4, D)
    codes = vq.codebook.detach().clone()
    (slope,) = torch.autograd.grad(vq(x).loss, vq.codebook)
    vq.codebooks[0].step.zero_()
    with forward_ad.dual_level():
        dual = {"codebooks.0.codes": forward_ad.make_dual(codes, d_codes)}
        d_loss = forward_ad.unpack_dual(torch.func.functional_call(vq, dual, (x,)).loss).tangent
    torch.testing.assert_close(d_loss, (slope * d_codes).sum())


def test_a_kernel_is_not_asked_for_second_derivatives(monkeypatch):
    """Its result has no graph: where one is wanted, torch's operations compute the gradient."""
    x, codes = vectors().float().requires_grad_(), vectors(4, D).float()
    error = quantize(x, codes).error
    monkeypatch.setattr(ops, "_by_kernels", lambda x: True)
    (first,) = torch.autograd.grad(error, x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, torch.full((N, D), 2 / (N * D)))


def jacobian_of_rotation(x, q):
    """|q| / |x| (I - 2 r r^T + 2 v u^T), r the direction of u + v: one matrix for each vector."""
    u, v = x / x.norm(), q / q.norm()
    r = (u + v) / (u + v).norm()
    return q.norm() / x.norm() * (torch.eye(D, dtype=x.dtype) - 2 * torch.outer(r, r) + 2 * torch.outer(v, u))


def test_rotation_is_a_constant_of_its_gradient():
    """dx = J^T g with J fixed: the derivative of that by g is J, by x nothing."""
    x, g = vectors().requires_grad_(), vectors().flip(0).requires_grad_()
    q = vectors(N, D).roll(2, 0)
    (first,) = torch.autograd.grad(rotate_to(x, q), x, g, create_graph=True)
    turns = torch.stack([jacobian_of_rotation(a, b) for a, b in zip(x.detach(), q)])
    torch.testing.assert_close(torch.einsum("nij,nj->ni", turns, x.detach()), q)
    torch.testing.assert_close(first, torch.einsum("nij,ni->nj", turns, g))
    by_x, by_g = torch.autograd.grad((first * q).sum(), (x, g), allow_unused=True)
    assert by_x is None
    torch.testing.assert_close(by_g, torch.einsum("nij,nj->ni", turns, q))


def tangents(vq, x, dx, mode):
    """(quantized, loss) and how they change along dx."""

    def f(x):
        quantized, _, loss = vq(x)
        return quantized, loss

    if mode == "torch.func":
        return torch.func.jvp(f, (x,), (dx,))
    with forward_ad.dual_level():
        pairs = [forward_ad.unpack_dual(part) for part in f(forward_ad.make_dual(x, dx))]
        return [pair.primal for pair in pairs], [pair.tangent for pair in pairs]


@pytest.mark.parametrize("mode", ["torch.func", "forward_ad"])
@pytest.mark.parametrize("rotation", [False, True])
def test_forward_mode(mode, rotation):
    vq, x, dx = layer(rotation_trick=rotation).eval(), vectors(), vectors().flip(0)
    expected = vq(x)
    (quantized, loss), (d_quantized, d_loss) = tangents(vq, x, dx, mode)
    assert torch.equal(quantized, expected.quantized)
    torch.testing.assert_close(loss, expected.loss)
    torch.testing.assert_close(d_loss, (2 * apart(vq, x) / (N * D) * dx).sum())
    q = x - apart(vq, x)
    turned = torch.stack([jacobian_of_rotation(a, b) @ d for a, b, d in zip(x, q, dx)]) if rotation else dx
    torch.testing.assert_close(d_quantized, turned)


@pytest.mark.parametrize("mode", ["torch.func", "forward_ad"])
@pytest.mark.parametrize("kind", [KohonenVQ, GradientVQ, lambda *sizes: ResidualVQ(*sizes, num_quantizers=2)])
def test_forward_mode_keeps_the_type(mode, kind):
    vq, x = kind(D, 4).eval(), vectors().float()
    for part in tangents(vq, x, x, mode):
        assert [each.dtype for each in part] == [torch.float32] * 2


def test_forward_mode_in_training_moves_the_codes_as_ever():
    one, two, x = layer(), layer(), vectors()
    one(x)
    (_, _), (_, d_loss) = tangents(two, x, vectors().flip(0), "forward_ad")
    assert d_loss.abs() > 0
    for name, value in one.state_dict().items():
        assert torch.equal(two.state_dict()[name], value), name
    two(x)  # no tangent is left in the codes


@pytest.mark.parametrize("rotation", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_torch_func_where_no_code_moves(rotation, frozen):
    vq = layer(rotation_trick=rotation, freeze_codebook=frozen).train(frozen)
    x = vectors().requires_grad_()
    weight = vectors().flip(0)

    def f(x):
        quantized, _, loss = vq(x)
        return (quantized * weight[: len(x)]).sum() + loss

    (expected,) = torch.autograd.grad(f(x), x)
    at = x.detach()
    torch.testing.assert_close(torch.func.grad(f)(at), expected)
    hessian = torch.func.hessian(lambda x: vq(x).loss)(at).reshape(N * D, N * D)
    torch.testing.assert_close(hessian, 2 / (N * D) * torch.eye(N * D, dtype=at.dtype))
    # One gradient for each of some batches.
    batches = vectors(5, 2, D)
    each = torch.func.vmap(torch.func.grad(f))(batches)
    for batch, got in zip(batches, each):
        torch.testing.assert_close(got, torch.func.grad(f)(batch))


@pytest.mark.parametrize("in_dim", [0, 1, 2])
def test_vmap_is_a_loop(in_dim):
    vq, x = layer(codebook_dim=2, heads=2).eval(), vectors(5, 4, D)
    got = torch.func.vmap(lambda x: tuple(vq(x)), in_dims=in_dim)(x.movedim(0, in_dim))
    for number, batch in enumerate(x):
        for mapped, part in zip(got, vq(batch)):
            torch.testing.assert_close(mapped[number], part)


@pytest.mark.parametrize("x_dim", [0, None])
def test_vmap_over_codebooks_is_a_loop(x_dim):
    vq, x, books = layer().eval(), vectors(5, N, D), vectors(5, 4, D)
    x = x if x_dim == 0 else x[0]

    def f(x, codes):
        return tuple(torch.func.functional_call(vq, {"codebooks.0.codes": codes}, (x,)))

    got = torch.func.vmap(f, in_dims=(x_dim, 0))(x, books)
    for number, book in enumerate(books):
        for mapped, part in zip(got, f(x if x_dim is None else x[number], book)):
            torch.testing.assert_close(mapped[number], part)


@pytest.mark.parametrize("kind", [KohonenVQ, GradientVQ, lambda *sizes: ResidualVQ(*sizes, num_quantizers=2)])
def test_training_within_torch_func_is_refused_with_advice(kind):
    vq, x = kind(D, 4).double(), vectors()
    before = {name: value.clone() for name, value in vq.state_dict().items()}
    for attempt in (
        lambda: torch.func.grad(lambda x: vq(x).loss)(x),
        lambda: torch.func.jvp(lambda x: vq(x).loss, (x,), (x,)),
        lambda: torch.func.vmap(lambda x: vq(x).loss)(x[:, None]),
    ):
        with pytest.raises(RuntimeError, match=r"VQ: a training step moves the codes in place, .*eval\(\)"):
            attempt()
    assert all(torch.equal(value, before[name]) for name, value in vq.state_dict().items())


def test_vectors_that_are_not_finite_leave_the_output_so_within_torch_func():
    vq, x = layer().eval(), vectors()
    x[1, 0], x[2, 1] = torch.nan, torch.inf
    for rotation in (False, True):
        vq.rotation_trick = rotation
        quantized, d_quantized = torch.func.jvp(lambda x: vq(x).quantized, (x,), (torch.ones_like(x),))
        assert torch.equal(quantized, vq(x).quantized)
        assert d_quantized.isfinite().all()


@pytest.mark.parametrize("rotation", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_output_may_be_changed_in_place(rotation, compiled):
    gradients = []
    for in_place in (True, False):
        vq, x = layer(rotation_trick=rotation), vectors().requires_grad_()

        def f(x, vq=vq, in_place=in_place):
            quantized, _, loss = vq(x)
            return (quantized if in_place else quantized.clone()).add_(1).relu_().square().sum() + loss

        f = torch.compile(f, fullgraph=True, backend="aot_eager") if compiled else f
        f(x).backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_nothing_is_copied_where_no_gradient_is_wanted(monkeypatch):
    copies = []
    clone = torch.Tensor.clone
    monkeypatch.setattr(torch.Tensor, "clone", lambda tensor: copies.append(tuple(tensor.shape)) or clone(tensor))
    x, codes = vectors(), vectors(4, D)
    quantize(x, codes)
    assert (N, D) not in copies
    quantize(x.requires_grad_(), codes)
    assert (N, D) in copies


def test_plain_knows_what_looks_on():
    x, seen = vectors(), []
    assert plain(x)
    torch.func.vmap(lambda x: seen.append(plain(x)) or x)(x)
    with forward_ad.dual_level():
        seen.append(plain(x))
    assert seen == [False, False]
