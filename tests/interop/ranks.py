"""Two processes of torchrun with gloo, for the tests of what wraps a model in them."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent

BEGIN = """
import os, sys
import torch
import torch.distributed as dist
sys.path.insert(0, HERE)
from autoencoder import Autoencoder, data
folder, *arguments = sys.argv[1:]
torch.manual_seed(0)
dist.init_process_group("gloo")
rank = dist.get_rank()
mine = data()[:, rank::2]  # every other row of each batch
"""

END = """
dist.barrier()
dist.destroy_process_group()
os._exit(0)  # gloo's threads may outlive the group and abort the interpreter's own way out
"""


def run_two(worker: str, folder: Path, *arguments: str) -> None:
    """Run the worker's code on two ranks: it finds `rank`, `mine`, `folder` and `arguments`."""
    path = folder / "worker.py"
    path.write_text(BEGIN.replace("HERE", repr(str(HERE))) + worker + END)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(folder), *arguments], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
