"""`vq.health()`: usage, perplexity, dead codes, drift and what they rest on, computed by hand."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from topovq import GradientVQ, KohonenVQ, ResidualVQ, Schedule, SoftKohonenVQ
from topovq.metrics import FIGURES, Health, drift, health_figures, perplexity, used_lately


def four_codes(**options: object) -> KohonenVQ:
    """Codes at 0, 1, 2 and 3 on a line that do not move by themselves."""
    vq = KohonenVQ(1, 4, neighborhood="none", ema_update=False, **options)
    vq.codebook = torch.arange(4.0)[:, None]
    return vq


def test_figures_after_one_batch_by_hand() -> None:
    vq = four_codes()
    vq(torch.tensor([[0.0], [0.1], [2.0], [1.9]]))  # code 0 twice, code 2 twice
    health = vq.health()
    assert health.usage == 0.5
    assert health.perplexity == pytest.approx(2.0)  # two codes, equally often
    assert health.dead_codes == 2
    assert health.tokens == 4
    assert math.isnan(health.drift)  # nothing to compare with yet
    assert isinstance(health.dead_codes, int)


def test_perplexity_of_unequal_use_by_hand() -> None:
    hits_K = torch.tensor([3.0, 1.0, 0.0, 0.0])
    assert perplexity(hits_K).item() == pytest.approx(math.exp(0.75 * math.log(4 / 3) + 0.25 * math.log(4)))


def test_a_code_is_dead_when_it_was_not_chosen_for_about_the_window() -> None:
    vq = four_codes(decay=0.9)  # a window of ten updates
    vq(torch.tensor([[3.0]]))
    for _ in range(9):
        vq(torch.tensor([[0.0]]))
    assert vq.health().dead_codes == 2  # codes 1 and 2 were never chosen; code 3 ten updates ago
    for _ in range(2):
        vq(torch.tensor([[0.0]]))
    assert vq.health().dead_codes == 3


@pytest.mark.parametrize("before", [1, 1000])  # how often it was chosen
@pytest.mark.parametrize("frozen", [True, False])  # codes that do not move are followed by another path
@pytest.mark.parametrize(("decay", "window"), [(0.0, 1), (0.5, 2), (0.9, 10), (0.99, 100), (1.0, 100)])
def test_a_code_is_dead_after_the_window_whatever_its_past(
    decay: float, window: int, frozen: bool, before: int
) -> None:
    vq = KohonenVQ(1, 2, neighborhood="none", decay=decay, ema_update=not frozen)
    vq.codebook = torch.tensor([[0.0], [1.0]])
    vq(torch.tensor([[0.0], [1.0]]).repeat(before, 1))
    for _ in range(window - 1):
        vq(torch.zeros(1, 1))
    assert (vq.usage.item(), vq.health().dead_codes) == (1, 0)
    vq(torch.zeros(0, 1))  # no update
    assert vq.health().dead_codes == 0
    vq(torch.zeros(1, 1))
    assert (vq.usage.item(), vq.health().dead_codes) == (0.5, 1)
    vq(torch.ones(1, 1))
    assert vq.usage.item() == (0.5 if window == 1 else 1)


def test_the_last_use_is_the_same_by_parts_and_after_loading() -> None:
    vq, again = four_codes(decay=0.9), four_codes(decay=0.9)
    with vq.accumulate():
        vq(torch.tensor([[3.0]]))
        vq(torch.tensor([[1.0]]))
    vq(torch.tensor([[0.0]]))
    vq(torch.tensor([[0.0]]))
    assert vq.codebook_of(0).idle.tolist() == [0, 1, 2**30 + 2, 1]
    again.load_state_dict(vq.state_dict())
    assert again.health().dead_codes == vq.health().dead_codes == 1


def test_a_soft_choice_counts_from_half_a_vector_on() -> None:
    vq = SoftKohonenVQ(1, 3, neighborhood="none", temperature=Schedule.linear(1, 1, 1))
    vq.codebook = torch.tensor([[0.0], [0.5], [9.0]])
    vq(torch.tensor([[0.0]]))  # weights of 1, exp(-0.25) and nearly nothing: 0.56, 0.44 and 0
    assert vq.usage.item() == pytest.approx(1 / 3)


def test_before_any_update_every_code_is_dead_on_no_tokens() -> None:
    health = four_codes().health()
    assert (health.usage, health.perplexity, health.dead_codes, health.tokens) == (0, 1, 4, 0)


def test_drift_is_the_rms_move_over_the_rms_spread() -> None:
    vq = four_codes()
    vq.health()
    vq.codebook = torch.tensor([[0.0], [1.0], [2.0], [5.0]])  # one code moved by 2
    # moved: sqrt(4 / 4) = 1; the mean is 2, spread sqrt((4 + 1 + 0 + 9) / 4)
    assert vq.health().drift == pytest.approx(1 / math.sqrt(14 / 4))
    assert vq.health().drift == 0  # since it was last asked, nothing moved


def test_drift_is_the_same_for_a_codebook_scaled_and_moved_as_a_whole() -> None:
    before_KD, after_KD = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)).chunk(2)
    once = drift(after_KD, before_KD)
    assert drift(5 * after_KD + 7, 5 * before_KD + 7).item() == pytest.approx(once.item(), rel=1e-5)


def test_codes_without_spread_have_no_drift_to_speak_of() -> None:
    assert math.isnan(drift(torch.ones(4, 2), torch.zeros(4, 2)))


def test_decay_of_zero_counts_the_last_batch_alone() -> None:
    idle_K = torch.tensor([1, 0])
    assert used_lately(idle_K, 0.0).tolist() == [False, True]
    assert health_figures(torch.tensor([0.0, 3.0]), idle_K, 0.0, torch.zeros(2, 1), None)[4] == 3


def every_kind() -> dict[str, torch.nn.Module]:
    return {
        "kohonen": KohonenVQ(4, 16),
        "ema": KohonenVQ(4, 16, neighborhood="none"),
        "gradient": GradientVQ(4, 16),
        "som-vae": GradientVQ(4, 16, neighborhood="hard"),
        "soft": SoftKohonenVQ(4, 16),
        "residual": ResidualVQ(4, 16, 3),
        "heads": KohonenVQ(4, 16, heads=2, codebook_dim=2, separate_codebook_per_head=True),
        "cosine": KohonenVQ(4, 16, use_cosine_sim=True),
    }


@pytest.mark.parametrize("kind", every_kind())
def test_every_quantizer_has_it(kind: str) -> None:
    torch.manual_seed(0)
    vq = every_kind()[kind]
    books = {"residual": 3, "heads": 2}.get(kind, 1)
    optimizer = torch.optim.SGD(vq.parameters(), 0.5) if list(vq.parameters()) else None
    first = vq.health()
    assert isinstance(first, Health)
    assert first.dead_codes == 16 * books
    for _ in range(3):
        _, _, loss = vq(torch.randn(64, 4, requires_grad=True))
        loss.sum().backward()
        if optimizer is not None:
            optimizer.step()
    health = vq.health()
    assert health.usage == pytest.approx(1 - health.dead_codes / (16 * books))
    assert health.usage == pytest.approx(vq.usage.item())
    assert health.perplexity == pytest.approx(vq.perplexity.item())
    assert 0 < health.usage <= 1
    assert health.tokens == round(64 * (1 + 0.99 + 0.99**2))
    assert health.drift > 0
    assert vq.health().drift == 0


def test_separate_codebooks_add_up_their_dead_codes() -> None:
    vq = KohonenVQ(2, 4, heads=2, codebook_dim=1, separate_codebook_per_head=True, neighborhood="none", decay=0.5)
    vq.codebook = torch.arange(4.0)[:, None].expand(2, 4, 1)
    vq(torch.tensor([[0.0, 0.0], [0.0, 3.0]]))  # the first head uses one code, the second two
    health = vq.health()
    assert health.dead_codes == 3 + 2
    assert health.usage == pytest.approx((1 / 4 + 2 / 4) / 2)
    assert health.perplexity == pytest.approx((1 + 2) / 2)


def test_asking_changes_nothing_that_is_saved_or_learned() -> None:
    torch.manual_seed(0)
    asked, left = KohonenVQ(4, 16), KohonenVQ(4, 16)
    left.load_state_dict(asked.state_dict())
    for _ in range(3):
        x_ND = torch.randn(32, 4)
        asked(x_ND)
        left(x_ND)
        asked.health()
    assert asked.state_dict().keys() == left.state_dict().keys()
    assert not any(name.endswith("codes_read") for name, _ in asked.named_buffers())
    for name, tensor in left.state_dict().items():
        assert torch.equal(tensor, asked.state_dict()[name]), name
    assert copy.deepcopy(asked).health().drift == asked.health().drift == 0
    torch.save(asked, io.BytesIO())


def test_it_may_be_asked_for_the_first_time_where_gradients_are_off() -> None:
    vq = KohonenVQ(4, 16)
    with torch.inference_mode():
        vq.health()
    vq(torch.randn(32, 4))
    assert vq.health().drift > 0


def test_a_half_precision_model_keeps_its_figures() -> None:
    vq = KohonenVQ(4, 16).half()
    vq(torch.randn(32, 4).half())
    assert vq.health().tokens == 32


def test_asking_between_compiled_steps_compiles_nothing_anew() -> None:
    torch._dynamo.reset()
    vq = KohonenVQ(4, 16)
    vq(torch.randn(32, 4))  # which starts the codes
    traced = []

    def count(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        traced.append(graph)
        return graph

    step = torch.compile(vq, backend=count, fullgraph=True)
    for _ in range(3):
        step(torch.randn(32, 4))
        vq.health()
    assert len(traced) == 1
    assert vq.health().tokens == round(32 * (1 + 0.99 + 0.99**2 + 0.99**3))


@pytest.mark.parametrize("kind", every_kind())
def test_reading_waits_for_no_device(kind: str) -> None:
    """A fake tensor has no values: asking for one would raise."""
    with FakeTensorMode():
        vq = every_kind()[kind]
        vq(torch.randn(32, 4))
        vq.read_health()
        assert vq.read_health().shape == (FIGURES,)
