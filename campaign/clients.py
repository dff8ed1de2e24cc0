"""Clients of the explorer: those who use it, those who mean harm, those who take their time."""

from __future__ import annotations

import base64
import contextlib
import logging
import socket
import threading
import time
from itertools import count
from random import Random
from urllib.parse import urlsplit

import httpx
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from schemathesis import GenerationMode

from campaign.hostile import BOMB, bomb

Answers = list[tuple[str, int, float]]  # what was asked, the status (0: closed), how many seconds it took
PAUSE = 0.05  # seconds between the requests of a normal client
SLOW = ("silent", "head", "body", "unread")


def normal(address: str, requests: int, clients: int) -> Answers:
    """Pick an image, look at it, shift its tokens, walk on the map: as the page does."""
    answers: Answers = []

    def use(number: int) -> None:
        with httpx.Client(base_url=address, timeout=60) as client:

            def ask(method: str, path: str, body: object = None) -> httpx.Response:
                time.sleep(PAUSE)
                began = time.perf_counter()
                answer = client.request(method, path, json=body)
                answers.append((f"{method} {path}", answer.status_code, time.perf_counter() - began))
                return answer

            image = number
            while len(answers) < requests:
                image = (image + 1) % 8
                ask("GET", f"/api/images/samples/{image}")
                encoded = ask("POST", "/api/encode", {"set": "samples", "index": image})
                if encoded.status_code == 200:
                    tokens = encoded.json()["tokens"]
                    ask("POST", "/api/shift", {"tokens": tokens, "offsets": [[image % 3, 1]]})
                ask("GET", "/api/path?start=0&end=9")
                ask("GET", "/api/map")

    threads = [threading.Thread(target=use, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def hostile(address: str, requests: int, rng: Random, ended: threading.Event, answers: Answers) -> None:
    """One thing after the other that a server should not fall over, each on a connection of its own; at least
    `requests` of them, and until the others have ended."""
    parts = urlsplit(address)
    for number in count():
        if number >= requests and ended.is_set():
            break
        kind, said = rng.choice(MALICE)(rng)
        began = time.perf_counter()
        status = 0
        with contextlib.suppress(OSError, ValueError, IndexError):
            door = socket.create_connection((parts.hostname, parts.port), 15)
            with door:
                door.sendall(said.replace(b"HOST", parts.netloc.encode(), 1))
                door.shutdown(socket.SHUT_WR) if rng.random() < 0.2 else None
                status = int(door.recv(64).split()[1])
        answers.append((kind, status, time.perf_counter() - began))


def _post(path: str, body: bytes, headers: bytes = b"") -> bytes:
    head = b"POST %s HTTP/1.1\r\nHost: HOST\r\nContent-Type: application/json\r\n" % path.encode()
    return head + b"Connection: close\r\nContent-Length: %d\r\n%s\r\n" % (len(body), headers) + body


def _get(path: bytes, headers: bytes = b"Host: HOST\r\n") -> bytes:
    return b"GET %s HTTP/1.1\r\n%sConnection: close\r\n\r\n" % (path, headers)


def large_json(rng: Random) -> tuple[str, bytes]:
    inside = rng.choice((b"1,", b'"a",', b"[],", b"[", b"{},", b" ", b"9", b'"\\u0041",', b"-"))
    body = b'{"tokens": [[[' + inside * (11 * 2**20 // len(inside)) + b"1]]]}"
    return "11 MiB of " + inside.decode(), _post("/api/" + rng.choice(("decode", "shift", "encode")), body)


def large_text(rng: Random) -> tuple[str, bytes]:
    letter = rng.choice((b"A", b"=", b"\xff", b"\\u0041"))
    body = b'{"data": "' + letter * (11 * 2**20 // len(letter)) + b'"}'
    return "11 MiB of text", _post("/api/encode", body)


def too_large(rng: Random) -> tuple[str, bytes]:
    if rng.random() < 0.5:
        return "a length of terabytes", _post("/api/encode", b"", b"")[:-2].replace(
            b": 0", b": 9999999999999"
        ) + b"\r\n"
    chunks = b"100000\r\n" + bytes(2**20) + b"\r\n"
    head = _post("/api/encode", b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    return "chunks without end", head + chunks * 14


def image(rng: Random) -> tuple[str, bytes]:
    data = rng.choice((BOMB, bomb(5000, 4999), bomb(20_000, 1000), rng.randbytes(2**20), b"", b"GIF89a" + bytes(100)))
    return "an image", _post("/api/encode", b'{"data": "' + base64.b64encode(data) + b'"}')


def deep(rng: Random) -> tuple[str, bytes]:
    return "deep JSON", _post("/api/decode", rng.choice((b"[", b'{"a":')) * rng.choice((900, 5000, 100_000)))


def path(rng: Random) -> tuple[str, bytes]:
    wanted = rng.choice(
        (
            *(
                b"/../../etc/passwd",
                b"/%2e%2e/%2e%2e/etc/passwd",
                b"/api/images/folder/../../0",
                b"/api/images/folder/99",
            ),
            *(b"//etc/passwd", b"/api/map?map=-1", b"/api/path?start=0&end=1e9", b"/%00", b"/api/images/folder/8"),
            *(
                b"/" + b"a" * 60_000,
                b"/api/run?" + b"x=1&" * 10_000,
                b"/api/map?run=" + b"9" * 5000,
                b"*",
                b"http://e/",
            ),
        )
    )
    return f"GET {wanted[:40].decode()}", _get(wanted)


def head(rng: Random) -> tuple[str, bytes]:
    headers = rng.choice(
        (
            *(b"Host: evil.example\r\n", b"", b"Host: HOST\r\nHost: evil.example\r\n", b"Host: \xff\r\n"),
            *(b"Host: HOST\r\nX: " + b"x" * 70_000 + b"\r\n", b"Host: HOST\r\n" + b"X: 1\r\n" * 5000),
            *(
                b"Host: HOST\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n",
                b"Host: HOST\r\nExpect: 100-continue\r\n",
            ),
            *(b"Host: HOST\r\nCookie: " + b"a=b; " * 2000 + b"\r\n", b"Host: HOST\r\nRange: bytes=0-,0-\r\n"),
        )
    )
    return "odd headers", _get(b"/api/run", headers)


def garbage(rng: Random) -> tuple[str, bytes]:
    return "no HTTP", rng.choice(
        (rng.randbytes(500), b"\x16\x03\x01\x02\x00", b"GET", b"\r\n" * 100, b"PRI * HTTP/2.0\r\n\r\n")
    )


def method(rng: Random) -> tuple[str, bytes]:
    name = rng.choice((b"DELETE", b"PUT", b"OPTIONS", b"HEAD", b"TRACE", b"BREW", b"CONNECT"))
    return f"{name.decode()}", _get(b"/api/run").replace(b"GET", name)


MALICE = (large_json, large_text, too_large, image, deep, path, head, garbage, method)


def generated(address: str, requests: int, number: int, answers: Answers) -> None:
    """Requests made up from the server's own description of itself, most of them wrong."""
    logging.getLogger("schemathesis").setLevel(logging.ERROR)
    schema = schemathesis.openapi.from_url(f"{address}/api/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    operations = [operation for operation in operations if operation.path != "/api/run"]  # it takes nothing
    for index, operation in enumerate(operations):

        @seed(number + index)
        @settings(
            max_examples=max(1, requests // len(operations)),
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=GenerationMode.NEGATIVE))
        def attempt(case: schemathesis.Case) -> None:
            began = time.perf_counter()
            try:
                status = case.call(timeout=15).status_code
            except OSError:  # of requests, which schemathesis uses: the connection was closed
                status = 0
            answers.append((f"{case.method} {case.operation.path}", status, time.perf_counter() - began))

        attempt()


def slow(address: str, kind: str, ended: threading.Event, answers: Answers) -> None:
    """Open connections that say nothing, or drip, or never read, anew as they are closed; how long each was held."""
    parts = urlsplit(address)
    host = parts.netloc.encode()
    said = {
        "silent": b"",
        "head": b"GET /api/run HTTP/1.1\r\nHost: " + host + b"\r\nX: ",
        "body": _post("/api/encode", b" " * 2**20).replace(b"HOST", host, 1)[: -(2**20)],
        "unread": _get(b"/api/map").replace(b"HOST", host, 1).replace(b"close", b"keep-alive") * 50,
    }[kind]
    doors: dict[socket.socket, float] = {}
    while True:
        while len(doors) < 25:
            try:
                door = socket.create_connection((parts.hostname, parts.port), 5)
                door.sendall(said)
            except OSError:
                break
            door.setblocking(False)
            doors[door] = time.monotonic()
        for door, since in list(doors.items()):
            if _is_closed(door, kind):
                answers.append((kind, 0, time.monotonic() - since))
                door.close()
                del doors[door]
        if ended.wait(0.5):  # not before: some are opened, however soon the others have ended
            break
    for door, since in doors.items():
        held = time.monotonic() - since
        answers.append((kind, int(held > 90), held))  # whether the server is as patient as it says
        door.close()


def _is_closed(door: socket.socket, kind: str) -> bool:
    try:
        if kind in ("head", "body"):
            door.send(b"x" if kind == "head" else b" ")
        return kind != "unread" and door.recv(1000) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
