"""HTTP application around one model: OpenAI's and Anthropic's APIs under three prefixes."""

from __future__ import annotations

from collections.abc import Collection

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Scope

from rl.agents.endpoint.app import HEALTH, add_common, add_dialects, make_refusal_response, read_key
from rl.agents.endpoint.stateless import StatelessAnswerer
from rl.http.guard import AccessGuard, RefusedError
from rl.http.keys import Keys

PREFIXES = ("", "/oai/api", "/anthropic/api")
"""Starts of the paths; the last two are those of the Tinker server."""
BODY_BYTES = 8 * 2**20
"""Bytes of the largest conversation."""


def make_app(answerer: StatelessAnswerer, *, keys: Keys, hosts: Collection[str] | None) -> FastAPI:
    """Build the application; `hosts` are those of `AccessGuard`."""
    app = FastAPI(title="relay serve", openapi_url=None)
    router = APIRouter()

    def find(request: Request) -> StatelessAnswerer:
        return answerer

    add_dialects(router, find=find)
    for prefix in PREFIXES:
        app.include_router(router, prefix=prefix)
    add_common(app)
    app.add_middleware(ServedGuard, keys=keys, hosts=hosts)
    return app


class ServedGuard(AccessGuard):
    """Guard of a served run: with configured keys each request must have one of them."""

    def __init__(self, app: ASGIApp, *, keys: Keys, hosts: Collection[str] | None) -> None:
        super().__init__(app, hosts=hosts)
        self._keys = keys

    def is_open(self, scope: Scope) -> bool:
        return bool(scope["path"] == HEALTH)

    def find_owner(self, scope: Scope) -> str:
        # There is nothing that belongs to anybody: without keys all clients are one owner.
        if not self._keys.configured:
            return ""
        # Headers are bytes, which Starlette decodes so.
        owner = self._keys.find_owner(read_key(scope).encode("latin-1"))
        if owner is None:
            raise RefusedError(
                401, "Authorization: Bearer, or x-api-key: must be a key of the server's keys_file"
            )
        return owner

    def limit_bytes(self, scope: Scope) -> int:
        return BODY_BYTES

    def make_refusal(self, scope: Scope, refused: RefusedError) -> Response:
        return make_refusal_response(scope["path"], refused)
