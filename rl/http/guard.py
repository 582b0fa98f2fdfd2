"""Guard in front of an HTTP application: host, key, size and share of every request are checked
before its body is looked at.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rl.http.open_files import limit_connections

BODY_TIMEOUT_S = 60.0
ALL_BODIES_BYTES = 2**30
"""Bytes of all bodies that are being read or answered."""


class RefusedError(Exception):
    """A request that the guard refuses with a status."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class Shares:
    """What each owner holds of something limited: an owner may hold at most as much as remains
    free.

    So n owners that take all they can get have 1 / (n + 1) each, and something is left for the next
    one.
    """

    def __init__(self, total: int) -> None:
        self._free = total
        self._held: Counter[str] = Counter()

    def take(self, owner: str, amount: int) -> bool:
        """Return False, and take nothing, if it would be more than the owner's share."""
        # An empty body costs nothing, and passes even where nothing is free.
        if amount and self._held[owner] + amount > self._free - amount:
            return False
        self._held[owner] += amount
        self._free -= amount
        return True

    def give_back(self, owner: str, amount: int) -> None:
        """Return what an owner has taken."""
        self._free += amount
        self._held[owner] -= amount
        # Without keys_file every key is an owner, and their number would grow for ever.
        if not self._held[owner]:
            del self._held[owner]


class AccessGuard(ABC):
    """ASGI middleware that checks host, key and size, and reads the body within its limits.

    Args:
        app: application behind the guard, which finds the owner in `request.state.owner`.
        hosts: valid names of the Host header, without port; None accepts any. A page of another
            site in a browser on this machine could reach a loopback server through a name of its
            own that resolves here.
    """

    def __init__(self, app: ASGIApp, *, hosts: Collection[str] | None) -> None:
        self._app = app
        self._hosts = hosts
        self._bytes = Shares(ALL_BODIES_BYTES)
        self._requests = Shares(limit_connections())

    @abstractmethod
    def is_open(self, scope: Scope) -> bool:
        """Return whether a path needs no key, because it reveals nothing about any owner."""

    @abstractmethod
    def find_owner(self, scope: Scope) -> str:
        """Return the owner of the request's key; raise RefusedError without a valid one."""

    @abstractmethod
    def limit_bytes(self, scope: Scope) -> int:
        """Return the most bytes that the body of a request may have."""

    def make_refusal(self, scope: Scope, refused: RefusedError) -> Response:
        """Return the answer to a request that is refused."""
        return JSONResponse({"detail": str(refused)}, refused.status)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Cheap checks first: host and key are known before a byte of the body is read.
        assert scope["type"] == "http", "the server has neither websockets nor lifespan events"
        try:
            self._check_host(scope)
            if self.is_open(scope):
                _refuse_body(scope)
                await self._app(scope, receive, send)
            else:
                await self._call(scope, receive, send)
        except RefusedError as refused:
            await self.make_refusal(scope, refused)(scope, receive, send)

    async def _call(self, scope: Scope, receive: Receive, send: Send) -> None:
        owner = scope.setdefault("state", {})["owner"] = self.find_owner(scope)
        most = self._limit_bytes(scope)
        if not self._requests.take(owner, 1):
            raise RefusedError(429, "this key has its share of requests in progress; wait")
        # The whole body is read here, so that the application never waits for a slow client.
        body = bytearray()
        try:
            try:
                async with asyncio.timeout(BODY_TIMEOUT_S):
                    await self._read(body, most, receive, owner=owner)
            except TimeoutError:
                raise RefusedError(
                    408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s"
                ) from None
            await self._app(scope, _replay(bytes(body), receive), send)
        finally:
            self._bytes.give_back(owner, len(body))
            self._requests.give_back(owner, 1)

    def _check_host(self, scope: Scope) -> None:
        host = Headers(scope=scope).get("host", "")
        if self._hosts is not None and _strip_port(host) not in self._hosts:
            raise RefusedError(
                421, f"Host: {host[:256]!a}, must be one of {', '.join(sorted(self._hosts))}"
            )

    def _limit_bytes(self, scope: Scope) -> int:
        """Return the most bytes of the body; refuse one that says that it has more."""
        most = self.limit_bytes(scope)
        # The header may lie, or be missing: `_read` counts what arrives. 20 digits, because Python
        # refuses to convert thousands of them with an error.
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > most:
            raise _make_size_error(most)
        return most

    async def _read(self, body: bytearray, most: int, receive: Receive, *, owner: str) -> None:
        while True:
            message = await receive()
            if message["type"] != "http.request":
                raise RefusedError(400, "the connection ended within the body")
            chunk = message.get("body", b"")
            if len(body) + len(chunk) > most:
                raise _make_size_error(most)
            if not self._bytes.take(owner, len(chunk)):
                raise RefusedError(
                    429,
                    f"this key has its share of the {ALL_BODIES_BYTES} bytes of all bodies; wait",
                )
            body += chunk
            if not message.get("more_body", False):
                return


def _refuse_body(scope: Scope) -> None:
    headers = Headers(scope=scope)
    if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
        raise RefusedError(413, f"{scope['path']}: takes no body")


def _make_size_error(most: int) -> RefusedError:
    return RefusedError(413, f"the body is larger than the allowed {most} bytes")


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the whole body, then what follows, such as a disconnect."""
    sent = False

    async def replay() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def _strip_port(host: str) -> str:
    """Return the name in `name:8000` or `[::1]:8000`."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()
