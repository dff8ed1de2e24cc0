"""GradientVQ and its SOM-VAE form, the differentiable KSOM, ResidualVQ."""

import pytest
import torch

from topovq import GradientVQ, KohonenVQ, ResidualVQ, Schedule, SoftKohonenVQ


def test_gradient_losses_by_hand():
    """Codes -1, 0, 1 on a line; x = 0.5 chooses 0 (a tie with 1: the lower index wins) and x = 2 chooses 1."""
    vq = GradientVQ(1, 3, codebook_weight=1.0, commitment_weight=0.25)
    vq.codebook = torch.tensor([[-1.0], [0.0], [1.0]])
    _, indices, loss = vq(torch.tensor([[0.5], [2.0]]))
    assert indices.tolist() == [1, 2]
    assert loss.item() == pytest.approx(1.25 * (0.25 + 1) / 2)
    loss.backward()
    # d/dw of mean (w - x)^2: (2 * (0 - 0.5)) / 2 and (2 * (1 - 2)) / 2; the commitment term does not reach the codes
    assert vq.codebook.grad.flatten().tolist() == pytest.approx([0, -0.5, -1])


@pytest.mark.parametrize(("target", "expected"), [("input", (2.25 + 0.25 + 4) / 2), ("winner", (1 + 1 + 1) / 2)])
def test_som_vae_neighbor_term_by_hand(target, expected):
    """On the line, 0 has neighbors -1 and 1, and 1 has 0.

    input:  |-1 - 0.5|^2 + |1 - 0.5|^2 for x = 0.5, |0 - 2|^2 for x = 2.  winner: |-1 - 0|^2 + |1 - 0|^2, |0 - 1|^2.
    """
    options = {"neighborhood": "hard", "grid": 3, "neighbor_target": target, "commitment_weight": 0.0}
    with_neighbors = GradientVQ(1, 3, **options, neighbor_weight=1.0)
    without = GradientVQ(1, 3, **options, neighbor_weight=0.0)
    for vq in (with_neighbors, without):
        vq.codebook = torch.tensor([[-1.0], [0.0], [1.0]])
    x = torch.tensor([[0.5], [2.0]])
    assert (with_neighbors(x).loss - without(x).loss).item() == pytest.approx(expected)


def test_neighbor_term_by_hand_in_two_dimensions():
    """Codes (0, 0) and (3, 4) on a line: x = (1, 0) chooses the first, and the second is its one neighbor.

    input:  |(3, 4) - (1, 0)|^2 = 20.  winner: |(3, 4) - (0, 0)|^2 = 25.  Their mean over dimensions is half of that.
    """
    terms = {}
    for target in ("input", "winner"):
        for reduction in ("sum", "mean"):
            vq = GradientVQ(
                2, 2, neighborhood="hard", grid=2, codebook_weight=0.0, commitment_weight=0.0, neighbor_weight=0.1,
                neighbor_target=target, neighbor_reduction=reduction,
            )  # fmt: skip
            vq.codebook = torch.tensor([[0.0, 0.0], [3.0, 4.0]])
            terms[target, reduction] = vq(torch.tensor([[1.0, 0.0]])).loss.item()
    expected = {("input", "sum"): 2.0, ("input", "mean"): 1.0, ("winner", "sum"): 2.5, ("winner", "mean"): 1.25}
    assert terms == pytest.approx(expected)


def test_the_loss_is_that_of_the_authors_term_by_term():
    """Their SOM-VAE: mse(q, sg x) + 0.25 mse(sg q, x) + 0.1 mean_n sum_k h[k*, k] / (1 + 0.1 t) |w_k - sg w_k*|^2.

    h is 1 up to a distance of 1.5 on the map. Their mse is a mean per element, their last term a sum over dimensions.
    """
    torch.manual_seed(0)
    vq = GradientVQ(
        64, 12, grid=(3, 4), neighborhood="hard", tau=0.1, neighbor_target="winner", neighbor_weight=0.1
    ).double()
    place = torch.cartesian_prod(torch.arange(3.0), torch.arange(4.0)).double()
    near = (torch.cdist(place, place) < 1.5).double()
    for t in range(3):
        x = torch.randn(50, 64, dtype=torch.float64, requires_grad=True)
        _, indices, loss = vq(x)
        codes, y = vq.codebook.detach().clone().requires_grad_(), x.detach().clone().requires_grad_()
        q = codes[indices]
        squares = (codes[None] - q.detach()[:, None]).square().sum(-1)
        theirs = (q - y.detach()).square().mean() + 0.25 * (y - q.detach()).square().mean()
        theirs = theirs + 0.1 * (near[indices] / (1 + 0.1 * t) * squares).sum(1).mean()
        vq.zero_grad()
        loss.backward()
        theirs.backward()
        for ours, expected in ((loss, theirs), (vq.codebook.grad, codes.grad), (x.grad, y.grad)):
            torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-14)


def test_neighbor_term_equals_the_sum_written_out():
    torch.manual_seed(0)
    vq = GradientVQ(4, 12, neighborhood="gaussian", grid=(3, 4), commitment_weight=0.0, codebook_weight=0.0)
    x = torch.randn(50, 4)
    _, indices, loss = vq(x)
    loss.backward()
    codes = vq.codebook.detach().clone().requires_grad_()
    weights = (vq.neighborhood.matrix(0).float() - torch.eye(12))[indices]
    written_out = (weights * ((codes[None] - x[:, None]) ** 2).sum(-1)).sum() / len(x)
    written_out.backward()
    assert loss.item() == pytest.approx(written_out.item(), rel=1e-5)
    assert torch.allclose(vq.codebook.grad, codes.grad, atol=1e-6)


def test_options_of_the_neighbor_term_are_checked():
    with pytest.raises(ValueError, match="neighbor_target='code' is unknown; choose one of 'input', 'winner'"):
        GradientVQ(4, 16, neighborhood="hard", neighbor_target="code")
    with pytest.raises(ValueError, match="neighbor_reduction='none' is unknown; choose one of 'sum', 'mean'"):
        GradientVQ(4, 16, neighborhood="hard", neighbor_reduction="none")


def test_gradient_codes_follow_an_optimizer():
    torch.manual_seed(0)
    vq = GradientVQ(2, 4)
    x = torch.randn(200, 2) + 3
    optimizer = torch.optim.AdamW(vq.parameters(), lr=0.1)
    first = vq(x).loss.item()
    for _ in range(100):
        optimizer.zero_grad()
        vq(x).loss.backward()
        optimizer.step()
    assert vq(x).loss.item() < first / 4
    assert vq.usage.item() > 0


@pytest.mark.parametrize("neighborhood", ["none", "hard"])
def test_frozen_codes_get_no_gradient(neighborhood):
    torch.manual_seed(0)
    x = torch.randn(100, 2)
    vq = GradientVQ(2, 4, neighborhood=neighborhood)
    vq.freeze([0, 2])
    vq(x).loss.backward()
    assert (vq.codebook.grad != 0).any(1).tolist() == [False, True, False, True]
    vq.zero_grad()
    encoded = x.clone().requires_grad_()
    vq(encoded, freeze_codebook=True).loss.backward()
    assert vq.codebook.grad is None
    assert (encoded.grad != 0).all(), "the commitment term is there as ever"


def test_learnable_codebook_is_gradient_vq():
    torch.manual_seed(0)
    one = KohonenVQ(4, 16, learnable_codebook=True, ema_update=False, neighborhood="none", commitment_weight=0.25)
    two = GradientVQ(4, 16)
    two.load_state_dict(one.state_dict())
    x = torch.randn(30, 4)
    assert torch.equal(one(x).loss, two(x).loss)


@pytest.mark.parametrize(
    "reach",
    [{"neighborhood": "hard"}, {"steps": 100}, {"tau": 0.2}, {"radius": 2.0}, {"schedule": Schedule.linear(2, 1, 9)}],
)
def test_a_learnable_codebook_refuses_a_neighborhood_that_nothing_would_use(reach):
    name = next(iter(reach))
    with pytest.raises(ValueError, match=rf"learnable_codebook=True and {name}=.* exclude each other: .*GradientVQ"):
        KohonenVQ(4, 16, learnable_codebook=True, ema_update=False, **reach)
    assert KohonenVQ(4, 16, learnable_codebook=True, ema_update=False).neighborhood.kind == "none"
    assert KohonenVQ(4, 16, learnable_codebook=True, ema_update=False, neighborhood="none").neighborhood.kind == "none"
    assert GradientVQ(4, 16, neighborhood="hard").neighborhood.kind == "hard"


def test_soft_output_by_hand_and_hard_in_evaluation():
    """Codes 0 and 1 (d = 1), T = 1, x = 0: y = softmax(0, -1), the output y_2 = 1 / (1 + e)."""
    vq = SoftKohonenVQ(
        1, 2, grid=2, neighborhood="none", temperature=Schedule.harmonic(0.0), decay=0.5, update_empty=False
    )
    vq.codebook = torch.tensor([[0.0], [1.0]])
    share = 1 / (1 + torch.e)
    quantized, indices, _ = vq(torch.tensor([[0.0]]))
    assert quantized.item() == pytest.approx(share)
    assert indices.item() == 0
    # m = (0 + 0, 1 + 0) / 2 and N = (1 + y_1, 1 + y_2) / 2
    assert vq.codebook.flatten().tolist() == pytest.approx([0, 1 / (1 + share)])
    vq.eval()
    assert vq(torch.tensor([[0.0]])).quantized.item() == 0


def test_soft_gradient_goes_through_the_softmax_and_in_chunks(monkeypatch):
    from topovq.quantizers import soft

    def gradient():
        torch.manual_seed(0)
        vq = SoftKohonenVQ(4, 16)
        x = torch.randn(50, 4, requires_grad=True)
        quantized, _, loss = vq(x)
        (quantized.square().sum() + loss).backward()
        return x.grad, vq.codebook

    whole, codes = gradient()
    monkeypatch.setattr(soft, "SCORES", 16 * 7)
    in_chunks, codes_in_chunks = gradient()
    assert torch.allclose(whole, in_chunks, atol=1e-5)
    assert torch.allclose(codes, codes_in_chunks, atol=1e-5)


def test_soft_refuses_what_it_cannot_do():
    for options in ({"use_cosine_sim": True}, {"metric": "cosine"}):
        with pytest.raises(ValueError, match="metric='cosine' is not supported"):
            SoftKohonenVQ(4, 16, **options)
    for temperature in (Schedule.linear(1, 0, 10), 0.5):
        with pytest.raises(ValueError, match=r"temperature=.* must be a Schedule that stays above 0"):
            SoftKohonenVQ(4, 16, temperature=temperature)


def test_soft_codes_that_die_come_back():
    torch.manual_seed(0)
    x = torch.randn(200, 2)
    dead = []
    for threshold in (0.0, 0.1):
        vq = SoftKohonenVQ(
            2, 16, neighborhood="none", threshold_ema_dead_code=threshold, temperature=Schedule.harmonic(1.0), decay=0.5
        )
        vq.codebook = torch.cat([torch.randn(8, 2), torch.randn(8, 2) + 100])
        for _ in range(10):
            vq(x)
        dead.append(16 - len(vq.eval()(x).indices.unique()))
    assert dead[0] >= 8
    assert dead[1] <= 2


def test_residual_reduces_the_error_layer_by_layer():
    torch.manual_seed(0)
    x = torch.randn(500, 4)
    errors = []
    for depth in (1, 2, 4):
        torch.manual_seed(1)
        vq = ResidualVQ(4, 16, num_quantizers=depth, neighborhood="hard")
        for _ in range(60):
            vq(x)
        quantized, indices, _ = vq.eval()(x)
        assert indices.shape == (500, depth)
        assert torch.equal(vq.get_output_from_indices(indices), quantized)
        assert torch.allclose(vq.get_codes_from_indices(indices).sum(0), quantized, atol=1e-5)
        errors.append((x - quantized).square().mean().item())
    assert errors[0] > 1.5 * errors[1] > 3 * errors[2]


@pytest.mark.parametrize("depth", [1, 3])
def test_residual_hands_the_gradient_on_once(depth):
    torch.manual_seed(0)
    vq = ResidualVQ(4, 16, num_quantizers=depth)
    x = torch.randn(20, 4, requires_grad=True)
    weight = torch.randn(20, 4)
    (vq(x).quantized * weight).sum().backward()
    assert torch.allclose(x.grad, weight, atol=1e-6)


def test_residual_freezes_codes_in_all_layers():
    torch.manual_seed(0)
    vq, x = ResidualVQ(4, 16, num_quantizers=2, neighborhood="hard"), torch.randn(200, 4)
    before = vq.codebook.clone()
    vq.freeze([0, 3])
    vq(x)
    moved = (vq.codebook != before).any(-1)
    assert not moved[:, [0, 3]].any()
    assert moved[:, 1].all()
    vq.unfreeze()
    vq(x)
    assert (vq.codebook != before).any(-1).all()


def test_residual_masks_layouts_and_gradient():
    torch.manual_seed(0)
    vq = ResidualVQ(4, 16, num_quantizers=3, accept_image_fmap=True)
    x = torch.randn(2, 4, 3, 3, requires_grad=True)
    mask = torch.rand(2, 3, 3) > 0.5
    quantized, indices, loss = vq(x, mask=mask)
    assert quantized.shape == x.shape
    assert (indices[~mask] == -1).all()
    (quantized.sum() + loss.sum()).backward()
    assert x.grad.isfinite().all()
    gradient = GradientVQ(4, 16)
    assert isinstance(ResidualVQ(4, 16, 2, quantizer="gradient").quantizers[0], type(gradient))
    with pytest.raises(ValueError, match=r"'kohonnen'.*'kohonen'"):
        ResidualVQ(4, 16, 2, quantizer="kohonnen")
