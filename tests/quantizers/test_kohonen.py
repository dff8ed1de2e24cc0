"""KohonenVQ: its update by hand, layouts and masks, gradients, starts, dead and frozen codes."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from topovq import KohonenVQ
from topovq.metrics import topographic_error

LAYOUTS = [
    ({}, (2, 7, 6), (2, 7)),
    ({}, (5, 6), (5,)),
    ({}, (2, 3, 4, 6), (2, 3, 4)),
    ({"channel_last": False}, (2, 6, 7), (2, 7)),
    ({"accept_image_fmap": True}, (2, 6, 3, 4), (2, 3, 4)),
    ({"accept_3d_fmap": True}, (2, 6, 2, 3, 4), (2, 2, 3, 4)),
]


SHAPES = [
    {},
    {"codebook_dim": 3},
    {"heads": 2, "codebook_dim": 3},
    {"heads": 2, "codebook_dim": 3, "separate_codebook_per_head": True},
    {"heads": 3, "codebook_dim": 5, "separate_codebook_per_head": True},
    {"use_cosine_sim": True, "codebook_dim": 4},
    {"rotation_trick": True},
]


def test_one_update_by_hand():
    """Three codes on a line at -1, 0, 1; one batch; neighborhood `hard` at t = 0 (A = 1 for neighbors)."""
    vq = KohonenVQ(1, 3, grid=3, neighborhood="hard", decay=0.5, update_empty=False)
    vq.codebook = torch.tensor([[-1.0], [0.0], [1.0]])
    quantized, indices, loss = vq(torch.tensor([[-2.0], [-1.5], [0.25], [3.0]]))
    assert indices.tolist() == [0, 0, 1, 2]
    assert quantized.flatten().tolist() == [-1, -1, 0, 1]
    # commitment: (1 + 0.25 + 0.0625 + 4) / 4
    assert loss.item() == pytest.approx(5.3125 / 4)
    # S = (-3.5, 0.25, 3), c = (2, 1, 1); A^T S = (-3.25, -0.25, 3.25), A^T c = (3, 4, 2)
    # m = (m + A^T S) / 2 with m = w, N = (1 + A^T c) / 2; w = m / N
    expected = [(-1 - 3.25) / (1 + 3), (0 - 0.25) / (1 + 4), (1 + 3.25) / (1 + 2)]
    assert vq.codebook.flatten().tolist() == pytest.approx(expected)
    assert vq.step.item() == 1
    # shares 1/2, 1/4, 1/4
    assert vq.perplexity.item() == pytest.approx(math.exp(0.5 * math.log(2) + 0.5 * math.log(4)))
    assert vq.usage.item() == 1


def test_training_moves_the_codes_and_evaluation_does_not():
    vq = KohonenVQ(6, 64)
    x = torch.randn(50, 6)
    before = vq.codebook.clone()
    vq.eval()(x)
    assert torch.equal(vq.codebook, before)
    assert vq.step.item() == 0
    vq.train()(x)
    assert not torch.equal(vq.codebook, before)
    assert vq.step.item() == 1


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("layout", "x_shape", "token_shape"), LAYOUTS, ids=str)
def test_layouts_tokens_and_their_inverse(layout, x_shape, token_shape, shape):
    torch.manual_seed(0)
    vq = KohonenVQ(6, 16, **layout, **shape)
    x = torch.randn(x_shape, requires_grad=True)
    quantized, indices, loss = vq(x)
    heads = shape.get("heads", 1)
    assert quantized.shape == x.shape
    assert indices.shape == token_shape if heads == 1 else (*token_shape, heads)
    assert indices.dtype == torch.int64
    assert loss.shape == ()
    (quantized.sum() + loss).backward()
    assert x.grad.abs().sum() > 0
    vq.eval()
    quantized, indices, _ = vq(x)
    assert torch.equal(vq.get_output_from_indices(indices), quantized)
    if "codebook_dim" not in shape:
        assert torch.equal(vq.get_codes_from_indices(indices), quantized)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("layout", "x_shape", "token_shape"), LAYOUTS, ids=str)
def test_masking_is_removing(layout, x_shape, token_shape, shape):
    torch.manual_seed(0)
    masked, plain = KohonenVQ(6, 16, **layout, **shape), KohonenVQ(6, 16, **shape)
    masked(torch.randn(x_shape))  # the codes' start, from a few vectors, would show how they were rounded
    plain.load_state_dict(masked.state_dict())
    x = torch.randn(x_shape)
    mask = torch.rand(token_shape) > 0.4
    quantized, indices, loss = masked(x, mask=mask)
    kept = (x if masked._keeps_channels_last else x.movedim(1, -1))[mask]
    q_kept, i_kept, l_kept = plain(kept)
    q_last = quantized if masked._keeps_channels_last else quantized.movedim(1, -1)
    assert torch.allclose(q_last[mask], q_kept, atol=1e-6)
    assert torch.equal(indices[mask], i_kept)
    assert (indices[~mask] == -1).all()
    assert (q_last[~mask] == 0).all()
    assert loss.item() == pytest.approx(l_kept.item(), rel=1e-5)
    assert torch.allclose(masked.codebook, plain.codebook, atol=1e-6)


def test_an_all_true_mask_changes_nothing():
    torch.manual_seed(0)
    a, b = KohonenVQ(6, 16), KohonenVQ(6, 16)
    b.load_state_dict(a.state_dict())
    x = torch.randn(2, 7, 6)
    one, other = a(x), b(x, mask=torch.ones(2, 7, dtype=torch.bool))
    assert torch.equal(one.quantized, other.quantized)
    assert torch.equal(one.loss, other.loss)
    assert torch.equal(a.codebook, b.codebook)


@pytest.mark.parametrize("rotation_trick", [False, True])
def test_padding_may_hold_anything(rotation_trick):
    vq = KohonenVQ(4, 16, codebook_dim=3, rotation_trick=rotation_trick)
    x = torch.randn(2, 5, 4)
    x[1, 3:] = float("nan")
    x.requires_grad_()
    quantized, _, loss = vq(x, lens=torch.tensor([5, 3]))
    (quantized.sum() + loss).backward()
    assert vq.skipped.item() == 0
    for tensor in (quantized, x.grad, vq.project_in.weight.grad, vq.project_out.weight.grad):
        assert tensor.isfinite().all()


def test_lens_is_a_mask():
    torch.manual_seed(0)
    a, b = KohonenVQ(6, 16).eval(), KohonenVQ(6, 16).eval()
    b.load_state_dict(a.state_dict())
    x = torch.randn(2, 4, 6)
    by_lens = a(x, lens=torch.tensor([1, 3]))
    by_mask = b(x, mask=torch.tensor([[True, False, False, False], [True, True, True, False]]))
    assert torch.equal(by_lens.indices, by_mask.indices)
    assert by_lens.indices.tolist()[0][1:] == [-1, -1, -1]


@given(st.integers(1, 40), st.integers(0, 2**31))
def test_the_order_of_the_batch_does_not_matter(n, seed):
    torch.manual_seed(seed)
    a, b = KohonenVQ(3, 12), KohonenVQ(3, 12)
    b.load_state_dict(a.state_dict())
    x = torch.randn(n, 3)
    order = torch.randperm(n)
    first, second = a(x), b(x[order])
    assert torch.equal(first.indices[order], second.indices)
    assert torch.allclose(a.codebook, b.codebook, atol=1e-5)


def test_same_seed_same_codes_bit_for_bit():
    def run():
        torch.manual_seed(3)
        vq = KohonenVQ(8, 64, kmeans_init=True, threshold_ema_dead_code=0.2)
        for _ in range(5):
            vq(torch.randn(200, 8))
        return vq.codebook

    assert torch.equal(run(), run())


def test_straight_through_is_the_identity_and_exact_in_bf16():
    vq = KohonenVQ(8, 64).eval()
    x = torch.randn(10, 8, dtype=torch.bfloat16, requires_grad=True)
    quantized, indices, _ = vq(x)
    assert quantized.dtype == torch.bfloat16
    assert torch.equal(quantized, vq.codebook[indices].bfloat16())
    weight = torch.randn(10, 8, dtype=torch.bfloat16)
    (quantized * weight).sum().backward()
    assert torch.equal(x.grad, weight)


def test_rotation_trick_turns_and_scales_the_gradient():
    """x along the first axis, its code along the second, twice as long: a quarter turn and a factor of 2."""
    vq = KohonenVQ(2, 1, rotation_trick=True, commitment_weight=0).eval()
    vq.codebook = torch.tensor([[0.0, 2.0]])
    x = torch.tensor([[1.0, 0.0]], requires_grad=True)
    quantized, _, _ = vq(x)
    assert quantized.tolist() == [[0, 2]]
    # q = 2 R x with R = [[0, -1], [1, 0]]: dx = 2 R^T dq
    quantized.backward(torch.tensor([[1.0, 3.0]]))
    assert x.grad.flatten().tolist() == pytest.approx([6.0, -2.0])


@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan")])
def test_rotation_trick_passes_the_gradient_of_a_vector_without_direction_as_it_is(value):
    vq = KohonenVQ(2, 4, rotation_trick=True, commitment_weight=0.0)
    x = torch.full((1, 2), value, requires_grad=True)
    (vq(x).quantized * torch.tensor([3.0, -1.0])).sum().backward()
    assert x.grad.tolist() == [[3.0, -1.0]]


def test_cosine_uses_directions_and_keeps_codes_on_the_sphere():
    torch.manual_seed(0)
    vq = KohonenVQ(4, 16, use_cosine_sim=True)
    x = torch.randn(64, 4)
    _, _indices, _ = vq(x)
    assert torch.equal(vq(1000 * x, freeze_codebook=True).indices, vq(x, freeze_codebook=True).indices)
    assert torch.allclose(vq.codebook.norm(dim=1), torch.ones(16), atol=1e-5)


def test_kmeans_and_data_initialization():
    torch.manual_seed(0)
    centers = torch.tensor([[10.0, 0.0], [0.0, 10.0], [-10.0, 0.0], [0.0, -10.0]])
    x = centers.repeat_interleave(50, 0) + 0.01 * torch.randn(200, 2)
    vq = KohonenVQ(2, 4, kmeans_init=True, neighborhood="none")
    vq.eval()(x)
    assert vq.codebook.norm(dim=1).max() < 5, "initialization must wait for training"
    vq.train()(x, freeze_codebook=True)
    assert vq.codebook.norm(dim=1).max() < 5, "a frozen codebook is not initialized"
    vq(x)
    assert (vq.codebook.norm(dim=1) - 10).abs().max() < 0.1
    from_data = KohonenVQ(2, 4, kmeans_init=True, kmeans_iters=0, neighborhood="none")
    from_data(x[:4])
    assert torch.allclose(from_data.codebook.sort(0).values, x[:4].sort(0).values, atol=1e-3)


def test_dead_codes_come_back_where_the_data_is():
    torch.manual_seed(0)
    vq = KohonenVQ(2, 16, neighborhood="none", threshold_ema_dead_code=0.1, decay=0.8)
    x = torch.randn(400, 2) + 10
    for _ in range(40):
        vq(x)
    assert vq.usage.item() == 1
    assert torch.cdist(vq.codebook, x).amin(1).max() < 1


def test_freezing_all_or_some():
    torch.manual_seed(0)
    vq = KohonenVQ(4, 16)
    x = torch.randn(100, 4)
    vq.freeze([0, 5])
    before = vq.codebook.clone()
    vq(x)
    moved = (vq.codebook != before).any(1)
    assert not moved[[0, 5]].any()
    assert moved.sum() == 14
    vq.freeze()
    before = vq.codebook.clone()
    vq(x)
    assert torch.equal(vq.codebook, before)
    vq.unfreeze()
    vq(x)
    assert (vq.codebook != before).any(1).all()
    for frozen in (KohonenVQ(4, 16, freeze_codebook=True), KohonenVQ(4, 16, ema_update=False)):
        before = frozen.codebook.clone()
        frozen(x)
        assert torch.equal(frozen.codebook, before)
    frozen = KohonenVQ(4, 16, ema_update=False)
    frozen.load_state_dict(KohonenVQ(4, 16).state_dict())  # of a layer whose codes move
    before = frozen.codebook.clone()
    frozen(x)
    assert torch.equal(frozen.codebook, before)


@pytest.mark.parametrize("topology", ["rectangular", "hexagonal"])
def test_a_prime_number_of_codes_fills_its_map(topology):
    torch.manual_seed(0)
    vq = KohonenVQ(2, 61, topology=topology)
    assert vq.grid.shape == (8, 8)
    for _ in range(200):
        vq(torch.randn(1000, 2))
    vq.eval()
    x = torch.randn(5000, 2)
    assert vq(x).indices.unique().numel() == 61
    # Ordered up to the end of the last row: codes there lie where their neighbors do.
    assert topographic_error(x, vq.codebook, vq.grid) < 0.1
    assert topographic_error(x, vq.codebook[torch.randperm(61)], vq.grid) > 0.5
