"""API keys, and what the guard in front of the Tinker server asks of a request.

The hash of a key, its owner, stands for the key: the time of comparing hashes reveals nothing about
a key, and no log or error has its text.
"""

from __future__ import annotations

import hashlib
import re
import stat
from collections.abc import Collection
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Scope

from rl.http.guard import AccessGuard, RefusedError
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


class TinkerGuard(AccessGuard):
    """Guard of the Tinker server.

    Args:
        keys: the keys that may call.
        limits: has the bytes of the largest bodies.
    """

    def __init__(
        self, app: ASGIApp, *, keys: Keys, hosts: Collection[str] | None, limits: Limits
    ) -> None:
        super().__init__(app, hosts=hosts)
        self._keys = keys
        self._limits = limits

    def is_open(self, scope: Scope) -> bool:
        return scope["path"] in OPEN_PATHS

    def find_owner(self, scope: Scope) -> str:
        headers = Headers(scope=scope)
        text, where = headers.get(KEY_HEADER, ""), KEY_HEADER
        if not text and scope["path"].startswith(COMPATIBLE_PATHS):
            kind, _, text = headers.get("authorization", "").partition(" ")
            text, where = (text if kind.lower() == "bearer" else ""), "Authorization: Bearer"
        key = text.encode("latin-1")  # Headers are bytes, which Starlette decodes so.
        owner = self._keys.find_owner(key) if len(key) <= MAX_LENGTH else None
        if owner is None:
            raise RefusedError(401, f"{where}: must be an API key that this server knows")
        return owner

    def limit_bytes(self, scope: Scope) -> int:
        by_path = {TENSORS_PATH: self._limits.body_bytes, SAMPLE_PATH: JSON_BYTES}
        return by_path.get(scope["path"], SMALL_BYTES)
