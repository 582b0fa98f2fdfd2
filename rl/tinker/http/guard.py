"""What every request has to pass before anything is made of its body: host, key, size, encoding and time."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rl.tinker.http.auth import Keys
from rl.tinker.http.errors import ErrorResponse

KEY_HEADER = "X-API-Key"
OPEN_PATHS = ("/api/v1/healthz", "/openapi.json")
"""They tell nothing about anybody, and need no key."""
MAX_KEY_LENGTH = 4096


class RefusedError(Exception):
    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.response = ErrorResponse(status, detail)


class Guard:
    """ASGI middleware. A body is read here, at most `max_body_bytes` of it, whatever its header promises.

    Args:
        app: What comes after it; it finds the owner with `owner_of`.
        keys: Who may call.
        hosts: Names that the Host header may have, without port; None: any. A page of another site in a
            browser of this machine could reach a loopback server by a name of its own that leads here.
        max_body_bytes: Of one request.
        max_held_bytes: Of all requests together that are being read or answered.
        body_timeout_s: In which a body has to arrive.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: Keys,
        hosts: Collection[str] | None,
        max_body_bytes: int,
        max_held_bytes: int,
        body_timeout_s: float,
    ) -> None:
        self._app = app
        self._keys = keys
        self._hosts = hosts
        self._max_body_bytes = max_body_bytes
        self._max_held_bytes = max_held_bytes
        self._body_timeout_s = body_timeout_s
        self._held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = bytearray()
        try:
            try:
                self._admit(scope)
                await asyncio.wait_for(self._read(body, scope, receive), self._body_timeout_s)
            except RefusedError as refused:
                await refused.response(scope, receive, send)
            except TimeoutError:
                late = ErrorResponse(408, f"the body did not arrive within {self._body_timeout_s:g} s")
                await late(scope, receive, send)
            else:
                await self._app(scope, _replayed(bytes(body), receive), send)
        finally:
            self._held_bytes -= len(body)

    def _admit(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if self._hosts is not None and _without_port(host) not in self._hosts:
            raise RefusedError(421, f"Host: {host!a}, must be one of {', '.join(sorted(self._hosts))}")
        encoding = headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise RefusedError(415, f"Content-Encoding: {encoding!a}, must be identity")
        if scope["path"] not in OPEN_PATHS:
            key = headers.get(KEY_HEADER, "").encode("latin-1")
            owner = self._keys.owner(key) if len(key) <= MAX_KEY_LENGTH else None
            if owner is None:
                raise RefusedError(401, f"{KEY_HEADER}: an API key that this server knows has to be given")
            scope.setdefault("state", {})["owner"] = owner
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > self._max_body_bytes:
            raise self._too_large()

    async def _read(self, body: bytearray, scope: Scope, receive: Receive) -> None:
        while True:
            message = await receive()
            if message["type"] != "http.request":
                raise RefusedError(400, "the connection ended within the body")
            chunk = message.get("body", b"")
            if len(body) + len(chunk) > self._max_body_bytes:
                raise self._too_large()
            if self._held_bytes + len(chunk) > self._max_held_bytes:
                raise RefusedError(
                    429, f"bodies of more than {self._max_held_bytes} bytes are being worked on"
                )
            body += chunk
            self._held_bytes += len(chunk)
            if not message.get("more_body", False):
                return

    def _too_large(self) -> RefusedError:
        return RefusedError(
            413, f"the body is larger than the {self._max_body_bytes} bytes that one may have"
        )


def owner_of(request: Request) -> str:
    """Whom a request that passed the guard comes from."""
    return request.scope["state"]["owner"]


def _replayed(body: bytes, receive: Receive) -> Receive:
    """The whole body in one message, then whatever else comes: that the client has gone."""
    sent = False

    async def replay() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def _without_port(host: str) -> str:
    """The name in `name:8000` and `[::1]:8000`."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()
