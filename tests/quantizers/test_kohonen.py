"""The layer's contract: results, layouts, masks, heads, projections, tokens, freezing, figures, refusals."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from topovq import GradientVQ, Grid, KohonenVQ, ResidualVQ, Schedule, SoftKohonenVQ
from topovq.neighborhood import Neighborhood, recommended

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


def test_nan_and_infinity_are_left_out_and_counted():
    torch.manual_seed(0)
    clean, dirty = KohonenVQ(4, 16), KohonenVQ(4, 16)
    dirty.load_state_dict(clean.state_dict())
    x = torch.randn(20, 4)
    bad = torch.cat([x, torch.full((1, 4), float("nan")), torch.tensor([[0.0, float("inf"), 0, 0]])])
    bad.requires_grad_()
    quantized, indices, loss = dirty(bad)
    expected = clean(x)
    assert torch.equal(indices[:20], expected.indices)
    assert ((indices >= 0) & (indices < 16)).all()
    assert quantized.isfinite().all()
    assert loss.item() == pytest.approx(expected.loss.item())
    loss.backward()
    assert bad.grad.isfinite().all()
    assert torch.equal(clean.codebook, dirty.codebook)
    assert dirty.skipped.item() == 2


def test_an_empty_batch_changes_nothing():
    vq = KohonenVQ(4, 16, codebook_dim=3)
    before = {name: value.clone() for name, value in vq.state_dict().items()}
    for x, mask in ((torch.randn(0, 5, 4), None), (torch.randn(2, 3, 4), torch.zeros(2, 3, dtype=torch.bool))):
        quantized, indices, loss = vq(x, mask=mask)
        assert quantized.shape == x.shape
        assert indices.shape == x.shape[:-1]
        assert loss.item() == 0
    assert all(torch.equal(value, before[name]) for name, value in vq.state_dict().items())


def test_gradient_accumulation_equals_one_large_batch():
    torch.manual_seed(0)
    whole, parts = KohonenVQ(4, 16), KohonenVQ(4, 16)
    parts.load_state_dict(whole.state_dict())
    for _ in range(2):
        x = torch.randn(60, 4)
        whole(x)
        before = parts.codebook.clone()
        with parts.accumulate():
            parts(x[:20])
            parts(x[20:40])
        assert torch.equal(parts.codebook, before)
        parts(x[40:])
    assert torch.allclose(whole.codebook, parts.codebook, atol=1e-6)
    assert parts.step.item() == 2


def som_vae(dim, size, decay):
    return GradientVQ(dim, size, decay=decay, neighborhood="hard", tau=1.0)


@pytest.mark.parametrize("make", [KohonenVQ, SoftKohonenVQ, som_vae])
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_updates_once_with_the_right_gradient(reentrant, make):
    torch.manual_seed(0)
    plain, checked = make(4, 16, decay=0.5), make(4, 16, decay=0.5)
    checked.load_state_dict(plain.state_dict())
    layer = nn.Linear(4, 4)
    for step in range(3):
        x = torch.randn(30, 4)
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        quantized, _, loss = plain(layer(a))
        (quantized.square().sum() + loss).backward()

        def block(value):
            quantized, _, loss = checked(layer(value))
            return quantized.square().sum() + loss

        torch.utils.checkpoint.checkpoint(block, b, use_reentrant=reentrant).backward()
        assert torch.equal(a.grad, b.grad)
        for one, two in zip(plain.parameters(), checked.parameters()):
            assert torch.equal(one.grad, two.grad)
        assert checked.step.item() == step + 1
    assert torch.equal(plain.codebook, checked.codebook)


def test_a_training_pass_in_inference_mode_leaves_no_tensor_behind_that_a_later_one_cannot_change():
    vq = KohonenVQ(4, 16)
    with torch.inference_mode():
        vq(torch.randn(30, 4))
    with torch.no_grad():
        vq(torch.randn(30, 4))
    assert vq.step.item() == 2


def test_float64_is_float64_from_end_to_end():
    torch.manual_seed(0)
    vq = KohonenVQ(4, 16).double()
    x = torch.randn(30, 4, dtype=torch.float64, requires_grad=True)
    codes = vq.codebook.clone()
    quantized, indices, loss = vq(x)
    expected = (x.detach() - codes[indices]).square().mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-14)
    (quantized.sum() + loss).backward()
    assert torch.allclose(x.grad, 1 + 2 * (x.detach() - codes[indices]) / x.numel(), rtol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_statistics_stay_float32(dtype):
    vq = KohonenVQ(4, 16, codebook_dim=3).to(dtype)
    assert vq.project_in.weight.dtype == dtype
    for name, value in vq.codebooks.state_dict().items():
        assert value.dtype in (torch.float32, torch.int64, torch.bool), name
    assert vq.step.dtype == torch.int64
    assert vq(torch.randn(8, 4, dtype=dtype)).quantized.dtype == dtype


def test_no_code_is_lost_in_bf16_at_decay_0999():
    """In bf16 a running count of 1 could not fall by a thousandth; here it does, and the codes follow the data."""
    torch.manual_seed(0)
    low, full = KohonenVQ(4, 16, decay=0.999), KohonenVQ(4, 16, decay=0.999)
    low.load_state_dict(full.state_dict())
    low.bfloat16()
    for _ in range(50):
        x = torch.randn(256, 4).bfloat16()
        low(x)
        full(x.float())
    assert torch.allclose(low.codebook, full.codebook, atol=1e-5)
    assert low.usage.item() == 1


def test_autocast_does_not_reach_the_statistics():
    torch.manual_seed(0)
    a, b = (KohonenVQ(4, 64, neighborhood="gaussian") for _ in range(2))
    b.load_state_dict(a.state_dict())
    x = torch.randn(100, 4)
    a(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        b(x)
    assert torch.equal(a.codebook, b.codebook)


def test_codes_on_the_map():
    vq = KohonenVQ(4, 24, grid=(4, 6))
    assert vq.grid == Grid((4, 6))
    assert vq.coords(torch.tensor([[0, 7], [23, -1]])).tolist() == [[[0, 0], [1, 1]], [[3, 5], [-1, -1]]]
    assert KohonenVQ(4, 512).grid.shape == (16, 32)
    assert KohonenVQ(4, 9, grid=[3, 3], topology="hexagonal").grid.topology == "hexagonal"
    assert KohonenVQ(4, 7, neighborhood="none").grid.shape == (7,), "without a neighborhood any size will do"


def setting(vq: KohonenVQ) -> tuple[str, Schedule, float | None]:
    return vq.neighborhood.kind, vq.neighborhood.schedule, vq.neighborhood.radius


def test_a_neighborhood_left_open_is_the_recommended_one():
    grid = Grid((16, 32))
    assert setting(KohonenVQ(4, 512)) == recommended(grid, None)
    assert setting(KohonenVQ(4, 512, steps=1000)) == recommended(grid, 1000)
    assert setting(SoftKohonenVQ(4, 512, steps=1000)) == recommended(grid, 1000)
    for vq in ResidualVQ(4, 512, num_quantizers=2, steps=1000).quantizers:
        assert setting(vq) == recommended(grid, 1000)
    assert setting(KohonenVQ(4, 100, grid=100, steps=1000)) == recommended(Grid(100), 1000)


def test_what_is_given_takes_the_place_of_the_recommended_part():
    kind, _, radius = recommended(Grid((16, 32)), None)
    assert setting(KohonenVQ(4, 512, tau=0.5)) == (kind, Schedule.harmonic(0.5), radius)
    assert setting(KohonenVQ(4, 512, radius=3.0)) == (kind, recommended(Grid((16, 32)), None)[1], 3.0)
    assert setting(KohonenVQ(4, 512, schedule=Schedule.linear(4, 1, 9))) == (kind, Schedule.linear(4, 1, 9), None)


@pytest.mark.parametrize("kind", ["none", "hard", "gaussian", "exponential"])
def test_a_named_neighborhood_has_the_papers_settings(kind):
    paper = Neighborhood(kind, Grid((4, 4)))
    assert setting(KohonenVQ(4, 16, neighborhood=kind)) == (kind, Schedule.harmonic(0.1), paper.radius)


def test_setting_the_codebook_lasts():
    vq = KohonenVQ(2, 4, neighborhood="none")
    for _ in range(3):
        vq(torch.randn(10, 2))
    target = torch.tensor([[9.0, 9.0], [-9.0, 9.0], [9.0, -9.0], [-9.0, -9.0]])
    vq.codebook = target
    vq(target)
    assert torch.allclose(vq.codebook, target, atol=1e-3)
    with pytest.raises(ValueError, match=r"\(3, 2\).*\(4, 2\)"):
        vq.codebook = torch.zeros(3, 2)


BAD_ARGUMENTS = [
    ({"codebook_size": 0}, r"codebook_size=0"),
    ({"codebook_size": 13}, r"13 codes.*12, 14"),
    ({"codebook_size": 16, "grid": (3, 5)}, r"holds 15 codes, but codebook_size=16"),
    ({"codebook_size": 16, "tau": -0.1}, r"tau=-0.1"),
    ({"codebook_size": 16, "neighborhood": "square"}, r"'square'.*'hard'"),
    ({"codebook_size": 16, "topology": "round"}, r"'round'.*'hexagonal'"),
    ({"codebook_size": 16, "metric": "manhattan"}, r"'manhattan'.*'cosine'"),
    ({"codebook_size": 16, "count_smoothing": "none"}, r"'none'.*'carried'"),
    ({"codebook_size": 16, "decay": 1.0}, r"decay=1.0"),
    ({"codebook_size": 16, "threshold_ema_dead_code": 2}, r"threshold_ema_dead_code=2.*share of the mean"),
    ({"codebook_size": 16, "accept_image_fmap": True, "accept_3d_fmap": True}, "exclude each other"),
    ({"codebook_size": 16, "tau": 0.1, "schedule": Schedule.linear(3, 1, 10)}, "exclude each other"),
    ({"codebook_size": 16, "radius": 2.0, "schedule": Schedule.linear(3, 1, 10)}, r"radius=2.0"),
    ({"codebook_size": 16, "steps": 0}, r"steps=0 must be an int of at least 1"),
    ({"codebook_size": 16, "steps": 9, "neighborhood": "hard"}, r"steps=9.*neighborhood='hard'.*leave one out"),
    ({"codebook_size": 16, "steps": 9, "tau": 0.1, "radius": 2.0}, r"steps=9.*tau=0.1, radius=2.0.*leave one out"),
    ({"codebook_size": 16, "steps": 9, "schedule": Schedule.linear(3, 1, 10)}, r"steps=9.*schedule=.*leave one out"),
    ({"codebook_size": 16, "learnable_codebook": True}, "ema_update=False"),
    ({"codebook_size": 16, "heads": 0}, "heads=0"),
    ({"codebook_size": 16, "commitment_weight": float("nan")}, "commitment_weight=nan"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_ARGUMENTS, ids=str)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        KohonenVQ(4, **arguments)


@pytest.mark.parametrize("name", ["orthogonal_reg_weight", "stochastic_sample_codes", "affine_param", "vq_bridge"])
def test_peers_arguments_without_a_counterpart_are_refused_with_advice(name):
    with pytest.raises(TypeError, match=rf"KohonenVQ: {name}=1 is not supported; \w+"):
        KohonenVQ(4, 16, **{name: 1})
    with pytest.raises(TypeError, match="accumulate"):
        KohonenVQ(4, 16)(torch.randn(2, 4), accum_ema_update=True)
    with pytest.raises(TypeError, match="schedule='linear' is no Schedule"):
        KohonenVQ(4, 16, schedule="linear")
    with pytest.raises(TypeError, match="no argument here"):
        KohonenVQ(4, 16, codebok_dim=3)


def test_bad_input_is_refused():
    vq = KohonenVQ(4, 16)
    with pytest.raises(ValueError, match=r"\(2, 5\) must end in dim = 4"):
        vq(torch.randn(2, 5))
    with pytest.raises(ValueError, match=r"\(4,\) must be \[B, ..., C\] with C = dim = 4"):
        vq(torch.randn(4))
    with pytest.raises(ValueError, match="accept_image_fmap=True"):
        vq(torch.randn(2, 4, 8, 8))
    with pytest.raises(TypeError, match=r"torch.int64"):
        vq(torch.zeros(2, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"must be \[B, C, height, width\] with C = dim = 4"):
        KohonenVQ(4, 16, accept_image_fmap=True)(torch.randn(2, 3, 8, 8))
    with pytest.raises(ValueError, match=r"mask of shape \(2, 3\)"):
        vq(torch.randn(2, 4, 4), mask=torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="exclude each other"):
        vq(torch.randn(2, 4, 4), mask=torch.ones(2, 4, dtype=torch.bool), lens=torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="token 16 is out of range: expected 0 to 15"):
        vq.get_codes_from_indices(torch.tensor([3, 16]))
    with pytest.raises(ValueError, match="token 16 is out of range: expected 0 to 15"):
        vq.coords(torch.tensor([16]))
    with pytest.raises(ValueError, match=r"code -1 is out of range: expected 0 to 15$"):
        vq.freeze([3, -1])
    with pytest.raises(TypeError, match=r"float32"):
        vq.get_codes_from_indices(torch.tensor([0.5]))
