"""torch.optim.swa_utils.AveragedModel: the copy follows the codebook and never learns itself."""

import copy

import pytest
import torch
from autoencoder import Autoencoder, data, statistics
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

AVERAGES = {"ema": lambda: get_ema_multi_avg_fn(0.5), "swa": get_swa_multi_avg_fn}


def trained(average, use_buffers, **options):
    """(model, its averaged copy, the codes after each step)"""
    torch.manual_seed(0)
    model = Autoencoder(**options)
    averaged = AveragedModel(model, multi_avg_fn=AVERAGES[average](), use_buffers=use_buffers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    codes = []
    for x in data():
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
        averaged.update_parameters(model)
        codes.append(model.vq.codebook.clone())
    return model, averaged, codes


@pytest.mark.parametrize("average", AVERAGES)
def test_without_buffers_the_copy_has_the_model_s_codebook(average):
    model, averaged, _ = trained(average, False)
    assert model.vq.step == 4  # the copy's updates are not its own
    assert not torch.equal(averaged.module.encoder.weight, model.encoder.weight)
    for name, value in model.vq.codebooks[0].state_dict().items():
        assert torch.equal(averaged.module.vq.codebooks[0].state_dict()[name], value), name


def test_with_buffers_the_codes_are_averaged_too():
    """By EMA: torch's SWA subtracts buffers, and refuses a model that has any of bools."""
    model, averaged, codes = trained("ema", True)
    expected = sum(weight * each for weight, each in zip([1 / 8, 1 / 8, 1 / 4, 1 / 2], codes))
    torch.testing.assert_close(averaged.module.vq.codebook, expected)
    assert model.vq.step == 4
    assert torch.equal(model.vq.codebook, codes[-1])
    assert {value.dtype for value in statistics(averaged.module.vq).values()} == {torch.float32}
    assert not averaged.module.vq.codebooks[0].frozen.any()


def test_with_buffers_torchs_default_average_fails_on_bools():
    model = Autoencoder()
    averaged = AveragedModel(model, use_buffers=True)
    averaged.update_parameters(model)  # copies
    with pytest.raises(RuntimeError, match="bool"):
        averaged.update_parameters(model)


@pytest.mark.parametrize("use_buffers", [False, True])
def test_evaluating_the_copy_moves_nothing_and_a_loaded_one_gives_the_same_tokens(use_buffers):
    model, averaged, _ = trained("ema", use_buffers)
    before = copy.deepcopy(averaged.state_dict())
    averaged.eval()
    averaged(data(1, seed=1)[0])
    tokens = averaged.module.tokens(data(1, seed=1)[0])
    for name, value in averaged.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert model.vq.step == 4
    other = AveragedModel(Autoencoder(), multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=use_buffers)
    other.load_state_dict(before)
    assert torch.equal(other.module.tokens(data(1, seed=1)[0]), tokens)
