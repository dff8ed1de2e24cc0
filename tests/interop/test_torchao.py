"""torchao: quantized weights of the layers around, a codebook as it was."""

import copy

import pytest
import torch
from autoencoder import Autoencoder, data, statistics

pytest.importorskip("torchao", reason="pip install torchao")
from torchao.quantization import Int8WeightOnlyConfig, quantize_


def trained():
    torch.manual_seed(0)
    model = Autoencoder(codebook_dim=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in data():
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_weights_leave_the_codebook_alone(dtype):
    model = trained().to(dtype)
    before = copy.deepcopy(statistics(model.vq))
    x = data(1, seed=1)[0].to(dtype)
    tokens = model.tokens(x)
    quantize_(model, Int8WeightOnlyConfig())
    assert type(model.vq.project_in.weight) is not torch.nn.Parameter  # it has been quantized
    for name, value in statistics(model.vq).items():
        assert value.dtype == torch.float32
        assert torch.equal(value, before[name]), name
    assert (model.tokens(x) == tokens).float().mean() > 0.8  # a vector between two codes may go to the other
    with torch.no_grad():
        quantized, indices, _ = model.vq(model.encoder(x))
        assert torch.equal(model.vq.get_output_from_indices(indices), quantized)
        assert quantized.dtype == dtype


def test_the_codebook_learns_on_around_quantized_weights():
    model = trained()
    quantize_(model, Int8WeightOnlyConfig())
    before = model.vq.codebook.clone()
    model.train()
    with torch.no_grad():
        model(data(1, seed=1)[0])
    assert model.vq.step == 5
    assert not torch.equal(model.vq.codebook, before)
