"""The HTTP application of the Tinker API: the guard (auth.py), the routes, and errors as `{"detail": text}`."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Security
from fastapi.exceptions import RequestValidationError
from fastapi.security import APIKeyHeader
from starlette.exceptions import HTTPException
from starlette.responses import Response

from rl.tinker.auth import KEY_HEADER, Guard, Keys
from rl.tinker.routes import ErrorAnswer, router
from rl.tinker.service import Service
from rl.tinker.types import HttpLimits, TinkerError

log = logging.getLogger(__name__)

PREFIX = "/api/v1"
DOCUMENTED = (400, 401, 403, 404, 405, 408, 410, 413, 415, 421, 422, 429, 500)
"""Statuses in the OpenAPI description of every call."""
MAX_SHOWN_ERRORS = 3

_key = APIKeyHeader(name=KEY_HEADER, auto_error=False)
"""The key's header in the OpenAPI description; the guard has checked it."""


def make_app(service: Service, *, http: HttpLimits, keys: Keys, hosts: Collection[str] | None) -> FastAPI:
    """Build the application around a service that the caller starts and closes; `hosts` are those of `Guard`."""
    errors: dict[int | str, dict[str, Any]] = {
        status: {"model": ErrorAnswer, "description": HTTPStatus(status).phrase} for status in DOCUMENTED
    }
    # Without documentation pages, which would load scripts from elsewhere.
    app = FastAPI(title="Tinker API", version="1", docs_url=None, redoc_url=None, responses=errors)
    app.state.service, app.state.http = service, http
    app.add_exception_handler(TinkerError, _tinker_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected)
    app.add_middleware(Guard, keys=keys, hosts=hosts, limits=http)
    app.add_api_route(f"{PREFIX}/healthz", _health, methods=["GET"])
    app.include_router(router, prefix=PREFIX, dependencies=[Security(_key)])
    return app


async def _health() -> dict[str, str]:
    return {"status": "ok"}


def _answer(status: int, detail: str, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response with an ASCII body, whatever characters the request had."""
    return Response(json.dumps({"detail": detail}), status, headers, "application/json")


async def _tinker_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TinkerError)
    return _answer(error.status, str(error))


async def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    found = error.errors()
    texts = [_text(item) for item in found[:MAX_SHOWN_ERRORS]]
    if len(found) > MAX_SHOWN_ERRORS:
        texts.append(f"and {len(found) - MAX_SHOWN_ERRORS} more")
    return _answer(422, "; ".join(texts))


def _text(item: Mapping[str, Any]) -> str:
    """Return a text such as "body.num_samples: Input should be a valid integer, not 'x'"."""
    place = ".".join(str(part)[:80] for part in item["loc"])
    value = "" if item["type"] in ("missing", "json_invalid") else f", not {item.get('input')!r:.80}"
    return f"{place}: {item['msg']}{value}"


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:  # no route; missing objects are NotFoundErrors
        return _answer(400, f"{request.method} {request.url.path}: this server does not support this call")
    return _answer(error.status_code, str(error.detail), error.headers)


async def _unexpected(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return _answer(500, "an error in the server, which has logged it")
