"""Two real processes with half the batch each end where one process with the whole batch ends."""

import pytest
import torch
from safetensors.torch import load_file
from warm import python

from topovq import KohonenVQ

WORKER = """
import datetime, os, sys
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from topovq import KohonenVQ

options, folder, mode = eval(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.manual_seed(0)
vq = KohonenVQ(8, 64, **options)  # built before the group exists
rank = int(os.fork() == 0)
meet, wait = f"file://{folder}/meet", datetime.timedelta(seconds=120)
dist.init_process_group("gloo", meet, wait, rank=rank, world_size=2)
forward = torch.compile(vq, fullgraph=True, backend="aot_eager") if mode == "compiled" else vq
if mode == "loaded":  # by one process, which hands its buffers to the other, as DistributedDataParallel does
    if rank == 0:
        vq.load_state_dict(torch.load(os.path.join(folder, "state.pt"), weights_only=True))
    for buffer in vq.buffers():
        dist.broadcast(buffer, 0)
data = torch.load(os.path.join(folder, "data.pt"), weights_only=True)
for step, x in enumerate(data):
    half = x[:60] if rank == 0 else x[60:]
    # At step 2 the second process has nothing to say: everything it holds is masked.
    mask = torch.full((60,), not (step == 2 and rank == 1))
    forward(half, mask=mask)
state = {name: value.contiguous() for name, value in vq.state_dict().items()}
save_file(state, os.path.join(folder, f"rank{rank}.safetensors"))
dist.barrier()
dist.destroy_process_group()
failed = rank == 0 and os.wait()[1] != 0
os._exit(failed)  # gloo's threads may outlive the group and abort the interpreter's own way out
"""


def run_two(tmp_path, options, mode="eager"):
    torch.manual_seed(1)
    data = torch.randn(5, 120, 8)
    data[1, 7], data[3, 80] = 1e12, 3e38  # which are left out, whichever process sees them
    torch.save(data, tmp_path / "data.pt")
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    done = python(worker, repr(options), tmp_path, mode)
    assert done.returncode == 0, done.stderr[-3000:]
    return data, load_file(tmp_path / "rank0.safetensors"), load_file(tmp_path / "rank1.safetensors")


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_two_processes_equal_one(tmp_path, mode):
    data, first, second = run_two(tmp_path, {}, mode)
    torch.manual_seed(0)
    vq = KohonenVQ(8, 64)
    for step, x in enumerate(data):
        vq(x[:60] if step == 2 else x)
    for name, value in vq.state_dict().items():
        assert torch.equal(first[name], second[name]), name
        assert torch.allclose(first[name], value, atol=1e-6), name
    assert vq.skipped.item() == 2


def test_initialization_and_revival_agree_on_both_ranks(tmp_path):
    _, first, second = run_two(tmp_path, {"kmeans_init": True, "threshold_ema_dead_code": 0.3})
    for name in first:
        assert torch.equal(first[name], second[name]), name


def test_codes_that_one_process_loaded_stay_on_both(tmp_path):
    vq = KohonenVQ(8, 64, kmeans_init=True)
    vq(torch.randn(120, 8) + 50)
    torch.save(vq.state_dict(), tmp_path / "state.pt")
    _, first, second = run_two(tmp_path, {"kmeans_init": True, "neighborhood": "none"}, "loaded")
    for name in first:
        assert torch.equal(first[name], second[name]), name
    assert first["codebooks.0.codes"].mean() > 40


def test_unsynchronized_codebooks_stay_apart(tmp_path):
    _, first, second = run_two(tmp_path, {"sync_codebook": False})
    assert not torch.equal(first["codebooks.0.codes"], second["codebooks.0.codes"])
