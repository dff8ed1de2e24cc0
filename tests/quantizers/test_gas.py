"""Neural gas inside a quantizer: by hand, against float64, and in the layer."""

from __future__ import annotations

from math import exp

import pytest
import torch
from torch import Tensor

from topovq import GradientVQ, KohonenVQ, SoftKohonenVQ
from topovq.grid import Grid
from topovq.neighborhood import Neighborhood, Schedule
from topovq.ops import ranks as module
from topovq.ops.ranks import by_rank


def test_one_update_by_hand() -> None:
    """Codes 0, 2, 5. Of x = 0.5 they have the ranks 0, 1, 2; of x = 4 the ranks 2, 1, 0."""
    vq = KohonenVQ(1, 3, neighborhood="gas", radius=2.0, tau=1.0, decay=0.5, update_empty=False)
    vq.codebook = torch.tensor([[0.0], [2.0], [5.0]])
    x = torch.tensor([[0.5], [4.0]])
    assert vq(x).indices.tolist() == [0, 2]
    one, two = exp(-1 / 2), exp(-2 / 2)  # the weights of the ranks 1 and 2: lambda is 2 at first
    sums, counts = [0.5 + 4 * two, 4.5 * one, 0.5 * two + 4], [1 + two, 2 * one, two + 1]
    codes = [(m + s) / (1 + c) for m, s, c in zip((0, 2, 5), sums, counts)]
    assert vq.codebook.flatten().tolist() == pytest.approx(codes, rel=1e-6)
    vq.codebook = torch.tensor([[0.0], [2.0], [5.0]])
    vq(x)  # the second step: lambda is 2 / (1 + 1) = 1
    one, two = exp(-1), exp(-2)
    sums, counts = [0.5 + 4 * two, 4.5 * one, 0.5 * two + 4], [1 + two, 2 * one, two + 1]
    codes = [(m + s) / (1 + c) for m, s, c in zip((0, 2, 5), sums, counts)]
    assert vq.codebook.flatten().tolist() == pytest.approx(codes, rel=1e-6)


def reference(x: Tensor, codes: Tensor, valid: Tensor, width: float, metric: str) -> tuple[Tensor, Tensor]:
    """The definition in float64: all distances, all ranks, all weights."""
    x, codes = x.double()[valid], codes.double()
    if metric == "euclidean":
        apart = torch.cdist(x, codes, compute_mode="donot_use_mm_for_euclid_dist")
    else:
        apart = -x @ (torch.nn.functional.normalize(codes, dim=1) if metric == "cosine" else codes).T
    weight = torch.exp(-apart.argsort(1).argsort(1).double() / width)
    return weight.T @ x, weight.sum(0)


@pytest.mark.parametrize("metric", ["euclidean", "dot", "cosine"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_the_definition_block_by_block(metric: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SCORES", 37 * 16)  # 16 vectors a block
    torch.manual_seed(0)
    x, codes = torch.randn(203, 5, dtype=dtype) + 3, torch.randn(37, 5, dtype=dtype) + 3
    valid = torch.rand(203) > 0.2
    ranks = Neighborhood("exponential", Grid(37), schedule=Schedule.harmonic(0.1))  # lambda = 10 / (1 + 0.1 t)
    for step in (0, 10, 10_000):
        sums, counts = by_rank(x, codes, valid, ranks, torch.tensor(step), metric)
        expected, numbers = reference(x, codes, valid, 10 / (1 + 0.1 * step), metric)
        assert sums.dtype == counts.dtype == dtype
        assert torch.allclose(sums.double(), expected, rtol=1e-5, atol=1e-4)
        assert torch.allclose(counts.double(), numbers, rtol=1e-5, atol=1e-4)


def test_late_it_is_ema_vq_and_what_gets_nothing_keeps_its_place() -> None:
    torch.manual_seed(0)
    codes, x = torch.randn(64, 4), torch.randn(500, 4) / 2
    made = []
    for neighborhood in ("gas", "none"):
        vq = KohonenVQ(4, 64, neighborhood=neighborhood, update_empty=False)
        vq.codebook = codes
        vq.codebook_of(0).step.fill_(10**9)
        vq(x)
        made.append(vq)
    assert torch.allclose(made[0].codebook, made[1].codebook, atol=1e-6)
    assert (made[0].codebook == codes).all(1).any()


def test_nearly_all_codes_come_into_the_data_where_ema_vq_leaves_them_behind() -> None:
    used = {}
    for neighborhood in ("gas", "none"):
        torch.manual_seed(0)
        vq = KohonenVQ(8, 128, neighborhood=neighborhood)  # of gas, lambda is 64 at first
        for _ in range(200):
            vq(torch.randn(256, 8) + 5)
        used[neighborhood] = vq.eval()(torch.randn(20_000, 8) + 5).indices.unique().numel()
    assert used["gas"] > 100 > 10 > used["none"]


def test_it_is_saved_by_name_and_refused_where_it_means_nothing(tmp_path) -> None:
    vq = KohonenVQ(4, 8, neighborhood="gas", tau=0.5)
    vq(torch.randn(32, 4))
    vq.save_pretrained(tmp_path)
    again = KohonenVQ.from_pretrained(tmp_path)
    x = torch.randn(32, 4)
    vq(x)
    again.train()(x)
    assert torch.equal(vq.codebook, again.codebook)
    assert "gas" in repr(vq)
    with pytest.raises(ValueError, match="'gas' moves running means"):
        GradientVQ(4, 8, neighborhood="gas")
    with pytest.raises(ValueError, match="neighborhood='gas' is for codes that are chosen"):
        SoftKohonenVQ(4, 8, neighborhood="gas")
    with pytest.raises(ValueError, match="'gas' and orthogonal_reg_weight exclude each other"):
        KohonenVQ(4, 8, neighborhood="gas", orthogonal_reg_weight=1.0)
    with pytest.raises(TypeError, match="codes learn by rank"):
        vq.update_indices(x, torch.zeros(32, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"choose one of .*'none', 'hard', 'gaussian', 'exponential', 'gas'"):
        KohonenVQ(4, 8, neighborhood="gass")


def test_the_step_compiles_whole() -> None:
    torch.manual_seed(0)
    eager, x = KohonenVQ(4, 16, neighborhood="gas"), torch.randn(64, 4)
    compiled = KohonenVQ(4, 16, neighborhood="gas")
    compiled.load_state_dict(eager.state_dict())
    step = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        eager(x)
        step(x)
    assert torch.allclose(eager.codebook, compiled.codebook, atol=1e-6)
