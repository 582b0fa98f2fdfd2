"""The Tinker API over HTTP, as the official client speaks it.

guard        key -> owner, host, size of the body
routes/      one function a call: messages.py or codec.py in, answers.py out, the service does the rest
errors       exceptions -> statuses and {"detail": text}
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated

from fastapi import APIRouter, FastAPI, Security
from fastapi.security import APIKeyHeader

from rl.tinker.http import answers, errors
from rl.tinker.http.auth import Keys
from rl.tinker.http.context import Context
from rl.tinker.http.guard import KEY_HEADER, Guard
from rl.tinker.http.routes import catalogue, futures, sampling, sessions, training, unsupported

PREFIX = "/api/v1"
_key = APIKeyHeader(name=KEY_HEADER, auto_error=False)


def _described(key: Annotated[str | None, Security(_key)]) -> None:
    """Puts the header into the OpenAPI description; the guard has checked it."""


async def _health() -> answers.Health:
    return answers.Health()


def make_app(context: Context, *, keys: Keys, hosts: Collection[str] | None) -> FastAPI:
    """The application around a service that somebody else starts and closes.

    Args:
        context: The service and the transport's limits.
        keys: Who may call.
        hosts: As `Guard`'s.
    """
    # No pages of documentation: they would load scripts from elsewhere.
    app = FastAPI(
        title="Tinker API", version="1", docs_url=None, redoc_url=None, responses=errors.documented()
    )
    app.state.context = context
    errors.install(app)
    app.add_middleware(
        Guard,
        keys=keys,
        hosts=hosts,
        max_body_bytes=context.limits.body_bytes,
        max_held_bytes=context.limits.held_bytes,
        body_timeout_s=context.limits.body_timeout_s,
    )
    app.add_api_route(f"{PREFIX}/healthz", _health, methods=["GET"], tags=["sessions"])
    parts: list[APIRouter] = [module.router for module in (sessions, training, sampling, futures, catalogue)]
    for part in [*parts, unsupported.make_router()]:
        app.include_router(part, prefix=PREFIX, dependencies=[Security(_described)])
    return app
