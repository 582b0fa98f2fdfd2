"""Calls of the official client that this server does not have: refused with what they are."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NoReturn

from fastapi import APIRouter

from rl.tinker.errors import InvalidRequestError

CALLS = {
    ("POST", "/copy_weights"): "copying weights",
    ("POST", "/create_custom_loss"): "running custom losses here; the client runs them itself",
    ("POST", "/save_weights_external"): "saving weights in other formats",
    (
        "GET",
        "/training_runs/{run_id}/checkpoints/external_weights/{name}/external_weights_urls",
    ): "saving weights in other formats",
    ("POST", "/training_runs/{run_id}/checkpoints/{kind}/{name}/publish"): "publishing checkpoints",
    ("DELETE", "/training_runs/{run_id}/checkpoints/{kind}/{name}/publish"): "publishing checkpoints",
    ("POST", "/retrieve_futures"): "waiting for several results at once; retrieve_future",
    ("POST", "/join_sampling_session"): "giving numbers to copies of a sampling client",
    ("POST", "/auth/token"): "tokens in place of API keys",
    ("GET", "/auth/apikey/me"): "asking about API keys",
    ("DELETE", "/auth/apikey/me"): "deleting API keys",
    ("GET", "/audit"): "an audit log",
    ("GET", "/billing/usage/events"): "billing",
    ("GET", "/billing/usage/checkpoints/current"): "billing",
    ("POST", "/sessions/search"): "searching sessions; list them",
    ("PUT", "/sessions/{session_id}/project"): "projects",
    ("GET", "/sessions/{session_id}/trace_export"): "exporting traces",
}
"""Method and path -> what it would be."""


def _refusal(method: str, path: str, what: str) -> Callable[[], Awaitable[NoReturn]]:
    async def refuse() -> NoReturn:
        raise InvalidRequestError(f"{method} {path}: this server does not support {what}")

    return refuse


def make_router() -> APIRouter:
    router = APIRouter(tags=["not supported"])
    for (method, path), what in CALLS.items():
        router.add_api_route(
            path,
            _refusal(method, path, what),
            methods=[method],
            summary=f"Not supported: {what}.",
            status_code=400,
            response_model=None,
        )
    return router
