"""A Ray cluster of three nodes on this machine, one of which can be lost as a machine is: with all its processes."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# A node that is gone refuses every question at once, and is known to be so after three; one that is busy has its time.
ALIVE = {
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_failure_threshold": "3",
}
NODE = {"num_cpus": 1, "object_store_memory": 80 << 20}


@contextlib.contextmanager
def three_nodes() -> Iterator[Nodes]:
    folder = tempfile.mkdtemp(prefix="ray-")  # pytest's own paths are too long for sockets
    before = dict(os.environ)
    os.environ |= {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0", "RAY_BACKEND_LOG_LEVEL": "fatal", **ALIVE}
    from ray.cluster_utils import Cluster

    cluster = None
    try:
        cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
        yield Nodes(cluster, [cluster.add_node(**NODE) for _ in range(2)])
    finally:
        if cluster is not None:
            cluster.shutdown()
        os.environ.clear()
        os.environ.update(before)
        shutil.rmtree(folder, ignore_errors=True)


class Nodes:
    """The nodes beside the head, where the driver is."""

    def __init__(self, cluster: Any, others: list[Any]) -> None:
        self.cluster, self.others, self.address = cluster, others, str(cluster.address)

    def complete(self) -> None:
        """Have two nodes beside the head again."""
        while len(self.others) < 2:
            self.others.append(self.cluster.add_node(**NODE))

    def lose(self, is_at_work: Callable[[int], bool]) -> bool:
        """Wait for a process of a node beside the head that is at work, and kill the node."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            for node in self.others:
                raylet = node.all_processes["raylet"][0].process.pid
                if any(map(is_at_work, children(raylet))):
                    for process in (raylet, *children(raylet)):
                        os.kill(process, signal.SIGKILL)
                    self.others.remove(node)
                    self.cluster.remove_node(node, allow_graceful=False)
                    return True
            time.sleep(0.005)
        return False


def children(process: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except FileNotFoundError:
        return []
