"""What goes wrong, as statuses and bodies `{"detail": text}`.

The official client repeats a call that got 408, 409, 429 or 5xx for five minutes, so these are kept for what
may succeed later.
"""

from __future__ import annotations

import json
import logging
import reprlib
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from rl.tinker import errors
from rl.tinker.http.answers import ErrorAnswer

log = logging.getLogger(__name__)

STATUSES: dict[type[errors.TinkerError], int] = {
    errors.InvalidRequestError: 400,
    errors.LimitReachedError: 403,
    errors.NotFoundError: 404,
    errors.GoneError: 410,
    errors.BusyError: 429,
}
DESCRIPTIONS = {
    400: "The request is wrong, or of a kind that this server does not support.",
    401: "No API key, or an unknown one.",
    403: "A limit on what one key may hold is reached.",
    404: "There is no such thing, or it is another key's.",
    405: "The path has no such method.",
    408: "The body did not arrive in time.",
    410: "It was there and has ended.",
    413: "The body is too large.",
    415: "The body's type or encoding is not one that this server reads.",
    421: "The Host header is of another server.",
    422: "The body or a parameter is not of its form.",
    429: "Too much is waiting; the same call may succeed later.",
    500: "An error in the server.",
}
MAX_SHOWN_ERRORS = 3

_shown = reprlib.Repr()
_shown.maxlevel, _shown.maxdict, _shown.maxlist = 2, 4, 4
_shown.maxstring = _shown.maxother = 80


class ErrorResponse(Response):
    """The body is ASCII, whatever a request's texts contain."""

    media_type = "application/json"

    def __init__(self, status: int, detail: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(json.dumps({"detail": detail}), status, headers)


def documented() -> dict[int | str, dict[str, Any]]:
    """The `responses` of every path in the OpenAPI description."""
    return {status: {"model": ErrorAnswer, "description": text} for status, text in DESCRIPTIONS.items()}


def install(app: FastAPI) -> None:
    app.add_exception_handler(errors.TinkerError, _tinker_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected)


async def _tinker_error(request: Request, error: Exception) -> Response:
    status = next((status for kind, status in STATUSES.items() if isinstance(error, kind)), None)
    return ErrorResponse(status, str(error)) if status is not None else await _unexpected(request, error)


async def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    found = error.errors()
    texts = [_text(item) for item in found[:MAX_SHOWN_ERRORS]]
    if len(found) > MAX_SHOWN_ERRORS:
        texts.append(f"and {len(found) - MAX_SHOWN_ERRORS} more")
    return ErrorResponse(422, "; ".join(texts))


def _text(item: Mapping[str, Any]) -> str:
    """Such as "body.sampling_params.top_p: Input should be less than or equal to 1, not 3.0"."""
    place = ".".join(_shown.repr(part).strip("'") for part in item["loc"])
    if item["type"] == "json_invalid":
        return f"{place}: no JSON: {item.get('ctx', {}).get('error', '')}"
    value = "" if item["type"] == "missing" else f", not {_shown.repr(item.get('input'))}"
    return f"{place}: {item['msg']}{value}"


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return ErrorResponse(error.status_code, str(error.detail), error.headers)


async def _unexpected(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return ErrorResponse(500, "an error in the server, which has logged it")
