"""The HTTP application of the Tinker API: the guard (auth.py), the paths, and errors as `{"detail":
text}`.
"""

from __future__ import annotations

import json
import logging
import reprlib
from collections.abc import Callable, Collection, Mapping
from functools import cache
from http import HTTPStatus
from typing import Any

import pydantic
from fastapi import APIRouter, FastAPI, Request, Security
from fastapi.exceptions import RequestValidationError
from fastapi.security import APIKeyHeader
from starlette.exceptions import HTTPException
from starlette.responses import Response
from tinker.types.try_again_response import TryAgainResponse

from rl.agents.endpoint.app import add_dialects, make_error_response
from rl.agents.types import RequestError
from rl.http.keys import Keys
from rl.tinker.auth import (
    ANTHROPIC_PREFIX,
    CHAT_PATHS,
    COMPATIBLE_PATHS,
    KEY_HEADER,
    OPENAI_PREFIX,
    TinkerGuard,
)
from rl.tinker.service.service import Service
from rl.tinker.types import TinkerError
from rl.tinker.wire.codec import PROTOBUF

log = logging.getLogger(__name__)

API_PREFIX = "/api/v1"
DOCUMENTED = (400, 401, 403, 404, 405, 408, 410, 413, 421, 422, 429, 500, 507)
"""Statuses in the OpenAPI description of every call."""
MAX_SHOWN_ERRORS = 3
BINARY = {"schema": {"type": "string", "format": "binary"}}

_key = APIKeyHeader(name=KEY_HEADER, auto_error=False)
"""The key's header in the OpenAPI description; the guard has checked it."""


class ErrorAnswer(pydantic.BaseModel):
    detail: str


PROTOBUF_BODY: dict[str, Any] = {
    "openapi_extra": {"requestBody": {"required": True, "content": {PROTOBUF: BINARY}}}
}
RESULT: dict[str, Any] = {
    "response_class": Response,
    "responses": {
        200: {
            "description": "The result; {error, category} for work that failed.",
            "content": {"application/json": {"schema": {"type": "object"}}, PROTOBUF: BINARY},
        },
        408: {
            "model": TryAgainResponse | ErrorAnswer,
            "description": (
                "No result yet (or, with `detail`, the body did not arrive in time): ask again."
            ),
        },
    },
}
EMPTY: dict[str, Any] = {"status_code": 204}


def _add_calls(router: APIRouter, service: Service) -> None:
    # FastAPI reads bodies, parts of paths and owners from the types of the service's methods.
    def add(
        method: str, path: str, call: Callable[..., Any], options: Mapping[str, Any] | None = None
    ) -> None:
        router.add_api_route(f"/{path}", call, methods=[method], **(options or {}))

    add("POST", "client/config", service.get_client_config)
    add("POST", "client/dynamic_config", service.get_dynamic_config)
    add("POST", "telemetry", service.discard_telemetry)
    add("GET", "get_server_capabilities", service.get_capabilities)

    sessions = service.sessions
    add("POST", "create_session", sessions.create_session)
    add("POST", "session_heartbeat", sessions.session_heartbeat)
    add("POST", "sessions/{session_id}/finish", sessions.finish, EMPTY)

    training = service.training
    add("POST", "create_model", training.create_model)
    add("POST", "get_info", training.get_info)
    add("POST", "forward_backward", training.post_forward_backward, PROTOBUF_BODY)
    add("POST", "optim_step", training.optim_step)
    add("POST", "save_weights", training.save_weights)
    add("POST", "save_weights_for_sampler", training.save_weights_for_sampler)
    add("POST", "load_weights", training.load_weights)

    sampling = service.sampling
    add("POST", "create_sampling_session", sampling.create_sampling_session)
    add("POST", "asample", sampling.asample)
    add("GET", "samplers/{sampler_id}", sampling.get_sampler)

    add("POST", "retrieve_future", service.retrieve_future, RESULT)
    add("POST", "cancel_future", service.cancel_future, EMPTY)

    runs, checkpoint = service.runs, "training_runs/{run_id}/checkpoints/{kind}/{name}"
    add("GET", "training_runs", runs.list_training_runs)
    add("GET", "training_runs/{run_id}", runs.get_training_run)
    add("GET", "training_runs/{run_id}/checkpoints", runs.list_checkpoints_of_run)
    add("GET", "checkpoints", runs.list_checkpoints)
    add("DELETE", checkpoint, runs.delete_checkpoint, EMPTY)
    add("PUT", f"{checkpoint}/ttl", runs.set_ttl, EMPTY)
    add("POST", "weights_info", runs.get_weights_info)


def make_app(service: Service, *, keys: Keys, hosts: Collection[str] | None) -> FastAPI:
    """Build the application around a service that the caller starts and closes; `hosts` are those
    of `AccessGuard`.
    """
    errors: dict[int | str, dict[str, Any]] = {
        status: {"model": ErrorAnswer, "description": HTTPStatus(status).phrase}
        for status in DOCUMENTED
    }
    # Without documentation pages, which would load scripts from elsewhere.
    app = FastAPI(title="Tinker API", version="1", openapi_url=None, responses=errors)
    app.add_exception_handler(TinkerError, _answer_tinker_error)
    app.add_exception_handler(RequestValidationError, _answer_validation_error)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(Exception, _answer_unexpected)
    app.add_middleware(TinkerGuard, keys=keys, hosts=hosts, limits=service.limits)
    app.add_api_route(f"{API_PREFIX}/healthz", _answer_health, methods=["GET"])
    router = APIRouter()
    _add_calls(router, service)
    app.include_router(router, prefix=API_PREFIX, dependencies=[Security(_key)])
    chats = APIRouter()
    add_dialects(chats, find=service.chats.find)
    for prefix in (OPENAI_PREFIX, ANTHROPIC_PREFIX):
        # Their APIs are described elsewhere.
        app.include_router(chats, prefix=prefix, include_in_schema=False)

    @cache
    def description() -> Response:
        return Response(json.dumps(app.openapi()), media_type="application/json")

    async def openapi() -> Response:
        """Return the description of all calls, which is rendered once: it needs no key."""
        return description()

    app.add_api_route("/openapi.json", openapi, include_in_schema=False)
    return app


async def _answer_health() -> dict[str, str]:
    return {"status": "ok"}


def _answer(status: int, detail: str, headers: Mapping[str, str] | None = None) -> Response:
    # The body is ASCII, whatever characters the request had.
    return Response(json.dumps({"detail": detail}), status, headers, "application/json")


async def _answer_tinker_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TinkerError)
    return _answer(error.status, str(error))


async def _answer_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return _answer(422, "; ".join(_describe(item) for item in error.errors()[:MAX_SHOWN_ERRORS]))


def _describe(item: Mapping[str, Any]) -> str:
    """Return a text such as "body.num_samples: Input should be a valid integer, not 'x'"."""
    # The value may have megabytes, and a place the names of a hostile body.
    place = ".".join(str(part)[:80] for part in item["loc"])
    # reprlib, which looks at the first entries only.
    value = (
        ""
        if item["type"] in ("missing", "json_invalid")
        else f", not {reprlib.repr(item.get('input')):.80}"
    )
    return f"{place}: {item['msg']}{value}"


async def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    if path.startswith(CHAT_PATHS):
        text = f"{request.method} {path:.200}: this server does not have this path"
        return make_error_response(path, RequestError(text, status=error.status_code))
    if path.startswith(COMPATIBLE_PATHS):
        return _answer(
            404,
            f"{request.method} {path:.200}: this server does not have this path; the APIs of "
            f"OpenAI's clients are under {OPENAI_PREFIX}/v1, those of Anthropic's under "
            f"{ANTHROPIC_PREFIX}",
        )
    if error.status_code == 404:  # no route; missing objects are NotFoundErrors
        return _answer(400, f"{request.method} {path:.200}: this server does not support this call")
    return _answer(error.status_code, str(error.detail), error.headers)


async def _answer_unexpected(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return _answer(500, "an error in the server, which has logged it")
