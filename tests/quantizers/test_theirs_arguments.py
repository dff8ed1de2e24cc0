"""KohonenVQ with vector-quantize-pytorch's arguments: what asks for nothing, what None means, what the rest does."""

import inspect

import pytest
import torch
import torch.nn.functional as F
import vector_quantize_pytorch as theirs
from torch import nn

from topovq import GradientVQ, GroupedResidualVQ, KohonenVQ, ResidualVQ, SoftKohonenVQ
from topovq.ops.candidates import nearest_k, sample

# Their rule and their gradient.
RULE = {"neighborhood": "none", "count_smoothing": "copy", "decay": 0.8, "rotation_trick": None}


def twins(**options) -> tuple[theirs.VectorQuantize, KohonenVQ]:
    torch.manual_seed(0)
    options = {"dim": 4, "codebook_size": 16, **options}
    peer, own = theirs.VectorQuantize(**options), KohonenVQ(**{**RULE, **options})
    own.codebook = peer.codebook.detach()
    for name in ("project_in", "project_out"):
        getattr(own, name).load_state_dict(getattr(peer, name).state_dict())
    return peer, own


# What asks for nothing


def defaults(function) -> dict:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


@pytest.mark.parametrize(
    ("kind", "peer", "extra"),
    [
        (KohonenVQ, theirs.VectorQuantize, {}),
        (ResidualVQ, theirs.ResidualVQ, {"num_quantizers": 2}),
        (GroupedResidualVQ, theirs.GroupedResidualVQ, {"num_quantizers": 2}),
    ],
)
def test_their_defaults_are_all_taken(kind, peer, extra):
    for name, value in defaults(peer.__init__).items():
        kind(dim=4, codebook_size=16, **{**extra, name: extra.get(name, value)})
    vq = kind(dim=4, codebook_size=16, **{**defaults(peer.__init__), **extra})
    x = torch.randn(2, 6, 4)
    vq(x, **{name: value for name, value in defaults(peer.forward).items()})


@pytest.mark.parametrize(
    "nothing",
    [
        {"orthogonal_reg_weight": 0.0, "orthogonal_reg_max_codes": 128, "orthogonal_reg_active_codes_only": True},
        {"sync_kmeans": True},
        {"stochastic_sample_codes": False, "sample_codebook_temp": 0.1},
        {"codebook_diversity_loss_weight": 0, "codebook_diversity_temperature": 50.0},
        {"affine_param": False, "affine_param_batch_decay": 0.9, "sync_affine_param": True},
        {"commitment_use_cross_entropy_loss": False, "layernorm_after_project_in": None, "sync_update_v": 0.0},
    ],
    ids=str,
)
def test_what_asks_for_nothing_changes_nothing(nothing):
    torch.manual_seed(0)
    x = torch.randn(30, 4)
    made = []
    for options in ({}, nothing):
        torch.manual_seed(1)
        vq = KohonenVQ(4, 16, **options)
        made.append((*vq(x), vq.codebook))
    for one, two in zip(*made):
        assert torch.equal(one, two)
    ResidualVQ(4, 16, 2, shared_codebook=False, implicit_neural_codebook=False, mlp_kwargs={}, **nothing)


@pytest.mark.parametrize(
    ("asks", "advice"),
    [
        ({"sync_kmeans": False}, "sync_kmeans=False.*sync_codebook=False"),
        ({"codebook_diversity_loss_weight": 0.1}, "codebook_diversity_loss_weight=0.1.*neighborhood"),
        ({"return_zeros_for_masked_padding": False}, "masked places are always zeros"),
    ],
)
def test_what_asks_for_something_is_refused(asks, advice):
    with pytest.raises(TypeError, match=advice):
        KohonenVQ(4, 16, **asks)
    with pytest.raises(TypeError, match=r"implicit_neural_codebook=True.*more quantizers"):
        ResidualVQ(4, 16, 2, implicit_neural_codebook=True)
    with pytest.raises(TypeError, match=r"heads=2.*GroupedResidualVQ"):
        ResidualVQ(4, 16, 2, heads=2)


# None


def test_none_is_their_default():
    vq = KohonenVQ(4, 16, ema_update=None, learnable_codebook=None, rotation_trick=None)
    before = vq.codebook.clone()
    vq(torch.randn(100, 4))
    assert (vq.codebook != before).any(1).all(), "codes follow the running means"
    assert vq.rotation_trick is True
    assert KohonenVQ(1, 16, rotation_trick=None).rotation_trick is False
    assert KohonenVQ(4, 16).rotation_trick is False, "which is the default here"
    directional = KohonenVQ(4, 16, directional_reparam=True, rotation_trick=None)
    assert directional.rotation_trick is False
    assert isinstance(directional.codebook_of(0).codes, nn.Parameter)
    with pytest.raises(ValueError, match="needs ema_update=False"):
        KohonenVQ(4, 16, learnable_codebook=True, ema_update=None)


@pytest.mark.parametrize("cosine", [False, True])
def test_with_none_a_training_step_is_theirs(cosine):
    peer, own = twins(ema_update=None, use_cosine_sim=cosine)
    gradients = []
    for vq in (peer, own):
        x = torch.linspace(-1, 1, 120).view(1, 30, 4).sin().requires_grad_()
        quantized, _, loss = vq(x)
        (quantized.pow(3).sum() + loss).backward()
        gradients.append(x.grad)
    assert torch.allclose(*gradients, atol=1e-5)
    assert torch.allclose(own.codebook, peer.codebook, atol=1e-6)


# Orthogonality


def test_orthogonality_by_hand():
    """Codes e1, 2 e1, e2: of nine pairs, those of the first two add 2, so 2/9."""
    vq = GradientVQ(2, 3, orthogonal_reg_weight=10.0, commitment_weight=0.0, codebook_weight=0.0)
    vq.codebook = torch.tensor([[1.0, 0], [2, 0], [0, 1]])
    assert vq(torch.tensor([[1.0, 0]])).loss.item() == pytest.approx(10 * 2 / 9)
    active = GradientVQ(
        2,
        3,
        orthogonal_reg_weight=1.0,
        orthogonal_reg_active_codes_only=True,
        commitment_weight=0.0,
        codebook_weight=0.0,
    )
    active.codebook = vq.codebook.detach()
    assert active(torch.tensor([[1.0, 0], [2, 0]])).loss.item() == pytest.approx(2 / 4)
    assert active(torch.tensor([[1.0, 0], [0, 1]])).loss.item() == pytest.approx(0)
    assert active(torch.empty(0, 2)).loss.item() == 0
    assert vq.eval()(torch.tensor([[1.0, 0]])).loss.item() == 0


@pytest.mark.parametrize("options", [{}, {"orthogonal_reg_active_codes_only": True}])
def test_orthogonality_and_its_gradient_are_theirs(options):
    peer, own = twins(orthogonal_reg_weight=3.0, **options)
    x = torch.randn(1, 12, 4)
    breakdowns = []
    for vq in (peer, own):
        *_, loss, breakdown = vq(x, return_loss_breakdown=True)
        loss.backward()
        breakdowns.append(breakdown)
    assert breakdowns[0]._fields == breakdowns[1]._fields
    for one, two in zip(*breakdowns):
        assert torch.allclose(one, two, atol=1e-6)
    assert breakdowns[1].orthogonal_reg > 0
    assert torch.allclose(own.codebook_of(0).codes.grad, peer._codebook.embed.grad[0], atol=1e-6)


def test_of_many_codes_a_random_few_are_penalized():
    torch.manual_seed(0)
    vq = KohonenVQ(4, 64, orthogonal_reg_weight=1.0, orthogonal_reg_max_codes=5, orthogonal_reg_active_codes_only=True)
    x = torch.randn(200, 4)
    for _ in range(2):
        vq.zero_grad()
        indices, loss = vq(x)[1:]
        loss.backward()
        moved = (vq.codebook_of(0).codes.grad != 0).any(1)
        assert 2 <= moved.sum() <= 5
        assert set(moved.nonzero().flatten().tolist()) <= set(indices.tolist())


@pytest.mark.parametrize("cosine", [False, True])
def test_what_an_optimizer_does_to_running_codes_lasts(cosine):
    """In theirs the next update forgets it."""

    def trained(weight):
        torch.manual_seed(0)
        vq = KohonenVQ(4, 8, neighborhood="none", orthogonal_reg_weight=weight, use_cosine_sim=cosine, decay=0.9)
        optimizer = torch.optim.SGD(vq.parameters(), 0.3) if weight else None
        x = torch.randn(100, 4) + torch.tensor([2.0, 0, 0, 0])
        for _ in range(30):
            loss = vq(x, freeze_codebook=False).loss
            if optimizer is not None:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        units = F.normalize(vq.codebook.detach(), dim=1)
        return (units @ units.T).square().mean().item()

    assert trained(10.0) < 0.8 * trained(0.0)


def test_codes_that_no_optimizer_moves_follow_the_rule_as_ever():
    torch.manual_seed(0)
    one = KohonenVQ(4, 16, orthogonal_reg_weight=1.0)
    two = KohonenVQ(4, 16)
    two.load_state_dict(one.state_dict())
    for _ in range(20):
        x = torch.randn(30, 4)
        one(x)
        two(x)
    assert torch.allclose(one.codebook, two.codebook, atol=1e-5)


# Drawing codes


@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
def test_codes_are_drawn_with_the_probabilities_of_a_softmax(metric, monkeypatch):
    from topovq.ops import candidates

    monkeypatch.setattr(candidates, "ROWS", 1000)
    monkeypatch.setattr(candidates, "BLOCK", 3000)  # three codes at a time
    torch.manual_seed(0)
    codes, x = torch.randn(7, 3), torch.randn(3)
    index = sample(x.expand(40_000, 3), codes, 0.5, metric)
    distance = (x - codes).norm(dim=1) if metric == "euclidean" else -(F.normalize(codes, dim=1) @ x)
    expected = torch.softmax(-distance / 0.5, 0)
    assert torch.allclose(index.bincount(minlength=7) / 40_000, expected, atol=0.01)


def test_codes_are_drawn_in_training_only_and_learn_from_it():
    torch.manual_seed(0)
    vq = KohonenVQ(4, 16, stochastic_sample_codes=True, sample_codebook_temp=1.0, neighborhood="none", decay=0.5)
    plain = KohonenVQ(4, 16, neighborhood="none", decay=0.5)
    plain.load_state_dict(vq.state_dict())
    x = torch.randn(200, 4, requires_grad=True)
    closest = plain.eval()(x).indices
    assert torch.equal(vq.eval()(x).indices, closest)
    assert torch.equal(vq.train()(x, sample_codebook_temp=0.0, freeze_codebook=True).indices, closest)
    assert (vq(x, sample_codebook_temp=1e-4, freeze_codebook=True).indices == closest).float().mean() > 0.99
    codes = vq.codebook.clone()
    quantized, indices, loss = vq(x)
    assert (indices != closest).float().mean() > 0.2
    assert torch.equal(quantized, codes[indices])
    assert loss.item() == pytest.approx((x - codes[indices]).square().mean().item(), rel=1e-5)
    plain.train().update_indices(x, indices)
    assert torch.equal(plain.codebook, vq.codebook)
    (quantized.sum() + loss).backward()
    assert torch.allclose(x.grad, 1 + 2 * (x - codes[indices]).detach() / x.numel(), atol=1e-6)


# The closest few


def test_nearest_k_equals_a_full_sort(monkeypatch):
    from topovq.ops import candidates

    monkeypatch.setattr(candidates, "ROWS", 20)
    monkeypatch.setattr(candidates, "BLOCK", 20 * 5)
    torch.manual_seed(0)
    x, codes = torch.randn(50, 3, dtype=torch.float64), torch.randn(23, 3, dtype=torch.float64)
    assert torch.equal(nearest_k(x, codes, 7), torch.cdist(x, codes).argsort(1)[:, :7])
    x[3] = torch.nan
    assert nearest_k(x, codes, 23)[3].sort().values.tolist() == list(range(23))
    with pytest.raises(ValueError, match="k=24 must be at least 1 and at most 23"):
        nearest_k(x, codes, 24)


@pytest.mark.parametrize("options", [{}, {"codebook_dim": 2}, {"accept_image_fmap": True}, {"use_cosine_sim": True}])
@pytest.mark.parametrize("training", [False, True])
def test_topk_is_theirs(options, training):
    peer, own = twins(**options)
    x = torch.randn(2, 4, 5, 3) if "accept_image_fmap" in options else torch.randn(2, 30, 4)
    before = own.codebook.clone()
    quantized, indices, loss = peer.train(training)(x, topk=3)
    ours = own.train(training)(x, topk=3)
    assert torch.equal(ours.indices, indices)
    assert ours.quantized.shape == quantized.shape
    assert torch.allclose(ours.quantized, quantized, atol=1e-5)
    assert torch.allclose(ours.loss, loss, atol=1e-6)
    assert torch.equal(own.codebook, before)
    assert torch.equal(own(x, topk=1, freeze_codebook=True).indices[..., 0], own.eval()(x).indices)


def test_topk_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match="topk=2 needs heads=1, got heads=2"):
        KohonenVQ(4, 16, heads=2, codebook_dim=2)(torch.randn(3, 4), topk=2)
    with pytest.raises(ValueError, match="topk=0 must be an int of at least 1"):
        KohonenVQ(4, 16)(torch.randn(3, 4), topk=0)
    with pytest.raises(ValueError, match="topk=2 is the 2 closest codes"):
        KohonenVQ(4, 16, stochastic_sample_codes=True)(torch.randn(3, 4), topk=2)


# Updates


@pytest.mark.parametrize("heads", [1, 2])
def test_an_update_from_tokens_is_that_of_a_forward(heads):
    torch.manual_seed(0)
    options = {"codebook_dim": 3, "heads": heads, "separate_codebook_per_head": heads > 1}
    one, two = KohonenVQ(4, 16, **options), KohonenVQ(4, 16, **options)
    two.load_state_dict(one.state_dict())
    x, mask = torch.randn(2, 20, 4), torch.rand(2, 20) > 0.3
    tokens = one(x, mask=mask).indices
    two(x, mask=mask, ema_update=False)
    assert two.step == 0
    two.update_ema_indices(x, tokens)  # -1 masks
    for name in ("embed", "embed_avg", "cluster_size"):
        assert torch.equal(getattr(one._codebook, name), getattr(two._codebook, name))
    with pytest.raises(RuntimeError, match=r"call \.train"):
        two.eval().update_indices(x, tokens)
    with pytest.raises(ValueError, match="no running means to update"):
        KohonenVQ(4, 16, ema_update=False)(x, ema_update=True)


@pytest.mark.parametrize("cosine", [False, True])
def test_weights_of_the_update_are_theirs(cosine):
    peer, own = twins(use_cosine_sim=cosine, eps=1e-9)
    weight = torch.tensor([0.0, 1.0, 0.5, 0.1]).repeat(4)
    for _ in range(3):
        x = torch.randn(1, 60, 4)
        peer(x, ema_update_weight=weight)
        own(x, ema_update_weight=lambda sums, counts: weight.expand_as(counts))
        assert torch.allclose(own._codebook.embed_avg, peer._codebook.embed_avg, atol=1e-5)
        assert torch.allclose(own._codebook.cluster_size, peer._codebook.cluster_size, atol=1e-5)
        assert torch.allclose(own.codebook, peer.codebook, atol=1e-5)
    with pytest.raises(ValueError, match=r"shape \(3,\) must be \[16\]"):
        own(x, ema_update_weight=torch.ones(3))
    with pytest.raises(ValueError, match="ema_update_weight needs an update of the running means"):
        GradientVQ(4, 16)(x, ema_update_weight=weight)


def test_accumulated_updates_are_theirs():
    peer, own = twins()
    for accumulates in (True, True, False, False):
        x = torch.randn(1, 40, 4)
        peer(x, accum_ema_update=accumulates)
        own(x, accum_ema_update=accumulates)
        assert torch.allclose(own.codebook, peer.codebook, atol=1e-5)


# Gradients


def test_the_directional_gradient_is_theirs():
    peer, own = twins(directional_reparam=True, threshold_ema_dead_code=1e-9)
    gradients = []
    for vq in (peer, own):
        torch.manual_seed(1)
        x = torch.linspace(-1, 1, 120).view(1, 30, 4).sin().requires_grad_()
        quantized, _, loss = vq(x)
        assert loss.item() == 0
        quantized.pow(3).sum().backward()
        codes = vq._codebook.embed.grad[0] if vq is peer else vq.codebook_of(0).codes.grad
        gradients.append((quantized, x.grad, codes))
    for one, two in zip(*gradients):
        assert torch.allclose(one.view_as(two), two, atol=1e-4)
    assert gradients[1][2].any()
    with pytest.raises(ValueError, match=r"directional_reparam=True.*rotation_trick=True"):
        KohonenVQ(4, 16, directional_reparam=True, rotation_trick=True)


def test_codes_with_a_directional_gradient_revive_and_live_on():
    torch.manual_seed(0)
    vq = KohonenVQ(2, 8, directional_reparam=True, threshold_ema_dead_code=0.1, decay=0.8)
    far = vq.codebook.detach().clone()
    far[4:] += 100
    vq.codebook = far
    x = torch.randn(200, 2)
    for _ in range(20):
        vq(x)
    assert vq.codebook.detach().abs().max() < 20
    alive = vq.codebook.detach().clone()
    vq(x)
    assert torch.equal(vq.codebook.detach(), alive), "a code that is in use stays"


def test_gradients_that_do_not_go_to_the_input():
    torch.manual_seed(0)
    vq = KohonenVQ(
        4, 16, route_gradients_to_input=False, learnable_codebook=True, ema_update=False, commitment_weight=0.0
    )
    x = torch.randn(20, 4, requires_grad=True)
    quantized, indices, _ = vq(x)
    quantized.sum().backward()
    assert x.grad is None or not x.grad.any()
    assert torch.equal(vq.codebook.grad[:, 0], indices.bincount(minlength=16).float())


def test_diveq_moves_codes_by_the_gradient_of_the_output():
    torch.manual_seed(0)
    vq = ResidualVQ(4, 16, 3, diveq=True)
    optimizer = torch.optim.SGD(vq.parameters(), 1.0)
    x = torch.randn(200, 4)
    errors = []
    for _ in range(60):
        quantized, _, losses = vq(x)
        assert not losses.any()
        error = (quantized - x).square().mean()
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
        errors.append(error.item())
    assert errors[-1] < 0.6 * errors[0]
    vq.eval()
    made = vq(x)
    assert torch.allclose(made.quantized, vq.get_output_from_indices(made.indices), atol=1e-6)


def test_soft_codes_refuse_what_needs_a_choice():
    for options in ({"stochastic_sample_codes": True}, {"directional_reparam": True}, {"orthogonal_reg_weight": 1.0}):
        with pytest.raises(TypeError, match="SoftKohonenVQ"):
            SoftKohonenVQ(4, 16, **options)
    with pytest.raises(TypeError, match="update_indices and ema_update_weight"):
        SoftKohonenVQ(4, 16).update_indices(torch.randn(3, 4), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="quantizer='soft' mixes codes"):
        ResidualVQ(4, 16, 2, quantizer="soft", beam_size=2)


@pytest.mark.parametrize("weight", [1.0, 0.25])
def test_learnable_codes_have_their_gradients_and_a_loss_of_two_terms(weight):
    """Their one term moves vectors and codes; here it is two, of which each has its weight and its value."""
    torch.manual_seed(0)
    learnable = {"learnable_codebook": True, "ema_update": False}
    peer = theirs.VectorQuantize(4, 16, commitment_weight=weight, **learnable)
    equal = GradientVQ(4, 16, codebook_weight=weight, commitment_weight=weight)
    own = KohonenVQ(4, 16, commitment_weight=weight, **learnable)
    equal.codebook = own.codebook = peer.codebook.detach()
    x = torch.randn(2, 20, 4)
    losses, moves, codes_move = [], [], []
    for vq in (peer, equal, own):
        z = x.clone().requires_grad_()
        loss = vq(z)[2]
        loss.backward()
        losses.append(loss.detach())
        moves.append(z.grad)
        codes_move.append((peer._codebook.embed if vq is peer else vq.codebook_of(0).codes).grad.view(16, 4))
    torch.testing.assert_close(moves[1:], [moves[0]] * 2)
    torch.testing.assert_close(codes_move[1:], [codes_move[0], codes_move[0] / weight])
    torch.testing.assert_close(losses[1:], [2 * losses[0], (1 + 1 / weight) * losses[0]])
