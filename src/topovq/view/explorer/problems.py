"""Errors as JSON with a sentence that a person can act on, and the gate in front of the application."""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Collection
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, RedirectResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from topovq.view.explorer.schemas import TAGS, Problem

SMALL = 2**16  # bytes: a body up to here is always taken, however many others are under way
MOST_HELD = 2**27  # bytes of larger bodies under way at once
# The page may load what this server sends and nothing else.
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data: blob:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}

PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem, "description": text}
    for status, text in {
        400: "not JSON",
        401: "no token, where one is wanted",
        404: "no such run, map or image",
        413: "more bytes or pixels than are taken",
        415: "not an image",
        421: "another host's name",
        422: "a value that does not fit",
        503: "too many requests at once",
    }.items()
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
    value = error.get("input")
    too_long = isinstance(value, str | list | dict) and len(value) > 80  # seen before it is written out
    if error["type"] == "missing" or too_long or len(repr(value)) > 80:
        return sentence
    return f"{sentence}, got {value!r}"


class Gate:
    """Refuses requests for other hosts' names (a web page elsewhere must not read this server by a name of its own),
    those without `token` where there is one, and bodies of more than `most_bytes`, whether or not they say so in
    advance; adds `HEADERS` to answers.

    With a token, addresses are hosts' names, too: nobody can make an address point elsewhere.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str] | None, most_bytes: int, token: str | None = None) -> None:
        self.app, self.hosts, self.most_bytes, self.token = app, hosts, most_bytes, token
        self.held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        received = 0

        async def count() -> Message:
            nonlocal received
            message = await receive()
            more = len(message.get("body", b""))
            received, self.held = received + more, self.held + more
            if received > self.most_bytes:
                raise HTTPException(413, self._too_large(), {"Connection": "close"})
            if received > SMALL and self.held > MOST_HELD:
                raise HTTPException(503, "too many large requests are under way; try again", {"Connection": "close"})
            return message

        async def add_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = {name.lower() for name, _ in message["headers"]}
                extra = [(k.lower().encode(), v.encode()) for k, v in HEADERS.items()]
                message["headers"] = [*message["headers"], *(pair for pair in extra if pair[0] not in given)]
            await send(message)

        try:
            await self.app(scope, count, add_headers)
        finally:
            self.held -= received

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> ASGIApp | None:
        """The answer to a request that goes no further than here."""
        host = headers.get(b"host", b"").decode("latin-1")
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        known = self.hosts is None or name in self.hosts or (self.token is not None and is_address(name))
        if not known:
            return problem(421, f"this explorer answers to {', '.join(sorted(self.hosts or ()))}, not to {host!r}")
        if self.token is not None:
            sent = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
            cookie = f"topovq-{(scope.get('server') or ('', ''))[1]}"  # browsers keep one jar for all ports
            _, _, bearer = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
            if not any(map(self._is_token, (sent, bearer, cookie_of(headers, cookie)))):
                sentence = "this explorer wants its token: open the address that the terminal shows, token and all"
                return problem(401, sentence, {"WWW-Authenticate": "Bearer"})
            if scope["path"] == "/" and self._is_token(sent):  # the browser keeps it, and the address loses it
                answer = RedirectResponse("/", 303, headers=HEADERS)
                answer.set_cookie(cookie, self.token, httponly=True, samesite="lax")
                return answer
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.most_bytes:
            return problem(413, self._too_large(), {"Connection": "close"})
        return None

    def _is_token(self, given: str) -> bool:
        assert self.token is not None
        return secrets.compare_digest(given.encode("latin-1", "replace"), self.token.encode())

    def _too_large(self) -> str:
        return f"the request is larger than {self.most_bytes // 2**20} MiB; send a smaller image"


def is_address(name: str) -> bool:
    """Whether a host's name is an IP address, [in brackets] where it is of version 6."""
    try:
        ipaddress.ip_address(name[1:-1] if name.startswith("[") and name.endswith("]") else name)
    except ValueError:
        return False
    return True


def cookie_of(headers: dict[bytes, bytes], name: str) -> str:
    try:
        cookies = SimpleCookie(headers.get(b"cookie", b"").decode("latin-1"))
    except CookieError:
        return ""
    return cookies[name].value if name in cookies else ""
