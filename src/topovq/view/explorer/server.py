"""`explore`: the page of one run, or of two side by side, served until Ctrl-C."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from topovq.missing import needs
from topovq.view.report import study

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


def explore(runs: Sequence[str | Path], port: int = 8765, images: Path | None = None, host: str = "127.0.0.1") -> None:
    """Serve the page of `runs` (folders, one or two) at `host` and `port` (0: any free one)."""
    with needs("view"):
        import uvicorn

        from topovq.view.explorer.app import create_app
    if not 1 <= len(runs) <= 2:
        raise ValueError(f"{len(runs)} runs were given; the page shows one, or two side by side")
    names = [Path(run).resolve().name for run in runs]
    if len(set(names)) < len(names):
        names = [f"{name} ({'AB'[number]})" for number, name in enumerate(names)]
    # Named as TCP, else asyncio leaves Nagle's algorithm on, and every answer waits 40 ms for an acknowledgment.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as door:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            door.bind((host, port))
        except (OSError, OverflowError) as error:
            raise ValueError(f"cannot listen at {host}:{port} ({error}); choose another --port, such as 0") from None
        studies = [study(run, name) for run, name in zip(runs, names)]
        for found in studies:
            if not found.maps:
                kind = found.model.config["quantizer"]
                raise ValueError(
                    f"{found.name}: the codes of quantizer {kind!r} have no places; there is no map to show"
                )
        app = create_app(studies, images, LOOPBACK if host in LOOPBACK else None)
        # Requests run beside each other, each on one core: waking more cores costs a small model more than it saves.
        torch.set_num_threads(1)
        shown = f"[{host}]" if ":" in host else host
        Console(highlight=False).print(
            f"The page: http://{shown}:{door.getsockname()[1]}/  (Ctrl-C ends it)", soft_wrap=True, markup=False
        )
        uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=3)).run(sockets=[door])
