"""`explore`: the page of one run, or of two side by side, served until Ctrl-C."""

from __future__ import annotations

import ipaddress
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from topovq.missing import needs
from topovq.prior.generate import open_prior
from topovq.view.film import Film
from topovq.view.report import study

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
OTHER_RUN = "give the run of that prior, or a prior of the first run"
WARNING = (
    "Warning: --host {host} opens the page to other machines. Whoever has its address, token included, sees the runs "
    "and images and can use the models; what is sent is not encrypted. Without --host this machine alone reaches it."
)


def explore(
    runs: Sequence[str | Path],
    port: int = 8765,
    images: Path | None = None,
    host: str = "127.0.0.1",
    follow: bool = False,
    prior: Path | None = None,
) -> None:
    """Serve the page of `runs` (folders, one or two) at `host` and `port` (0: any free one).

    With `follow` it is the film of one run's training, which goes on while the run does. With a `prior` (folder) of the
    first run there is a page that draws new images and completes others.

    A host that other machines reach has a token in the address that is printed, without which nothing is answered.
    """
    with needs("view"):
        import uvicorn

        from topovq.view.explorer.app import create_app, create_follow_app
        from topovq.view.explorer.patience import PatientProtocol
    if not 1 <= len(runs) <= 2:
        raise ValueError(f"{len(runs)} runs were given; the page shows one, or two side by side")
    if follow and len(runs) > 1:
        raise ValueError(f"--follow shows the film of one run; {len(runs)} were given")
    if follow and prior is not None:
        raise ValueError("--follow shows a film, which has no use for a prior: leave out --prior or --follow")
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
        films = [Film(run) for run in runs]
        studies = [] if follow else [study(run, name) for run, name in zip(runs, names)]
        for found in studies:
            if not found.maps:
                kind = found.model.config["quantizer"]
                raise ValueError(
                    f"{found.name}: the codes of quantizer {kind!r} have no places; there is no map to show"
                )
        shown = f"[{host}]" if ":" in host else host
        token = None if is_loopback(host) else secrets.token_urlsafe(24)
        own = () if token is None else (socket.gethostname(), socket.getfqdn())  # what other machines may call this one
        hosts = {*LOOPBACK, shown, *own}
        if follow:
            app = create_follow_app(names[0], films[0], hosts, token)
        else:
            pair = open_prior(prior, runs[0], "cpu", remedy=OTHER_RUN) if prior is not None else None
            app = create_app(studies, images, hosts, token, films, pair)
        # Requests run beside each other, each on one core: waking more cores costs a small model more than it saves.
        torch.set_num_threads(1)
        door.listen()  # before the address is shown: it may be opened at once
        console = Console(highlight=False)
        if token is not None:
            console.print(WARNING.format(host=host), soft_wrap=True, markup=False)
        query = f"?token={token}" if token is not None else ""
        console.print(
            f"The page: http://{shown}:{door.getsockname()[1]}/{query}  (Ctrl-C ends it)", soft_wrap=True, markup=False
        )
        config = uvicorn.Config(app, http=PatientProtocol, ws="none", log_level="warning", timeout_graceful_shutdown=3)
        uvicorn.Server(config).run(sockets=[door])


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address to listen at."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
