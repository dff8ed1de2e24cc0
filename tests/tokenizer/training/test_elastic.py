"""Training on two machines, which are two agents of torchrun here: one worker is killed, and the run goes on."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from topovq.tokenizer.training.record import read_record

HERE = Path(__file__).parent
STEPS = 60


WHOLE = """
import os, sys
sys.path.insert(0, {here!r})
from tiny import TinySource, tiny_config
from pathlib import Path
from topovq.tokenizer.training import train
where = {{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "{port}", "WORLD_SIZE": "2"}}
rank = 1 if os.fork() == 0 else 0
os.environ |= where | {{"RANK": str(rank), "LOCAL_RANK": str(rank)}}
train(tiny_config(Path("whole"), steps={steps}, log_every=1), source=TinySource(), quiet=True)
if rank == 0:
    os.wait()
"""


def start_agent(folder: Path, port: int) -> subprocess.Popen[str]:
    """One machine's `torchrun`, as the documentation has it, in the run `killed`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    command += ["--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    command += ["--local-addr", "127.0.0.1", str(HERE / "tiny.py"), "killed", "resume=true", f"steps={STEPS}"]
    command += ["log_every=1"]
    # Else workers that start again may find the addresses of those before, and fail until there are no restarts left.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as door:
        return door.getsockname()[1]


def kill_a_worker(agent: int, checkpoints: Path) -> None:
    """Kill -9 the agent's worker as soon as there is a checkpoint."""
    children = Path(f"/proc/{agent}/task/{agent}/children")
    deadline = time.monotonic() + 90
    while not any(checkpoints.glob("step-*")):
        assert time.monotonic() < deadline, "there was no checkpoint"
        time.sleep(0.01)
    (worker,) = map(int, children.read_text().split())
    os.kill(worker, signal.SIGKILL)


def losses(run: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in read_record(run / "record.jsonl") if line["event"] == "validation"]


@pytest.mark.timeout(300)
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="workers are found in Linux's /proc")
def test_a_killed_worker_is_started_again_and_the_losses_are_the_same(tmp_path: Path) -> None:
    port = free_port()
    agents = [start_agent(tmp_path, port) for _ in range(2)]
    try:
        kill_a_worker(agents[1].pid, tmp_path / "killed" / "checkpoints")
        said = [agent.communicate(timeout=150)[1] for agent in agents]
        assert [agent.returncode for agent in agents] == [0, 0], said
        code = WHOLE.format(here=str(HERE), port=free_port(), steps=STEPS)
        subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=150)
    finally:
        for agent in agents:
            agent.terminate()
            agent.wait(30)
    assert [line["event"] for line in read_record(tmp_path / "killed" / "record.jsonl")].count("resumed") == 1
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    assert [step for step, _ in losses(tmp_path / "whole")] == list(range(4, STEPS + 1, 4))
