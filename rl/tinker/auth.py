"""API keys, and the middleware that every request passes before its body is looked at.

The hash of a key, its owner, stands for the key: the time of comparing hashes reveals nothing about
a key, and no log or error has its text.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import resource
import stat
from collections import Counter
from collections.abc import Collection
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rl.tinker.types import Limits

KEY_PREFIX = "tml-"
"""First characters of every key; the official client refuses others."""
SAFE_KEY = rf"{KEY_PREFIX}[!-~]{{16,}}"
MAX_LENGTH = 4096
KEY_HEADER = "X-API-Key"
OPEN_PATHS = ("/api/v1/healthz", "/openapi.json")
"""Paths that need no key, because they reveal nothing about any owner. They take no body."""
COMPATIBLE_PATHS = ("/oai/", "/anthropic/", "/v1/")
"""Starts of the paths of other APIs, at the official service and as their clients have them
everywhere, which this server does not have. Those clients send the key as `Authorization:
Bearer`."""
TENSORS_PATH, SAMPLE_PATH = "/api/v1/forward_backward", "/api/v1/asample"
"""Paths with larger bodies, the first of which is no JSON."""
JSON_BYTES = 2 * 2**20
"""Bytes of the body of a sample: a prompt of 262,144 tokens has 1.8 million. JSON grows many times
while it is parsed, and blocks all others."""
SMALL_BYTES = 256 * 2**10
"""Bytes of every other body."""
BODY_TIMEOUT_S = 60.0
ALL_BODIES_BYTES = 2**30
"""Bytes of all bodies that are being read or answered."""
MAX_CONNECTIONS = 4096
"""Open connections. A client waits for up to 2,000 samples on as many connections."""


def limit_connections() -> int:
    """Return the limit on open connections; the other half of the process's files is for
    checkpoints and processes.
    """
    return min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


class Keys:
    """The keys that may call; None: any key may, and each is its own owner."""

    def __init__(self, keys: Collection[str] | None = None) -> None:
        """Raise ValueError for an unsafe key, which the text names by its position."""
        self._owners: frozenset[str] | None = None
        if keys is None:
            return
        if not keys:
            raise ValueError(
                "API keys: there are none; leave them out to accept any key on loopback"
            )
        for number, key in enumerate(keys, start=1):
            if not re.fullmatch(SAFE_KEY, key):
                raise ValueError(
                    f"API key {number}: must be 'tml-' and 16 or more printable ASCII characters"
                )
        self._owners = frozenset(_hash_owner(key.encode()) for key in keys)

    @property
    def configured(self) -> bool:
        """True if only some keys may call."""
        return self._owners is not None

    def find_owner(self, key: bytes) -> str | None:
        """Return a key's owner, or None if the key may not call."""
        owner = _hash_owner(key)
        # The set is of hashes, so the time of the look-up tells nothing about a key.
        may_call = bool(key) if self._owners is None else owner in self._owners
        return owner if may_call else None


def read_keys(file: str | None) -> Keys:
    """Read keys from a file, one per line with `#` comments; without a file any key may call.

    Raises:
        ValueError: the file is missing or has no key, or other users can read it.
    """
    if file is None:
        return Keys()
    try:
        path = Path(file).expanduser()
        if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ValueError("others may read or write it; chmod 600 it")
        texts = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
        return Keys([text for text in texts if text])
    except (OSError, ValueError) as error:
        raise ValueError(f"keys_file={file!r}: {error}") from None


def _hash_owner(key: bytes) -> str:
    # Twice, the second time with a purpose: the stored hash of an owner is not the plain hash of a
    # key. Training runs on disks carry it, so it never changes.
    digest = hashlib.sha256(key).hexdigest()
    return hashlib.sha256(f"owner of training runs\0{digest}".encode()).hexdigest()


class _RefusedError(Exception):
    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.response = JSONResponse({"detail": detail}, status)


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


class AccessGuard:
    """ASGI middleware that checks host, key and size, and reads the body within its limits.

    Args:
        app: application behind the guard, which finds the owner in `request.state.owner`.
        keys: the keys that may call.
        hosts: valid names of the Host header, without port; None accepts any. A page of another
            site in a browser on this machine could reach a loopback server through a name of its
            own that resolves here.
        limits: has the bytes of the largest bodies.
    """

    def __init__(
        self, app: ASGIApp, *, keys: Keys, hosts: Collection[str] | None, limits: Limits
    ) -> None:
        self._app = app
        self._keys = keys
        self._hosts = hosts
        self._limits = limits
        self._bytes = Shares(ALL_BODIES_BYTES)
        self._requests = Shares(limit_connections())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Cheap checks first: host and key are known before a byte of the body is read.
        assert scope["type"] == "http", "the server has neither websockets nor lifespan events"
        try:
            self._check_host(scope)
            if scope["path"] in OPEN_PATHS:
                _refuse_body(scope)
                await self._app(scope, receive, send)
            else:
                await self._call(scope, receive, send)
        except _RefusedError as refused:
            await refused.response(scope, receive, send)

    async def _call(self, scope: Scope, receive: Receive, send: Send) -> None:
        owner = scope.setdefault("state", {})["owner"] = self._check_key(scope)
        most = self._limit_bytes(scope)
        if not self._requests.take(owner, 1):
            raise _RefusedError(429, "this key has its share of requests in progress; wait")
        # The whole body is read here, so that the application never waits for a slow client.
        body = bytearray()
        try:
            try:
                async with asyncio.timeout(BODY_TIMEOUT_S):
                    await self._read(body, most, receive, owner=owner)
            except TimeoutError:
                raise _RefusedError(
                    408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s"
                ) from None
            await self._app(scope, _replay(bytes(body), receive), send)
        finally:
            self._bytes.give_back(owner, len(body))
            self._requests.give_back(owner, 1)

    def _check_host(self, scope: Scope) -> None:
        host = Headers(scope=scope).get("host", "")
        if self._hosts is not None and _strip_port(host) not in self._hosts:
            raise _RefusedError(
                421, f"Host: {host[:256]!a}, must be one of {', '.join(sorted(self._hosts))}"
            )

    def _check_key(self, scope: Scope) -> str:
        headers = Headers(scope=scope)
        text, where = headers.get(KEY_HEADER, ""), KEY_HEADER
        if not text and scope["path"].startswith(COMPATIBLE_PATHS):
            kind, _, text = headers.get("authorization", "").partition(" ")
            text, where = (text if kind.lower() == "bearer" else ""), "Authorization: Bearer"
        key = text.encode("latin-1")  # Headers are bytes, which Starlette decodes so.
        owner = self._keys.find_owner(key) if len(key) <= MAX_LENGTH else None
        if owner is None:
            raise _RefusedError(401, f"{where}: must be an API key that this server knows")
        return owner

    def _limit_bytes(self, scope: Scope) -> int:
        """Return the most bytes that the body may have; refuse one that says that it has more."""
        by_path = {TENSORS_PATH: self._limits.body_bytes, SAMPLE_PATH: JSON_BYTES}
        most = by_path.get(scope["path"], SMALL_BYTES)
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
                raise _RefusedError(400, "the connection ended within the body")
            chunk = message.get("body", b"")
            if len(body) + len(chunk) > most:
                raise _make_size_error(most)
            if not self._bytes.take(owner, len(chunk)):
                raise _RefusedError(
                    429,
                    f"this key has its share of the {ALL_BODIES_BYTES} bytes of all bodies; wait",
                )
            body += chunk
            if not message.get("more_body", False):
                return


def _refuse_body(scope: Scope) -> None:
    headers = Headers(scope=scope)
    if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
        raise _RefusedError(413, f"{scope['path']}: takes no body")


def _make_size_error(most: int) -> _RefusedError:
    return _RefusedError(413, f"the body is larger than the allowed {most} bytes")


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
