"""Where the work of a command is done: in this process, or on a Ray cluster."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(kw_only=True)
class OnEngine:
    """What commands that can run on Ray have in common."""

    engine: Literal["local", "ray"] = "local"
    """local (this process; encode also runs under torchrun) or ray (a cluster; needs the extra `ray`)."""
    address: str | None = None
    """HOST:PORT of the Ray cluster; without it, that of RAY_ADDRESS, or Ray is started on this machine."""

    def refuse_unless_ray(self, **options: Any) -> None:
        """Refuse options that are for Ray alone, where something else is to do the work."""
        given = [f"--{name}" for name, value in options.items() if value is not None]
        if given and self.engine != "ray":
            raise ValueError(f"{given[0]} is for --engine ray, but the engine is {self.engine}")

    def refuse_on_ray(self, **options: Any) -> None:
        """Refuse options that Ray does not take."""
        given = [f"--{name}" for name, value in options.items() if value is not None]
        if given and self.engine == "ray":
            raise ValueError(f"{given[0]} does not go with --engine ray: leave the engine out, or use torchrun")

    def refuse_torchrun(self, command: str) -> None:
        """Refuse to do all the work in each of several processes."""
        processes = int(os.environ.get("WORLD_SIZE", "1"))
        if processes > 1:
            raise ValueError(f"topovq {command} is one process, not {processes}: for more than one, use --engine ray")

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """Within, this process is connected to the cluster, if there is to be one."""
        self.refuse_unless_ray(address=self.address)
        if self.engine != "ray":
            yield
            return
        from topovq.cluster import join_ray

        with join_ray(self.address):
            yield
