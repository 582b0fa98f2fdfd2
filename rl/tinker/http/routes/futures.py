"""Results of what was submitted, waited for in long polls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from rl.tinker.http import answers, messages, results
from rl.tinker.http.codec import MEDIA_TYPE
from rl.tinker.http.context import Context, ContextOf, Owner
from rl.tinker.service.responses import Failure
from rl.tinker.service.responses import Response as Result

router = APIRouter(tags=["results"])


@router.post(
    "/retrieve_future",
    response_class=Response,
    responses={
        200: {
            "description": "The result; of work that failed, {error, category}.",
            "content": {
                "application/json": {"schema": {"type": "object"}},
                MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}},
            },
        },
        408: {
            "model": answers.TryAgain | answers.ErrorAnswer,
            "description": "No result yet (or, with `detail`, the body did not arrive in time): ask again.",
        },
    },
)
async def retrieve_future(
    request: Request, body: messages.RetrieveFuture, context: ContextOf, owner: Owner
) -> Response:
    """Protobuf if the client accepts it and the result has such a form, else JSON."""
    waiting = context.service.retrieve(body.request_id, owner=owner, wait_s=context.limits.poll_s)
    result = await _unless_gone(waiting, request, context)
    if result is None:
        again = answers.TryAgain(request_id=body.request_id, queue_state_reason="waiting for its turn")
        return JSONResponse(again.model_dump(), 408)
    content, media_type = results.encode(result, accept=request.headers.get("accept", ""))
    if body.allow_metadata_only and len(content) > context.limits.inline_bytes:
        content, media_type = json.dumps(results.metadata_only(len(content))).encode(), results.JSON
    return Response(content, media_type=media_type)


async def _unless_gone(
    waiting: Awaitable[Result | Failure | None], request: Request, context: Context
) -> Result | Failure | None:
    """What is waited for; None as soon as nobody is there to read it, or the server stops."""
    work = asyncio.ensure_future(waiting)
    others = [asyncio.ensure_future(_disconnected(request)), asyncio.ensure_future(context.stopping.wait())]
    try:
        await asyncio.wait((work, *others), return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        for task in (work, *others):
            task.cancel()
        await asyncio.gather(work, *others, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


@router.post("/cancel_future", status_code=204)
async def cancel_future(body: messages.CancelFuture, context: ContextOf, owner: Owner) -> None:
    """Only samples can be cancelled."""
    context.service.cancel(body.request_id, owner=owner)
