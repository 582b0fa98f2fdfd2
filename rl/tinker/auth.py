"""What the guard in front of the Tinker server asks of a request."""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Scope

from rl.agents.endpoint.app import make_refusal_response
from rl.http.guard import AccessGuard, RefusedError
from rl.http.keys import Keys
from rl.tinker.types import Limits

KEY_PREFIX = "tml-"
"""First characters of every key; the official client refuses others."""
KEY_HEADER = "X-API-Key"
OPEN_PATHS = ("/api/v1/healthz", "/openapi.json")
"""Paths that need no key, because they reveal nothing about any owner. They take no body."""
OPENAI_PREFIX, ANTHROPIC_PREFIX = "/oai/api", "/anthropic/api"
"""Starts of the paths of OpenAI's and Anthropic's APIs, as at the official service."""
CHAT_PATHS = (f"{OPENAI_PREFIX}/", f"{ANTHROPIC_PREFIX}/")
COMPATIBLE_PATHS = ("/oai/", "/anthropic/", "/v1/")
"""Starts of the paths of other APIs, of which this server has `CHAT_PATHS`. Their clients may send
the key as `Authorization: Bearer`."""
TENSORS_PATH, SAMPLE_PATH = "/api/v1/forward_backward", "/api/v1/asample"
"""Paths with larger bodies, the first of which is no JSON."""
JSON_BYTES = 2 * 2**20
"""Bytes of the body of a sample or of a conversation: a prompt of 262,144 tokens has 1.8 million.
JSON grows many times while it is parsed, and blocks all others."""
SMALL_BYTES = 256 * 2**10
"""Bytes of every other body."""


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
        owner = self._keys.find_owner(key)
        if owner is None:
            raise RefusedError(401, f"{where}: must be an API key that this server knows")
        return owner

    def limit_bytes(self, scope: Scope) -> int:
        path: str = scope["path"]
        if path.startswith(CHAT_PATHS):
            return JSON_BYTES
        by_path = {TENSORS_PATH: self._limits.body_bytes, SAMPLE_PATH: JSON_BYTES}
        return by_path.get(path, SMALL_BYTES)

    def make_refusal(self, scope: Scope, refused: RefusedError) -> Response:
        if scope["path"].startswith(CHAT_PATHS):
            return make_refusal_response(scope["path"], refused)
        return super().make_refusal(scope, refused)
