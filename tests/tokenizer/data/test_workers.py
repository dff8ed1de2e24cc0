"""What a decoding process says, in a real one."""

from warm import python

_WORKER = """
import os, socket, sys, time
from multiprocessing import resource_sharer
from topovq.tokenizer.data.workers import begin

begin(0)
kind = sys.argv[1]
if kind == "hung up":
    address, _ = resource_sharer.DupFd(os.dup(1))._id  # as torch sends a batch
    client = socket.socket(socket.AF_UNIX)
    client.connect(address)
    client.close()  # a parent that is stopped before it has taken the batch
    time.sleep(0.5)
else:
    raise ValueError("a worker's own mistake")
"""


def _said(kind: str) -> str:
    return python("-c", _WORKER, kind).stderr


def test_a_parent_that_hangs_up_is_no_error_of_the_worker():
    assert _said("hung up") == ""


def test_a_mistake_is_still_shown():
    assert _said("mistaken").endswith("ValueError: a worker's own mistake\n")
