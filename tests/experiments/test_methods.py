"""Quantizers of others that are written here: against the package, and against their equations written out."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.clients import methods
from experiments.clients.methods import IBQ, METHODS, Bridge, Cell, Expiring, as_rows, build, cells
from topovq import KohonenVQ


def maps(seed: int, vectors: int = 64, dim: int = 4) -> Tensor:
    """[1, dim, 8, vectors / 8], far from the origin."""
    torch.manual_seed(seed)
    return torch.randn(1, dim, 8, vectors // 8) + 3


@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
def test_the_rewriting_agrees_with_the_package_until_codes_expire(metric: str) -> None:
    """The same start, the same running means, the same tokens, losses and gradients."""
    torch.manual_seed(0)
    package = methods.theirs(4, 32, metric, 1).train()
    ours = Expiring(4, 32, metric, threshold=0.0).train()
    for step in range(12):
        x = maps(step)
        found = []
        for layer in (package, ours):
            torch.manual_seed(100)  # the start draws vectors
            z = x.clone().requires_grad_()
            quantized, indices, loss = layer(z)
            (quantized.square().sum() + loss).backward()
            found.append((quantized, indices, loss, z.grad))
        for theirs, mine in zip(*found, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours.codebook, package.codebook, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("vectors", [16, 256])
def test_codes_expire_as_in_the_package(vectors: int) -> None:
    """As many codes start anew, at vectors of the batch, each vector once, with the same counts and sums."""
    torch.manual_seed(0)
    package = build("vqp", 4, 64, "euclidean", 1).train()
    ours = build("vqp-rewritten", 4, 64, "euclidean", 1).train()
    for step in range(30):
        x = maps(step, vectors)
        package(x), ours(x)
        anew = []
        for codes, counts in (
            (package.codebook, package.inner._codebook.cluster_size[0]),
            (ours.codebook, ours.counts),
        ):
            from_batch = (codes[:, None] == as_rows(x)).all(-1)
            if step:  # else the start has some, too
                assert (from_batch.sum(0) <= 1).all()
                assert (counts[from_batch.any(1)] == 2).all()
            anew.append(int(from_batch.sum()))
        if step and vectors == 16:  # fewer than expire: all are drawn
            assert anew == [16, 16]
    assert abs(anew[0] - anew[1]) < 12
    sums = ours.codes[ours.counts == 2] * 2
    torch.testing.assert_close(ours.sums[ours.counts == 2], sums)


def test_ibq_is_its_equations_whatever_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer = IBQ(4, 32).train()
    torch.nn.init.normal_(layer.inner.weight)
    x = maps(0).requires_grad_()
    w = layer.inner.weight.detach().clone().requires_grad_()
    z = as_rows(x)
    logits = z @ w.T
    index, soft = logits.argmax(1), logits.softmax(1)
    q = (F.one_hot(index, 32) - soft.detach() + soft) @ w
    sharp = (logits / 0.01).softmax(1)
    unsure = -(sharp * (logits / 0.01).log_softmax(1)).sum(1).mean()
    mean = sharp.mean(0)
    entropy = unsure + (mean * (mean + 1e-5).log()).sum()
    loss = F.mse_loss(q, z) + F.mse_loss(z, w[index].detach()) + 0.25 * F.mse_loss(w[index], z.detach())
    loss = loss + 0.05 * entropy
    by_hand = torch.autograd.grad(q.pow(3).sum() + loss, (x, w))
    for largest in (2**26, 32 * 10):  # one block; blocks of ten vectors, the last of four
        monkeypatch.setattr(methods, "LARGEST", largest)
        quantized, indices, ours = layer(x)
        torch.testing.assert_close(as_rows(quantized), w[index], atol=1e-5, rtol=1e-5)
        assert torch.equal(indices.flatten(), index)
        torch.testing.assert_close(ours, loss)
        grads = torch.autograd.grad(quantized.pow(3).sum() + ours, (x, layer.inner.weight))
        torch.testing.assert_close(grads, by_hand, atol=1e-4, rtol=1e-4)


def test_the_bridge_is_nothing_at_first_and_is_learned() -> None:
    torch.manual_seed(0)
    bridge, codes = Bridge(4, 96), torch.randn(1, 96, 4)
    assert torch.equal(bridge(codes), codes)
    layer = build("fvq", 4, 96, "euclidean", 1).train()
    layer(maps(0)).loss.backward()
    assert layer.inner._codebook.vq_bridge.recover.weight.grad.abs().sum() > 0
    torch.nn.init.normal_(layer.inner._codebook.vq_bridge.recover.bias)
    quantized, indices, _ = layer.eval()(maps(1))
    assert torch.equal(quantized, layer.get_output_from_indices(indices))
    assert torch.equal(as_rows(quantized), layer.codebook[indices.flatten()])


@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_tokens_and_a_gradient(method: str) -> None:
    torch.manual_seed(0)
    layer = build(method, 4, 64, "euclidean", 10).train()
    x = maps(0).requires_grad_()
    quantized, indices, loss = layer(x)
    (quantized.sum() + loss).backward()
    assert x.grad is not None
    assert x.grad.abs().sum() > 0
    assert (quantized.shape, indices.shape, indices.dtype) == (x.shape, (1, 8, 8), torch.int64)
    assert 0 <= int(indices.min()) <= int(indices.max()) < layer.codebook_size


def test_the_former_setting_is_what_steps_gave() -> None:
    """In numbers, so that it stays what it was: of 128 x 128 codes in 1,200 steps, and of few codes in many."""
    layer = build("former", 2, 16_384, "euclidean", 1_200)
    assert isinstance(layer, KohonenVQ)
    numbers = layer.neighborhood.schedule.to_dict()
    assert (numbers["kind"], numbers["start"], numbers["end"], numbers["steps"]) == ("exponential", 8.0, 0.3, 600)
    book = layer.codebook_of(0)
    assert (layer.neighborhood.kind, book.decay, book.update_empty) == ("gaussian", 0.95, False)
    assert build("former", 2, 64, "euclidean", 90_000).codebook_of(0).decay == 0.99


def test_cells_are_runs_of_their_own() -> None:
    wanted = cells()
    assert len({cell.id for cell in wanted}) == len(wanted)
    main = [cell for cell in wanted if cell.steps == 5_000]
    for d in (8, 64):
        for method in ("recommended", "ema", "vqp-rewritten"):
            assert sorted(cell.seed for cell in main if (cell.d, cell.method) == (d, method)) == [0, 1, 2]
    assert {cell.K for cell in wanted} == {1_024, 16_384, 65_536, 262_144}
    assert {cell.d for cell in wanted} == {8, 32, 64, 256}
    assert Cell().id != Cell(seed=1).id
