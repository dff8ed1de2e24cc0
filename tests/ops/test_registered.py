"""Operations that are registered without torch.library.custom_op: what that would look for at each call."""

import pytest
import torch

from topovq.ops import quantize


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("stats", [False, True])
def test_quantize_is_as_registered(masked, stats):
    generator = torch.Generator().manual_seed(0)
    x, codes = torch.randn(12, 3, generator=generator), torch.randn(5, 3, generator=generator)
    keep = torch.arange(12) % 3 > 0 if masked else None
    arguments = (x.requires_grad_(), codes, keep, "euclidean", "exact", stats, True)
    torch.library.opcheck(torch.ops.topovq.quantize.default, arguments)
    assert quantize.quantize(x, codes, keep, stats=stats, learns=True).q_ND.shape == (12, 3)


def test_its_backward_pass_is_as_registered():
    x, grad = torch.randn(6, 2), torch.randn(6, 2)
    arguments = (grad, torch.ones(()), x, x.clone(), None, torch.ones(6, dtype=torch.int8), torch.tensor(0.1))
    torch.library.opcheck(torch.ops.topovq.quantize_backward.default, arguments)


def test_an_update_in_place_is_seen_by_autograd():
    """A tensor that a graph needs as it was must not change unnoticed."""
    from topovq.grid import Grid
    from topovq.neighborhood import Neighborhood
    from topovq.ops.update import Batch, Rule, State, _update

    codes = torch.randn(4, 2)
    state = State(codes, codes.clone(), torch.ones(4), torch.ones(4), torch.zeros(4, dtype=torch.int32),
                  *torch.zeros(2, dtype=torch.int64), torch.zeros(4, dtype=torch.bool))  # fmt: skip
    weight = torch.ones(4, 2, requires_grad=True)
    loss = (weight * codes).sum()
    numbers = Neighborhood("none", Grid(4)).numbers
    _update(
        *state, *Batch(torch.ones(4, 2), torch.ones(4), torch.tensor(1)), *numbers, *Rule(0.9, 1e-5, True, True, False)
    )
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
