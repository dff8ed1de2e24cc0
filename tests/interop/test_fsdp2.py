"""FSDP2 (fully_shard) on two ranks: parameters are sharded, the codebook is whole and the same on both."""

import pytest
import torch
from autoencoder import Autoencoder, data
from ranks import run_two

WORKER = """
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if arguments[0] == "bf16" else MixedPrecisionPolicy()
model = Autoencoder(codebook_dim=4)
mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
for part in (model.encoder, model.vq, model):
    fully_shard(part, mesh=mesh, mp_policy=policy)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in mine:
    model(x).backward()
    optimizer.step()
    optimizer.zero_grad()
torch.save(dict(model.named_buffers()), f"{folder}/buffers{rank}.pt")
sharded = type(model.vq.project_in.weight).__name__
whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))  # all ranks take part
tokens = model.tokens(data(1, seed=1)[0])
if rank == 0:
    torch.save((sharded, whole, tokens), f"{folder}/whole.pt")
"""


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_two_ranks_learn_as_one_and_their_checkpoint_gives_the_same_tokens(tmp_path, precision):
    run_two(WORKER, tmp_path, precision)
    first, second = (torch.load(tmp_path / f"buffers{rank}.pt") for rank in (0, 1))
    sharded, state, tokens = torch.load(tmp_path / "whole.pt")
    assert sharded == "DTensor"
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
        assert value.dtype == (torch.float32 if value.is_floating_point() else value.dtype)
    assert first["vq.codebooks.0.step"] == 4

    torch.manual_seed(0)
    alone = Autoencoder(codebook_dim=4)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for x in data():
        alone(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    close = {"rtol": 0, "atol": 1e-5 if precision == "fp32" else 0.05}
    torch.testing.assert_close(first["vq.codebooks.0.codes"], alone.vq.codebook, **close)

    loaded = Autoencoder(codebook_dim=4)
    loaded.load_state_dict(state)
    if precision == "fp32":
        assert torch.equal(loaded.tokens(data(1, seed=1)[0]), tokens)
    else:
        assert (loaded.tokens(data(1, seed=1)[0]) == tokens).float().mean() > 0.8
