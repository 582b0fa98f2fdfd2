"""Errors as HTTP statuses with bodies `{"detail": text}`.

The official client repeats a call that got 408, 409, 429 or 5xx for five minutes, so these statuses are kept for
calls that may succeed later.
"""

from __future__ import annotations

import json
import logging
import reprlib
from collections.abc import Mapping
from typing import Any

import pydantic
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from rl.tinker.types import (
    BusyError,
    GoneError,
    InvalidRequestError,
    LimitReachedError,
    NotFoundError,
    TinkerError,
)

log = logging.getLogger(__name__)

STATUSES: dict[type[TinkerError], int] = {
    InvalidRequestError: 400,
    LimitReachedError: 403,
    NotFoundError: 404,
    GoneError: 410,
    BusyError: 429,
}
DESCRIPTIONS = {
    400: "The request is invalid, or of a kind that this server does not support.",
    401: "The API key is missing or unknown.",
    403: "A limit on what one key may hold is reached.",
    404: "The object does not exist, or belongs to another key.",
    405: "The path does not have this method.",
    408: "The body did not arrive in time.",
    410: "The object existed and has ended.",
    413: "The body is too large.",
    415: "The body has a type or encoding that this server does not read.",
    421: "The Host header names another server.",
    422: "The body or a parameter is malformed.",
    429: "Too much work is waiting; the same call may succeed later.",
    500: "The server failed.",
}
MAX_SHOWN_ERRORS = 3

_shown = reprlib.Repr()
_shown.maxlevel, _shown.maxdict, _shown.maxlist = 2, 4, 4
_shown.maxstring = _shown.maxother = 80


class ErrorAnswer(pydantic.BaseModel):
    detail: str
    """Explanation with the field, its value and valid values."""


class ErrorResponse(Response):
    """Response with an ASCII body, whatever characters the request had."""

    media_type = "application/json"

    def __init__(self, status: int, detail: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(json.dumps({"detail": detail}), status, headers)


def documented() -> dict[int | str, dict[str, Any]]:
    """Return the `responses` of every path for the OpenAPI description."""
    return {status: {"model": ErrorAnswer, "description": text} for status, text in DESCRIPTIONS.items()}


def install(app: FastAPI) -> None:
    app.add_exception_handler(TinkerError, _tinker_error)
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
    detail = "; ".join(texts)
    match error.body:
        case {"model_id": str(model_id), "seq_id": int(seq_id)}:
            # A malformed request about a model uses up its seq id, so that later ones do not wait for it.
            request.app.state.context.service.training.refuse(
                model_id, seq_id, InvalidRequestError(detail), owner=request.state.owner
            )
    return ErrorResponse(422, detail)


def _text(item: Mapping[str, Any]) -> str:
    """Return a text such as "body.num_samples: Input should be a valid integer, not 'x'"."""
    place = ".".join(_shown.repr(part).strip("'") for part in item["loc"])
    if item["type"] == "json_invalid":
        return f"{place}: no JSON: {item.get('ctx', {}).get('error', '')}"
    value = "" if item["type"] == "missing" else f", not {_shown.repr(item.get('input'))}"
    return f"{place}: {item['msg']}{value}"


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:  # no route; missing objects are NotFoundErrors
        return ErrorResponse(
            400, f"{request.method} {request.url.path}: this server does not support this call"
        )
    return ErrorResponse(error.status_code, str(error.detail), error.headers)


async def _unexpected(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return ErrorResponse(500, "an error in the server, which has logged it")
