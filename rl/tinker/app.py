"""The HTTP application of the Tinker API: the guard (auth.py), the routes, and errors as statuses."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated

from fastapi import FastAPI, Security
from fastapi.security import APIKeyHeader

from rl.tinker import http_errors
from rl.tinker.auth import KEY_HEADER, Guard, Keys
from rl.tinker.routes import Context, router

PREFIX = "/api/v1"
_key = APIKeyHeader(name=KEY_HEADER, auto_error=False)


def _described(key: Annotated[str | None, Security(_key)]) -> None:
    """Put the key's header into the OpenAPI description; the guard has checked it."""


async def _health() -> dict[str, str]:
    return {"status": "ok"}


def make_app(context: Context, *, keys: Keys, hosts: Collection[str] | None) -> FastAPI:
    """Build the application around a service that the caller starts and closes; `hosts` are those of `Guard`."""
    # Without documentation pages, which would load scripts from elsewhere.
    app = FastAPI(
        title="Tinker API", version="1", docs_url=None, redoc_url=None, responses=http_errors.documented()
    )
    app.state.context = context
    http_errors.install(app)
    app.add_middleware(Guard, keys=keys, hosts=hosts, limits=context.limits)
    app.add_api_route(f"{PREFIX}/healthz", _health, methods=["GET"])
    app.include_router(router, prefix=PREFIX, dependencies=[Security(_described)])
    return app
