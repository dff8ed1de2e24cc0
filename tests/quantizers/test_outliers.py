"""One bad vector or one bad code: the others are learned and chosen as if it were not there."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor

from topovq import GradientVQ, KohonenVQ, ResidualVQ, SoftKohonenVQ
from topovq.metrics import stray, used_lately
from topovq.ops.bound import counted

NAN, INF = float("nan"), float("inf")


def same_state(a: torch.nn.Module, b: torch.nn.Module, but: str = "") -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return all(torch.equal(ours[name], theirs[name]) for name in ours if not but or not name.endswith(but))


def steps_with(value: float, alone: bool, steps: int = 1100, **options: object) -> KohonenVQ:
    """Steps of 64 codes; at step 100 there is a vector of such numbers, in its batch or as one."""
    torch.manual_seed(0)
    vq = KohonenVQ(8, 64, **options)
    for step in range(steps):
        x_ND = torch.randn(128, 8)
        if step == 100 and alone:
            vq(torch.full((1, 8), value))
        elif step == 100:
            x_ND[5] = value
        vq(x_ND)
    return vq


@pytest.mark.parametrize("alone", [False, True])
def test_a_vector_far_from_all_others_is_left_out_as_nan_is(alone: bool) -> None:
    expected = steps_with(NAN, alone, 102)
    for value in (1e12, -1e4, 3e38):
        vq = steps_with(value, alone, 102)
        assert same_state(vq, expected), value
        assert vq.skipped.item() == 1
    assert steps_with(1e12, alone).usage.item() == 1


def test_a_vector_that_is_only_rather_far_costs_no_code() -> None:
    vq = steps_with(100.0, False, neighborhood="none")
    assert vq.skipped.item() == 0
    assert vq.usage.item() == 1


def every_kind() -> dict[str, torch.nn.Module]:
    return {
        "kohonen": KohonenVQ(4, 16),
        "bfloat16": KohonenVQ(4, 16).bfloat16(),
        "revived": KohonenVQ(4, 16, neighborhood="none", threshold_ema_dead_code=2),
        "started": KohonenVQ(4, 16, kmeans_init=True),
        "cosine": KohonenVQ(4, 16, use_cosine_sim=True),
        "dot": KohonenVQ(4, 16, metric="dot"),
        "drawn": KohonenVQ(4, 16, stochastic_sample_codes=True),
        "gradient": GradientVQ(4, 16),
        "som-vae": GradientVQ(4, 16, neighborhood="hard"),
        "soft": SoftKohonenVQ(4, 16),
        "residual": ResidualVQ(4, 16, 3),
        "beams": ResidualVQ(4, 16, 3, beam_size=2, shared_codebook=True, threshold_ema_dead_code=2),
    }


@pytest.mark.parametrize("kind", every_kind())
@pytest.mark.parametrize("value", [1e12, 3e38])
def test_every_quantizer_stays_with_the_data(kind: str, value: float) -> None:
    torch.manual_seed(0)
    vq = every_kind()[kind]
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    optimizer = torch.optim.SGD(vq.parameters(), 0.1) if list(vq.parameters()) else None
    for step in range(5):
        x_ND = torch.randn(40, 4).to(dtype)
        if step < 3:
            x_ND[7 * step] = value
        x_ND.requires_grad_()
        quantized, indices, loss = vq(x_ND)
        assert ((indices >= 0) & (indices < 16)).all()
        assert loss.isfinite().all()
        (quantized.sum() + loss.sum()).backward()
        if kind != "cosine" or value < 1e30:
            assert x_ND.grad is not None
            assert x_ND.grad.isfinite().all()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    for name, tensor in vq.state_dict().items():
        assert tensor.isfinite().all(), name
        assert name.endswith("idle") or tensor.double().abs().max() < 100, name
    # Cosine's vectors have length one, and a shared codebook sees a vector in each of three quantizers.
    assert vq.skipped.item() == {"cosine": 0, "beams": 9}.get(kind, 3)


def test_a_batch_whose_square_overflows_changes_nothing() -> None:
    torch.manual_seed(0)
    vq = KohonenVQ(4, 16)
    vq(torch.randn(50, 4))
    before = copy.deepcopy(vq)
    _, indices, loss = vq(torch.full((50, 4), 3e38))
    assert same_state(vq, before, but="skipped")
    assert vq.skipped.item() == 50
    assert ((indices >= 0) & (indices < 16)).all()
    assert loss.item() == 0
    vq(torch.randn(50, 4))
    assert all(tensor.isfinite().all() for tensor in vq.state_dict().values())


@pytest.mark.parametrize("number", [1, 200])
@pytest.mark.parametrize(
    ("scale", "shift"), [(1e-6, 0.0), (1e-3, 0.0), (1e3, 0.0), (1e6, 0.0), (1e15, 0.0), (1.0, 1e5), (1e-3, 1e3)]
)
def test_data_of_any_size_and_place_is_learned(number: int, scale: float, shift: float) -> None:
    torch.manual_seed(0)
    for options in ({}, {"neighborhood": "none", "decay": 0.9}, {"kmeans_init": True}):
        vq = KohonenVQ(4, 16, **options)
        for _ in range(120):
            vq(scale * torch.randn(number, 4) + shift)
        assert vq.skipped.item() == 0
    error = vq.eval()(scale * torch.randn(50, 4) + shift).loss.item()
    assert error < 2 * scale**2 + (1e-6 * shift) ** 2


def test_padding_and_silence_are_not_what_vectors_are_compared_with() -> None:
    torch.manual_seed(0)
    vq = KohonenVQ(4, 16)
    for _ in range(20):
        x_ND = 1e6 * torch.randn(500, 4)
        x_ND[torch.rand(500) < 0.9] = 0
        vq(x_ND)
    assert vq.skipped.item() == 0


def test_which_vectors_count_by_hand() -> None:
    x_ND = torch.tensor([[1.0, -1.0], [3.0, 0.0], [0.0, 0.0], [2000.0, 0.0], [2001.0, 0.0], [NAN, 1.0], [1e19, 1e19]])
    # A quarter of the four sampled lengths 2, 3, 2000 and 2001 is one of them: 2000 is the usual length.
    assert counted(x_ND, None, learns=True).tolist() == [True] * 5 + [False] * 2
    x_ND = x_ND[[0, 0, 1, 1, 4]]  # 3 is
    assert counted(x_ND, None, learns=True).all()
    x_ND[4] = 3001.0 / 2
    assert counted(x_ND, None, learns=True).tolist() == [True] * 4 + [False]
    assert counted(x_ND, torch.tensor([[0.0, NAN], [4.0, 0.0]]), learns=True).all()  # the longest code is 4
    assert counted(x_ND, None, learns=False).all()


def test_in_evaluation_every_finite_vector_has_its_token_and_its_error() -> None:
    vq = KohonenVQ(2, 4, commitment_weight=1.0).eval()
    vq.codebook = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]])
    _, indices, loss = vq(torch.tensor([[1e6, 0.0], [0.0, 1e6], [-1e6, -1e6], [0.1, 0.0]]))
    assert indices.tolist() == [1, 2, 3, 0]
    assert loss.item() == pytest.approx(4e12 / 8, rel=1e-4)
    assert vq.skipped.item() == 0


@pytest.mark.parametrize("value", [NAN, INF, 1e30])
def test_a_code_that_is_not_finite_is_never_chosen(value: float) -> None:
    torch.manual_seed(0)
    vq, expected = KohonenVQ(4, 16), KohonenVQ(4, 15)
    codes_KD, x_ND = torch.randn(15, 4), torch.randn(200, 4)
    expected.codebook = codes_KD
    vq.codebook = torch.cat([codes_KD[:3], torch.full((1, 4), value), codes_KD[3:]])
    places = torch.tensor([*range(3), *range(4, 16)])
    assert torch.equal(vq.eval()(x_ND).indices, places[expected.eval()(x_ND).indices])
    closest = vq(x_ND, topk=3).indices
    assert torch.equal(closest, places[expected(x_ND, topk=3).indices])
    soft = SoftKohonenVQ(4, 16)
    soft.codebook = vq.codebook
    quantized, indices, loss = soft(x_ND.clone().requires_grad_())
    assert torch.equal(indices, closest[:, 0])
    assert quantized.isfinite().all()
    loss.backward()
    vq.train()
    for _ in range(3):
        vq(x_ND)
    assert (vq.codebook.isfinite().all(1) | (torch.arange(16) == 3)).all()


def worn(**options: object) -> KohonenVQ:
    """A codebook of 16 codes after some updates, of which code 3 is NaN, and 5 and 6 are where no data is."""
    torch.manual_seed(0)
    vq = KohonenVQ(4, 16, decay=0.9, **options)
    for _ in range(20):
        vq(torch.randn(200, 4))
    with torch.no_grad():
        for book in vq.books():
            book.codes[3, 1] = NAN
            book.codes[5:7] = 300.0
            if not book.learnable:
                book.sums.copy_(book.codes * book.counts[:, None])
            book.idle[5:7] = 50
    return vq


def test_health_names_the_codes_that_are_not_finite_or_far_outside_and_repair_mends_them() -> None:
    vq = worn()
    health = vq.health()
    assert health.stray_codes == 3
    assert health.advice == (
        "code 3 is not finite; codes 5 and 6 are far outside the data: repair() puts them between their neighbors on "
        "the map"
    )
    assert vq.repair() == 3
    health = vq.health()
    assert (health.stray_codes, health.advice) == (0, "")
    assert vq.repair() == 0
    assert vq.codebook.abs().max() < 4
    for _ in range(30):
        vq(torch.randn(200, 4))
    assert vq.usage.item() == 1
    assert all(tensor.isfinite().all() for tensor in vq.state_dict().values())


def test_advice_about_a_single_code_is_in_the_singular() -> None:
    vq = KohonenVQ(1, 5, grid=(5,), neighborhood="hard")
    vq.codebook = torch.tensor([[0.0], [1.0], [NAN], [5.0], [6.0]])
    assert vq.health().advice == "code 2 is not finite: repair() puts it between its neighbors on the map"


def test_a_repaired_code_is_the_mean_of_its_neighbors_by_hand() -> None:
    vq = KohonenVQ(1, 5, grid=(5,), neighborhood="hard")
    vq.codebook = torch.tensor([[0.0], [1.0], [NAN], [5.0], [6.0]])
    vq.repair()
    near, further = math.exp(-1), math.exp(-4)
    assert vq.codebook[2].item() == pytest.approx((6 * near + 6 * further) / (2 * (near + further)))
    assert vq.codebook_of(0).sums[2] == vq.codebook[2]


def test_what_is_repaired_in_every_kind_of_codebook() -> None:
    for vq in (
        worn(heads=2, codebook_dim=4, separate_codebook_per_head=True),
        worn(learnable_codebook=True, ema_update=False),
        worn(neighborhood="none", threshold_ema_dead_code=0.1, update_empty=False),
    ):
        books = len(vq.books())
        assert ("code 3 of codebook 1 is not finite" in vq.health().advice) == (books == 2)
        assert vq.repair() == 3 * books
        assert vq.codebook.isfinite().all()
    vq = KohonenVQ(4, 16)
    vq.codebook = torch.full((16, 4), NAN)
    assert vq.health().advice.startswith("codes 0, 1, 2, 3, 4, 5, 6, 7 and 8 more are not finite")
    with pytest.raises(ValueError, match="none of the 16 codes can be used"):
        vq.repair()


def test_a_codebook_poisoned_earlier_is_reported() -> None:
    """One code is in use and all others are far away: what one vector of 1e12 once made of a map."""
    codes_KD = torch.full((64, 4), 1e9) * torch.rand(64, 1)
    codes_KD[7] = 0.1
    idle_K = torch.full((64,), 500, dtype=torch.int32)
    idle_K[7] = 0
    assert stray(codes_KD, used_lately(idle_K, 0.99)).tolist() == [number != 7 for number in range(64)]


def test_a_new_codebook_and_an_ordinary_one_have_no_stray_codes() -> None:
    torch.manual_seed(0)
    vq = KohonenVQ(4, 256, neighborhood="none")
    assert vq.health().stray_codes == 0
    for _ in range(5):
        vq(torch.randn(20, 4))  # of which few codes are chosen
    assert vq.health().stray_codes == 0


def test_compiled_steps_leave_out_the_same() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    vq = KohonenVQ(4, 16, threshold_ema_dead_code=2, neighborhood="none")
    plain = copy.deepcopy(vq)
    step = torch.compile(vq, backend="aot_eager", fullgraph=True)
    for number in (30, 30, 1):
        for value in (1.0, 1e12):
            x_ND: Tensor = torch.randn(number, 4)
            x_ND[0] *= value
            torch.manual_seed(number)
            step(x_ND)
            torch.manual_seed(number)
            plain(x_ND)
    assert vq.skipped.item() == 2 == plain.skipped.item()
    torch.testing.assert_close(vq.state_dict(), plain.state_dict())
