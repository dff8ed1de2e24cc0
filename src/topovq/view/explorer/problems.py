"""Errors as JSON with a sentence that a person can act on, and the gate in front of the application."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from topovq.view.explorer.schemas import TAGS

# The page may load what this server sends and nothing else.
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data: blob:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class ApiError(Exception):
    """A request that cannot be served: the status and a sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status, self.sentence = status, sentence


def problem(status: int, sentence: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"detail": sentence}, status, headers={**HEADERS, **(headers or {})})


def speak_plainly(app: FastAPI) -> None:
    """Have every error of `app` answered by `problem`."""

    @app.exception_handler(ApiError)
    async def ours(request: Request, error: ApiError) -> JSONResponse:
        return problem(error.status, error.sentence)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        path = request.url.path
        known = {
            400: "the body cannot be read as JSON",
            404: f"there is nothing at {path}",
            405: f"{request.method} is not offered at {path}",
        }
        sentence = known.get(error.status_code, str(error.detail))
        return problem(error.status_code, sentence, dict(error.headers or {}))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return problem(422, describe(error.errors()[0]))

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:  # the server logs it after this answer
        return problem(500, "the explorer failed at this request; the terminal it was started in says why")


def describe(error: dict[str, Any]) -> str:
    """One finding of pydantic's as a sentence: where, what is wrong, and the value."""
    if isinstance(error.get("input"), bytes):
        return "the body was not read as JSON; send it with the header Content-Type: application/json"
    if error["type"] == "json_invalid":
        return f"the body is not JSON: {error['ctx']['error']}"
    places = ("body", "query", "path", *TAGS)
    where = ".".join(str(part) for part in error["loc"] if part not in places) or "the request"
    sentence = f"{where}: {error['msg'][:1].lower()}{error['msg'][1:]}"
    value = repr(error.get("input"))
    return sentence if error["type"] == "missing" or len(value) > 80 else f"{sentence}, got {value}"


class Gate:
    """Refuses requests for other hosts' names (a web page elsewhere must not read this server by a name of its own)
    and bodies of more than `most_bytes`, whether or not they say so in advance; adds `HEADERS` to answers."""

    def __init__(self, app: ASGIApp, hosts: Collection[str] | None, most_bytes: int) -> None:
        self.app, self.hosts, self.most_bytes = app, hosts, most_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1")
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        if self.hosts is not None and name not in self.hosts:
            answer = problem(421, f"this explorer answers to {', '.join(sorted(self.hosts))}, not to {host!r}")
            await answer(scope, receive, send)
            return
        sentence = f"the request is larger than {self.most_bytes // 2**20} MiB; send a smaller image"
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.most_bytes:
            await problem(413, sentence, {"Connection": "close"})(scope, receive, send)
            return
        received = 0

        async def count() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.most_bytes:
                raise HTTPException(413, sentence, {"Connection": "close"})
            return message

        async def add_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = {name.lower() for name, _ in message["headers"]}
                extra = [(k.lower().encode(), v.encode()) for k, v in HEADERS.items()]
                message["headers"] = [*message["headers"], *(pair for pair in extra if pair[0] not in given)]
            await send(message)

        await self.app(scope, count, add_headers)
