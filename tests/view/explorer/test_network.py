"""The explorer on a network: a token, hosts' names, sockets that say nothing, bodies that would hold everybody up."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi.testclient import TestClient

from topovq.view.explorer import patience
from topovq.view.explorer.app import create_app
from topovq.view.explorer.problems import Gate, is_address
from topovq.view.explorer.server import LOOPBACK, is_loopback
from topovq.view.report import study

pytestmark = pytest.mark.xdist_group("explorer")

TOKEN = "what-the-terminal-shows"


@pytest.fixture(scope="module")
def app(runs: list[Path]) -> Any:
    return create_app([study(runs[0], limit=4)], None, {*LOOPBACK, "my-machine"}, TOKEN)


def client(app: Any, **headers: str) -> TestClient:
    return TestClient(app, base_url="http://192.168.1.7:8765", headers=headers, follow_redirects=False)


def test_without_the_token_nothing_is_answered(app: Any) -> None:
    stranger = client(app)
    for path in ("/", "/app.js", "/api/run", "/api/openapi.json", "/nowhere"):
        for guess in ("", "?token=", "?token=wrong", f"?token={TOKEN}x", "?token=%c3%a9"):
            answer = stranger.get(path + guess)
            assert (answer.status_code, list(answer.json())) == (401, ["detail"])
            assert "set-cookie" not in answer.headers
            assert TOKEN not in answer.text
    assert stranger.post("/api/encode", json={"set": "validation", "index": 0}).status_code == 401
    assert client(app, cookie="topovq-8765=wrong; ]=[").get("/api/run").status_code == 401


def test_the_address_in_the_terminal_lets_a_browser_in_for_good(app: Any) -> None:
    browser = client(app)
    first = browser.get(f"/?token={TOKEN}")
    assert (first.status_code, first.headers["location"]) == (303, "/")
    assert {"HttpOnly", "SameSite=lax"} <= set(first.headers["set-cookie"].split("; "))
    assert browser.get("/").status_code == 200
    assert browser.post("/api/encode", json={"set": "validation", "index": 0}).status_code == 200
    program = client(app, authorization=f"Bearer {TOKEN}")
    assert program.get("/api/run").status_code == client(app).get(f"/api/run?token={TOKEN}").status_code == 200


@pytest.mark.parametrize("host", ["my-machine:8765", "192.168.1.7:8765", "[fe80::1]:8765", "[fe80::1]", "localhost"])
def test_the_machines_own_names_and_addresses_are_answered(app: Any, host: str) -> None:
    assert client(app, host=host, authorization=f"Bearer {TOKEN}").get("/api/run").status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "192.168.1.7.evil.example:8765", "", "my-machine.evil.example"])
def test_the_host_stays_checked(app: Any, host: str) -> None:
    answer = client(app, host=host, authorization=f"Bearer {TOKEN}").get("/api/run")
    assert answer.status_code == 421
    assert answer.headers["cross-origin-resource-policy"] == "same-origin"


def test_which_hosts_are_this_machine_alone() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.8.8", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.168.1.7", "my-machine", "")))
    assert is_address("[::1]")
    assert not is_address("::1.evil.example")


def test_a_host_beyond_loopback_is_warned_of_and_has_a_token(runs: list[Path]) -> None:
    command = [sys.executable, "-m", "topovq", "explore", str(runs[0]), "--port", "0", "--host", "0.0.0.0"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    assert process.stdout is not None
    try:
        assert "Warning: --host 0.0.0.0 opens the page to other machines" in process.stdout.readline()
        address = re.search(r"http://0\.0\.0\.0:(\d+)/\?token=([\w-]{32})", process.stdout.readline())
        assert address
        with socket.create_connection(("127.0.0.1", int(address[1])), 20) as door:
            door.sendall(b"GET /api/run HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
            assert door.recv(100).startswith(b"HTTP/1.1 401")
    finally:
        process.terminate()
        process.wait(20)


# Bodies


@pytest.fixture(scope="module")
def open_app(runs: list[Path], folder: Path) -> Any:
    return create_app([study(runs[0], limit=4)], folder)


@pytest.mark.parametrize("path", ["encode", "decode", "shift"])
def test_more_values_than_a_model_has_tokens_are_not_even_parsed(open_app: Any, path: str) -> None:
    many = TestClient(open_app)
    bodies = [b'{"tokens":[[[' + b'"a",' * 2_000_000 + b'"a"]]]}', b"[" * 4_000_000, b'{"data":' * 1_000_000]
    for body in bodies:
        began = time.perf_counter()
        answer = many.post(f"/api/{path}", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 413
        assert "values" in answer.json()["detail"]
        assert time.perf_counter() - began < 0.5  # pydantic alone would take seconds


def test_large_json_leaves_the_event_loop_to_others(open_app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    real = json.loads

    def loads(body: bytes) -> Any:
        threads.append(threading.current_thread().name.split("_")[0])
        return real(body)

    monkeypatch.setattr("topovq.view.explorer.app.json.loads", loads)
    sender = TestClient(open_app)
    data = base64.b64encode(bytes(2**20)).decode()
    assert sender.post("/api/encode", json={"data": data}).status_code == 415
    assert threads == ["reader"]


def test_large_bodies_are_bounded_together_and_small_ones_still_pass() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await asyncio.sleep(0.05)

    async def all_at_once() -> tuple[list[Any], int]:
        gate = Gate(app, None, 2**24)

        async def request(size: int) -> None:
            async def receive() -> Any:
                return {"type": "http.request", "body": bytes(size)}

            async def send(message: Any) -> None:
                pass

            await gate({"type": "http", "headers": [], "query_string": b"", "path": "/"}, receive, send)

        sizes = [11 * 2**20] * 14 + [1000]
        return await asyncio.gather(*map(request, sizes), return_exceptions=True), gate.held

    ended, held = asyncio.run(all_at_once())
    assert [getattr(each, "status_code", None) for each in ended] == [None] * 11 + [503] * 3 + [None]
    assert held == 0


def test_a_named_pipe_among_images_hangs_nothing(runs: list[Path], tmp_path: Path, folder: Path) -> None:
    (tmp_path / "good.png").write_bytes((folder / "0.png").read_bytes())
    os.mkfifo(tmp_path / "pipe.png")
    pipes = TestClient(create_app([study(runs[0], limit=4)], tmp_path))
    assert pipes.get("/api/images/folder/0").status_code == 200
    answer = pipes.get("/api/images/folder/1")
    assert (answer.status_code, "not a regular file" in answer.json()["detail"]) == (404, True)


# Sockets


@pytest.fixture
def hasty(open_app: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of a server with less patience than usual."""
    for name, value in {"HEAD_SECONDS": 0.5, "BODY_SECONDS": 0.8, "ANSWER_SECONDS": 1, "MOST_CONNECTIONS": 8}.items():
        monkeypatch.setattr(patience, name, value)
    with socket.create_server(("127.0.0.1", 0)) as door:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        server = uvicorn.Server(uvicorn.Config(open_app, http=patience.PatientProtocol, log_level="error"))
        thread = threading.Thread(target=server.run, args=([door],))
        thread.start()
        try:
            yield door.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(20)


def seconds_until_closed(port: int, said: bytes, drip: bytes = b"") -> float:
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", port), 5) as door:
        door.sendall(said)
        door.settimeout(0.1)
        while time.monotonic() - began < 5:
            try:
                if not door.recv(1000):
                    break
            except TimeoutError:
                door.sendall(drip)
            except ConnectionError:
                break
    return time.monotonic() - began


def test_sockets_that_say_nothing_whole_are_closed(hasty: int) -> None:
    assert 0.4 < seconds_until_closed(hasty, b"") < 2
    assert 0.4 < seconds_until_closed(hasty, b"GET / HTTP/1.1\r\nA: ", drip=b"a") < 2
    head = b"POST /api/encode HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9999\r\n\r\n"
    assert 0.7 < seconds_until_closed(hasty, head, drip=b" ") < 3


def test_an_answer_that_nobody_takes_is_given_up(hasty: int, open_app: Any) -> None:
    length = len(TestClient(open_app).get("/api/openapi.json").content)
    with socket.socket() as door:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        door.connect(("127.0.0.1", hasty))
        door.sendall(b"GET /api/openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * 400)
        time.sleep(2.5)
        door.settimeout(5)
        taken = 0
        with contextlib.suppress(ConnectionError):
            while got := len(door.recv(2**20)):
                taken += got
    assert 0 < taken < 400 * length


def test_silent_sockets_make_room_for_those_that_speak(hasty: int) -> None:
    silent = [socket.create_connection(("127.0.0.1", hasty), 5) for _ in range(20)]
    with socket.create_connection(("127.0.0.1", hasty), 5) as door:
        door.sendall(b"GET /api/run HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert door.recv(100).startswith(b"HTTP/1.1 200")
    ended = 0
    for each in silent:
        each.settimeout(0.05)
        try:
            ended += not each.recv(1)
        except ConnectionError:
            ended += 1
        except TimeoutError:
            pass
        each.close()
    assert ended >= 20 - 8
