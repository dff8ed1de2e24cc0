"""Ray, where it is asked for: joined at an address or started here, with an error in one sentence where it cannot be.

Nothing imports this module, or Ray, before somebody asks for `engine="ray"`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

from topovq.missing import needs

PATIENCE = 5.0  # seconds in which the head of a cluster must answer
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"  # how a client of gRPC begins, with empty settings
SETTINGS = 4  # the kind of frame with which a server answers


@contextlib.contextmanager
def join_ray(address: str | None = None) -> Iterator[Any]:
    """`with join_ray(address) as ray:` the module, connected; it lets go of Ray at the end, unless it was there before.

    Without an address it is the cluster that this process is connected to, that of the variable RAY_ADDRESS, or else
    one that is started on this machine.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray counts its users at its makers' if nobody says no
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # it warns of how Ray Data itself starts its actors
    with needs("ray"):
        import ray
        import ray.data
    ours = not ray.is_initialized()
    here = None if ours else ray.get_runtime_context().gcs_address
    address = address or here or os.environ.get("RAY_ADDRESS") or "local"
    if address not in ("local", "auto", here):
        check_reachable(address)
        if here is not None:
            raise ValueError(f"this process is connected to Ray at {here} already, and not at address={address!r}")
    if ours:
        in_main = threading.current_thread() is threading.main_thread()
        ending = signal.getsignal(signal.SIGTERM)
        local = {"include_dashboard": False} if address == "local" else {}
        try:
            with _stderr_away():  # Ray says that it was told to say less
                ray.init(address, logging_level="ERROR", log_to_driver=False, **local)
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            if "authentication token" in f"{error} {error.__cause__}".lower():  # in a traceback in the cause
                raise ValueError(
                    f"the Ray cluster at address={address!r} asks for its token: set RAY_AUTH_MODE=token, and have the "
                    "token in ~/.ray/auth_token or RAY_AUTH_TOKEN"
                ) from None
            reason = " ".join(str(error).split())[:300]
            raise ValueError(f"there is no Ray cluster at address={address!r}: {reason}") from None
        finally:
            if in_main and ending is not None:  # Ray sets one of its own, with another exit code
                signal.signal(signal.SIGTERM, ending)
    logging.getLogger("ray.data").setLevel(logging.ERROR)  # it tells of every data set that begins and ends
    context = ray.data.DataContext.get_current()
    before = context.enable_progress_bars, context.print_on_execution_start
    context.enable_progress_bars = context.print_on_execution_start = False
    try:
        yield ray
    finally:
        context.enable_progress_bars, context.print_on_execution_start = before
        if ours:
            ray.shutdown()


@contextlib.contextmanager
def _stderr_away() -> Iterator[None]:
    """Have what is written to the error stream go nowhere, also by code that is not Python's; errors still raise."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def check_reachable(address: str) -> None:
    """Refuse an address at which no Ray answers: Ray itself would wait there for ever."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"address={address!r} is not of the form HOST:PORT, such as 10.0.0.1:6379")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), PATIENCE) as door:
            if os.environ.get("RAY_USE_TLS", "0") != "0":
                return
            door.sendall(HTTP2)
            answer = door.recv(9)
    except OSError as error:
        raise ValueError(f"there is no Ray cluster at address={address!r}: {error.strerror or error}") from None
    if len(answer) < 4 or answer[3] != SETTINGS:
        raise ValueError(f"there is no Ray cluster at address={address!r}: what listens there is something else")


def ask_for(ray: Any, actors: int | None, device: str, cpus: int) -> tuple[int, int, int]:
    """The actors, and the CPUs and GPUs of each: as asked, else as many as the cluster has room for.

    With `device="auto"` an actor has a GPU if the cluster has any; `cpus` is what an actor needs of them.
    """
    have = ray.cluster_resources()
    all_cpus, all_gpus = int(have.get("CPU", 0)), int(have.get("GPU", 0))
    gpus = int(device.startswith("cuda") or (device == "auto" and all_gpus > 0))
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device={device!r} is not for Ray, which picks the GPU itself; use auto, cpu or cuda")
    if gpus and not all_gpus:
        raise ValueError(f"device={device!r} was asked for, but the Ray cluster has no GPU; use cpu or auto")
    room = min(all_cpus // cpus, all_gpus) if gpus else all_cpus // cpus
    if actors is not None and actors < 1:
        raise ValueError(f"actors={actors!r} must be at least 1")
    if room < (actors or 1):
        each = f"{cpus} CPU" + "s" * (cpus > 1) + " and a GPU" * gpus
        raise ValueError(
            f"actors={actors or 1} of {each} each do not fit the Ray cluster: it has {all_cpus} CPUs, {all_gpus} GPUs"
        )
    return actors or room, cpus, gpus


def cpus_beside_a_gpu(ray: Any) -> int:
    """How many CPUs each GPU can have to itself, on every machine that has one."""
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    shares = [int(has.get("CPU", 0) // has["GPU"]) for has in machines if has.get("GPU", 0) >= 1]
    return max(1, min(shares, default=1))


@contextlib.contextmanager
def original_errors(ray: Any) -> Iterator[None]:
    """Have a user's mistake that was found on the cluster raise as it does without Ray."""
    try:
        yield
    except ray.exceptions.RayError as error:
        cause = cause_of(error)
        raise cause if isinstance(cause, (ValueError, OSError)) else error from None


def cause_of(error: BaseException) -> BaseException:
    """What went wrong in an actor, without the wraps that Ray puts around it."""
    while (inner := getattr(error, "cause", None) or error.__cause__) is not None and inner is not error:
        error = inner
    return error
