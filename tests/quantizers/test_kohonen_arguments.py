"""What KohonenVQ is given: the recommended neighborhood and what takes its place, and what is refused."""

import pytest
import torch

from topovq import GradientVQ, Grid, KohonenVQ, ResidualVQ, Schedule, SoftKohonenVQ
from topovq.neighborhood import Neighborhood, narrowing


def test_codes_on_the_map():
    vq = KohonenVQ(4, 24, grid=(4, 6))
    assert vq.grid == Grid((4, 6))
    assert vq.coords(torch.tensor([[0, 7], [23, -1]])).tolist() == [[[0, 0], [1, 1]], [[3, 5], [-1, -1]]]
    assert KohonenVQ(4, 512).grid.shape == (16, 32)
    assert KohonenVQ(4, 9, grid=[3, 3], topology="hexagonal").grid.topology == "hexagonal"


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 509, 8191, 8196])
@pytest.mark.parametrize("options", [{}, {"steps": 100}, {"neighborhood": "hard"}, {"neighborhood": "none"}], ids=str)
def test_any_number_of_codes_has_a_map(size, options):
    vq = KohonenVQ(2, size, **options)
    assert vq.grid == Grid.balanced(size)
    assert vq.codebook.shape == (size, 2)
    quantized, indices, loss = vq(torch.randn(50, 2))
    assert quantized.isfinite().all()
    assert loss.isfinite()
    assert vq.codebook.isfinite().all()
    assert vq.coords(indices).shape == (50, 2)


def setting(vq: KohonenVQ) -> tuple[str, Schedule, float | None]:
    return vq.neighborhood.kind, vq.neighborhood.schedule, vq.neighborhood.radius


def rides(vq: KohonenVQ) -> bool:
    return vq.codebook_of(0).ride


def test_a_neighborhood_left_open_is_the_recommended_one():
    for vq in (KohonenVQ(4, 512), KohonenVQ(4, 512, steps=1000), KohonenVQ(4, 512, neighborhood="ride", steps=1000)):
        assert rides(vq)
    for vq in ResidualVQ(4, 512, num_quantizers=2, steps=1000).quantizers:
        assert rides(vq)
    for kind in ("none", "hard", "gaussian", "exponential", "narrowing"):
        assert not rides(KohonenVQ(4, 512, neighborhood=kind))


def test_what_was_recommended_before_has_a_name():
    grid = Grid((16, 32))
    assert setting(KohonenVQ(4, 512, neighborhood="narrowing")) == narrowing(grid, None)
    assert setting(KohonenVQ(4, 512, neighborhood="narrowing", steps=1000)) == narrowing(grid, 1000)
    assert setting(SoftKohonenVQ(4, 512, steps=1000)) == narrowing(grid, 1000)
    assert setting(KohonenVQ(4, 100, grid=100, neighborhood="narrowing", steps=9)) == narrowing(Grid(100), 9)


def test_a_short_training_has_a_shorter_memory():
    def decay(**options):
        return KohonenVQ(4, 16, **options).codebook_of(0).decay

    assert decay() == decay(neighborhood="none") == decay(steps=6_000) == decay(steps=10**6) == 0.99
    assert (decay(steps=3_000), decay(steps=1_200), decay(steps=1)) == (0.98, 0.95, 0.95)
    assert decay(steps=1_200, decay=0.5) == 0.5


def test_codes_that_receive_nothing_stay_with_a_narrowing_neighborhood():
    def decays(**options):
        return KohonenVQ(4, 16, **options).codebook_of(0).update_empty

    assert [decays(neighborhood="narrowing"), decays(tau=0.5), decays(radius=2.0)] == [False, False, False]
    assert [decays(), decays(steps=9), decays(update_empty=False)] == [True, True, False]
    assert [decays(neighborhood=kind) for kind in ("none", "hard", "gaussian")] == [True, True, True]
    assert decays(neighborhood="hard", update_empty=False) is False


def test_what_is_given_takes_the_place_of_a_part_of_the_narrowing_neighborhood():
    kind, falls, radius = narrowing(Grid((16, 32)), None)
    for named in ({}, {"neighborhood": "narrowing"}):
        assert setting(KohonenVQ(4, 512, tau=0.5, **named)) == (kind, Schedule.harmonic(0.5), radius)
        assert setting(KohonenVQ(4, 512, radius=3.0, **named)) == (kind, falls, 3.0)
        linear = Schedule.linear(4, 1, 9)
        assert setting(KohonenVQ(4, 512, schedule=linear, **named)) == (kind, linear, None)


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
    ({"codebook_size": 16, "grid": (3, 5)}, r"holds 15 codes, but codebook_size=16"),
    ({"codebook_size": 16, "grid": (3, 6)}, r"holds 18 codes, but codebook_size=16; .* give a Grid with size=16"),
    ({"codebook_size": 16, "grid": Grid((3, 6), size=17)}, r"holds 17 codes, but codebook_size=16"),
    ({"codebook_size": 16, "tau": -0.1}, r"tau=-0.1"),
    ({"codebook_size": 16, "neighborhood": "square"}, r"'square'.*'ride'.*'hard'"),
    ({"codebook_size": 16, "topology": "round"}, r"'round'.*'hexagonal'"),
    ({"codebook_size": 16, "metric": "manhattan"}, r"'manhattan'.*'cosine'"),
    ({"codebook_size": 16, "count_smoothing": "none"}, r"'none'.*'carried'"),
    ({"codebook_size": 16, "decay": 1.5}, r"decay=1.5"),
    ({"codebook_size": 16, "threshold_ema_dead_code": -2}, r"threshold_ema_dead_code=-2.*share of the mean"),
    ({"codebook_size": 16, "accept_image_fmap": True, "accept_3d_fmap": True}, "exclude each other"),
    ({"codebook_size": 16, "tau": 0.1, "schedule": Schedule.linear(3, 1, 10)}, "exclude each other"),
    ({"codebook_size": 16, "radius": 2.0, "schedule": Schedule.linear(3, 1, 10)}, r"radius=2.0"),
    ({"codebook_size": 16, "steps": 0}, r"steps=0 must be an int of at least 1"),
    ({"codebook_size": 16, "steps": 9, "neighborhood": "hard"}, r"steps=9.*neighborhood='hard'.*leave one out"),
    ({"codebook_size": 16, "steps": 9, "tau": 0.1, "radius": 2.0}, r"steps=9.*tau=0.1, radius=2.0.*leave one out"),
    ({"codebook_size": 16, "steps": 9, "schedule": Schedule.linear(3, 1, 10)}, r"steps=9.*schedule=.*leave one out"),
    ({"codebook_size": 16, "neighborhood": "ride", "tau": 0.1}, r"neighborhood='ride'.*leave out tau=0.1"),
    ({"codebook_size": 16, "learnable_codebook": True}, "ema_update=False"),
    ({"codebook_size": 16, "heads": 0}, "heads=0"),
    ({"codebook_size": 16, "commitment_weight": float("nan")}, "commitment_weight=nan"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_ARGUMENTS, ids=str)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        KohonenVQ(4, **arguments)


@pytest.mark.parametrize("name", ["straight_through", "affine_param", "vq_bridge", "layernorm_after_project_in"])
def test_peers_arguments_without_a_counterpart_are_refused_with_advice(name):
    with pytest.raises(TypeError, match=rf"KohonenVQ: {name}=1 is not supported; \w+"):
        KohonenVQ(4, 16, **{name: 1})
    with pytest.raises(TypeError, match=r"indices=.*F\.cross_entropy"):
        KohonenVQ(4, 16)(torch.randn(2, 4), indices=torch.zeros(2, dtype=torch.int64))
    with pytest.raises(TypeError, match="schedule='linear' is no Schedule"):
        KohonenVQ(4, 16, schedule="linear")
    for value in (3, None):
        with pytest.raises(TypeError, match="no argument here"):
            KohonenVQ(4, 16, codebok_dim=value)


MISSPELLED = [
    (
        KohonenVQ,
        {"kmean_init": True},
        r"KohonenVQ: kmean_init=True .*no argument here \(did you mean 'kmeans_init'\?\)",
    ),
    (KohonenVQ, {"ortogonal_reg_weight": 1}, "did you mean 'orthogonal_reg_weight'"),
    (GradientVQ, {"neighbour_weight": 1}, "GradientVQ: .*did you mean 'neighbor_weight'"),
    (KohonenVQ, {"foo": 1}, "KohonenVQ: foo=1 is not supported; it is no argument here$"),
    (ResidualVQ, {"foo": 1}, "^ResidualVQ: foo=1 is not supported; it is no argument here$"),
    (ResidualVQ, {"kmean_init": True}, "^ResidualVQ: .*did you mean 'kmeans_init'"),
    (ResidualVQ, {"beem_size": 2}, "^ResidualVQ: .*did you mean 'beam_size'"),
    (ResidualVQ, {"affine_param": True}, "^ResidualVQ: affine_param=True .*running means"),
    (ResidualVQ, {"quantizer": "gradient", "neighbor_wait": 1}, "^ResidualVQ: .*did you mean 'neighbor_weight'"),
]


@pytest.mark.parametrize(("kind", "argument", "message"), MISSPELLED, ids=str)
def test_an_unknown_argument_is_refused_by_whom_it_was_given(kind, argument, message):
    sizes = {"num_quantizers": 2} if kind is ResidualVQ else {}
    with pytest.raises(TypeError, match=message):
        kind(4, 16, **sizes, **argument)


@pytest.mark.parametrize("vq", [KohonenVQ(4, 16), ResidualVQ(4, 16, 2)], ids=lambda vq: type(vq).__name__)
def test_an_unknown_argument_of_forward_is_shown_by_its_shape(vq):
    x, tokens = torch.randn(2, 50, 4), torch.zeros(2, 50, dtype=torch.int64)
    with pytest.raises(TypeError, match=r"VQ\.forward: indices=a tensor of shape \(2, 50\) is not .*F\.cross_entropy"):
        vq(x, indices=tokens)
    with pytest.raises(TypeError, match=r"masks=a tensor of shape \(2, 50\) .*did you mean 'mask'"):
        vq(x, masks=tokens > 0)


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
