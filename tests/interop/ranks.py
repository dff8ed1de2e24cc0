"""Two processes with gloo, for the tests of what wraps a model in them.

The second is forked from the first, which has imported everything by then. What torchrun does beside that is tried in
tests/tokenizer/training.
"""

from pathlib import Path

from warm import python

HERE = Path(__file__).parent

BEGIN = """
import datetime, os, sys
import torch
import torch.distributed as dist
sys.path.insert(0, HERE)
from autoencoder import Autoencoder, data
folder, *arguments = sys.argv[1:]
torch.manual_seed(0)
rank = int(os.fork() == 0)
meet, wait = f"file://{folder}/meet", datetime.timedelta(seconds=120)
dist.init_process_group("gloo", meet, wait, rank=rank, world_size=2)
mine = data()[:, rank::2]  # every other row of each batch
"""

END = """
dist.barrier()
dist.destroy_process_group()
failed = rank == 0 and os.wait()[1] != 0
os._exit(failed)  # gloo's threads may outlive the group and abort the interpreter's own way out
"""


def run_two(worker: str, folder: Path, *arguments: str) -> None:
    """Run the worker's code on two ranks: it finds `rank`, `mine`, `folder` and `arguments`."""
    path = folder / "worker.py"
    path.write_text(BEGIN.replace("HERE", repr(str(HERE))) + worker + END)
    done = python(path, folder, *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
