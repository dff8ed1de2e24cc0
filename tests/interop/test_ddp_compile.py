"""DistributedDataParallel and torch.compile together, in both orders: two ranks learn what one process learns."""

import pytest
import torch
from autoencoder import Autoencoder, data
from ranks import run_two

WORKER = """
from torch.nn.parallel import DistributedDataParallel

model = Autoencoder()
if arguments[0] == "compiled inside":
    wrapped = DistributedDataParallel(torch.compile(model, backend="aot_eager", fullgraph=True))
else:
    wrapped = torch.compile(DistributedDataParallel(model), backend="aot_eager")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in mine:
    wrapped(x).backward()
    optimizer.step()
    optimizer.zero_grad()
torch.save(model.state_dict(), f"{folder}/rank{rank}.pt")
"""


@pytest.mark.parametrize("order", ["compiled inside", "compiled outside"])
def test_two_ranks_learn_as_one(tmp_path, order):
    run_two(WORKER, tmp_path, order)
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1))
    torch.manual_seed(0)
    alone = Autoencoder()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for x in data():
        alone(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in alone.state_dict().items():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], value, rtol=0, atol=1e-5)
    assert first["vq.codebooks.0.step"] == 4
