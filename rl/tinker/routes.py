"""The calls of the official client, one function each, in its types."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Annotated, Any

import pydantic
from fastapi import APIRouter, Body, Depends, HTTPException, Path, Query, Request
from starlette.responses import JSONResponse, Response
from tinker import types as wire
from tinker.types.session_status import ClientSessionFinishReason
from tinker.types.try_again_response import TryAgainResponse

from rl.tinker.auth import media_type
from rl.tinker.catalogue import page, rank_of
from rl.tinker.codec import JSON, PROTOBUF, encode_result, parse_forward_backward
from rl.tinker.futures import Result
from rl.tinker.http_errors import ErrorAnswer
from rl.tinker.limits import HttpLimits
from rl.tinker.service import Service
from rl.tinker.types import Failure


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """State that all routes share."""

    service: Service
    limits: HttpLimits
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the server ends, so that long polls return."""


def _context(request: Request) -> Context:
    return request.app.state.context


def _owner(request: Request) -> str:
    return request.state.owner


router = APIRouter()
ContextOf = Annotated[Context, Depends(_context)]
Owner = Annotated[str, Depends(_owner)]
Id = Annotated[str, Path(min_length=1, max_length=512)]
Kind = Annotated[str, Path(min_length=1, max_length=64)]
"""Path segment `weights` or `sampler_weights`."""
Offset = Annotated[int, Query(ge=0, lt=2**31)]
Limit = Annotated[int, Query(ge=1, le=1000)]
BINARY = {"schema": {"type": "string", "format": "binary"}}


class Future(pydantic.BaseModel):
    """An accepted request, whose result `retrieve_future` returns."""

    request_id: str
    model_id: str | None = None
    sample_sequence_ids: list[str] | None = None


class Ttl(pydantic.BaseModel):
    ttl_seconds: int | None
    """Seconds from now; None never expires."""


def _future(request_id: str) -> Future:
    return Future(request_id=request_id, model_id=request_id.rpartition(":")[0])


# The client's configuration


@router.post("/client/config")
async def client_config(body: wire.ClientConfigRequest, context: ContextOf) -> wire.ClientConfigResponse:
    return wire.ClientConfigResponse(
        fwdbwd_max_chunk_len=context.limits.chunk_data,
        fwdbwd_max_chunk_bytes_count=context.limits.chunk_bytes,
    )


@router.post("/client/dynamic_config")
async def dynamic_config(body: wire.ClientConfigRequest) -> wire.ClientDynamicConfigResponse:
    return wire.ClientDynamicConfigResponse(sample_cancel_enabled=True)


@router.post("/telemetry")
async def telemetry(body: dict[str, Any]) -> dict[str, str]:
    """Discard the client's telemetry."""
    return {"status": "accepted"}


@router.get("/get_server_capabilities")
async def capabilities(context: ContextOf) -> wire.GetServerCapabilitiesResponse:
    return wire.GetServerCapabilitiesResponse(
        supported_models=[
            wire.SupportedModel(
                model_name=base.name,
                max_context_length=base.max_context_length,
                trainable=True,
                sampleable=True,
            )
            for base in context.service.base_models
        ]
    )


# Sessions


@router.post("/create_session")
async def create_session(
    body: wire.CreateSessionRequest, context: ContextOf, owner: Owner
) -> wire.CreateSessionResponse:
    session_id = context.service.sessions.create(
        owner=owner, user_metadata=body.user_metadata, display_name=body.display_name
    )
    return wire.CreateSessionResponse(session_id=session_id)


@router.post("/session_heartbeat")
async def heartbeat(
    body: wire.SessionHeartbeatRequest, context: ContextOf, owner: Owner
) -> wire.SessionHeartbeatResponse:
    context.service.sessions.live(body.session_id, owner)
    return wire.SessionHeartbeatResponse()


@router.post("/sessions/{session_id}/finish", status_code=204)
async def finish(
    session_id: Id,
    reason: Annotated[ClientSessionFinishReason, Body()],
    context: ContextOf,
    owner: Owner,
    detail: Annotated[str | None, Body()] = None,
) -> None:
    context.service.sessions.finish(session_id, owner=owner)


@router.get("/sessions")
async def sessions(
    context: ContextOf, owner: Owner, limit: Limit = 20, offset: Offset = 0
) -> wire.ListSessionsResponse:
    some, _ = page(context.service.sessions.ids(owner=owner), offset=offset, limit=limit)
    return wire.ListSessionsResponse(sessions=list(some))


@router.get("/sessions/{session_id}")
async def session(session_id: Id, context: ContextOf, owner: Owner) -> wire.GetSessionResponse:
    found = context.service.sessions.live(session_id, owner)
    return wire.GetSessionResponse(
        training_run_ids=found.model_ids,
        sampler_ids=found.sampling_session_ids,
        user_metadata=found.user_metadata,
        display_name=found.display_name,
    )


# Training


@router.post("/create_model")
async def create_model(body: wire.CreateModelRequest, context: ContextOf, owner: Owner) -> Future:
    return _future(context.service.training.create_model(body, owner=owner))


@router.post("/get_info")
async def get_info(body: wire.GetInfoRequest, context: ContextOf, owner: Owner) -> wire.GetInfoResponse:
    model = context.service.training.info(body.model_id, owner=owner)
    return wire.GetInfoResponse(
        model_id=model.model_id,
        model_name=model.base.name,
        model_data=wire.ModelData(
            arch=model.base.architecture,
            model_name=model.base.name,
            tokenizer_id=model.base.tokenizer_folder,
        ),
        is_lora=model.settings.lora is not None,
        lora_rank=rank_of(model.settings),
    )


@router.post(
    "/forward_backward",
    openapi_extra={"requestBody": {"required": True, "content": {PROTOBUF: BINARY}}},
)
async def forward_backward(request: Request, context: ContextOf, owner: Owner) -> Future:
    """Take a ForwardBackwardRequest of the official client's protobuf messages."""
    if media_type(request.headers) != PROTOBUF:
        content_type = request.headers.get("content-type", "")
        raise HTTPException(415, f"Content-Type: {content_type!a}, must be {PROTOBUF}")
    message = parse_forward_backward(await request.body())
    training = context.service.training
    return _future(
        training.forward_backward(message, max_values=context.limits.values_per_request, owner=owner)
    )


@router.post("/optim_step")
async def optim_step(body: wire.OptimStepRequest, context: ContextOf, owner: Owner) -> Future:
    return _future(context.service.training.optim_step(body, owner=owner))


@router.post("/save_weights")
async def save_weights(body: wire.SaveWeightsRequest, context: ContextOf, owner: Owner) -> Future:
    return _future(context.service.training.save_weights(body, owner=owner))


@router.post("/save_weights_for_sampler")
async def save_weights_for_sampler(
    body: wire.SaveWeightsForSamplerRequest, context: ContextOf, owner: Owner
) -> Future:
    return _future(context.service.training.save_weights_for_sampler(body, owner=owner))


@router.post("/load_weights")
async def load_weights(body: wire.LoadWeightsRequest, context: ContextOf, owner: Owner) -> Future:
    return _future(context.service.training.load_weights(body, owner=owner))


@router.post("/unload_model")
async def unload_model(body: wire.UnloadModelRequest, context: ContextOf, owner: Owner) -> Future:
    return _future(context.service.training.unload(body.model_id, owner=owner))


# Sampling


@router.post("/create_sampling_session")
async def create_sampling_session(
    body: wire.CreateSamplingSessionRequest, context: ContextOf, owner: Owner
) -> wire.CreateSamplingSessionResponse:
    sampling_session_id = context.service.sampling.create(body, owner=owner)
    return wire.CreateSamplingSessionResponse(sampling_session_id=sampling_session_id)


@router.post("/asample")
async def asample(body: wire.SampleRequest, context: ContextOf, owner: Owner) -> Future:
    request_id = context.service.sampling.sample(body, owner=owner)
    ids = [f"{request_id}:{i}" for i in range(body.num_samples)]
    return Future(request_id=request_id, sample_sequence_ids=ids)


@router.get("/samplers/{sampler_id}")
async def sampler(sampler_id: Id, context: ContextOf, owner: Owner) -> wire.GetSamplerResponse:
    one = context.service.sampling.live(sampler_id, owner)
    return wire.GetSamplerResponse(
        sampler_id=one.sampling_session_id, base_model=one.base.name, model_path=one.model_path
    )


# Results


@router.post(
    "/retrieve_future",
    response_class=Response,
    responses={
        200: {
            "description": "The result; {error, category} for work that failed.",
            "content": {JSON: {"schema": {"type": "object"}}, PROTOBUF: BINARY},
        },
        408: {
            "model": TryAgainResponse | ErrorAnswer,
            "description": "No result yet (or, with `detail`, the body did not arrive in time): ask again.",
        },
    },
)
async def retrieve_future(
    request: Request, body: wire.FutureRetrieveRequest, context: ContextOf, owner: Owner
) -> Response:
    """Wait for a result: protobuf if it has tensors, else JSON."""
    waiting = context.service.retrieve(body.request_id, owner=owner, wait_s=context.limits.poll_s)
    result = await _unless_disconnected(waiting, request, context)
    if result is None:
        again = TryAgainResponse(request_id=body.request_id, queue_state="active")
        return JSONResponse(again.model_dump() | {"queue_state_reason": "waiting for its turn"}, 408)
    content, form = encode_result(result)
    return Response(content, media_type=form)


async def _unless_disconnected(
    waiting: Awaitable[Result | Failure | None], request: Request, context: Context
) -> Result | Failure | None:
    """Return the result, or None as soon as the client disconnects or the server stops."""
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
async def cancel_future(
    request_id: Annotated[str, Body(embed=True)], context: ContextOf, owner: Owner
) -> None:
    """Cancel a sample; training cannot be cancelled."""
    context.service.cancel(request_id, owner=owner)


# Training runs and checkpoints


@router.get("/training_runs")
async def training_runs(
    context: ContextOf, owner: Owner, limit: Limit = 20, offset: Offset = 0
) -> wire.TrainingRunsResponse:
    return await context.service.catalogue.training_runs(owner=owner, offset=offset, limit=limit)


@router.get("/training_runs/{run_id}")
async def training_run(run_id: Id, context: ContextOf, owner: Owner) -> wire.TrainingRun:
    return await context.service.catalogue.training_run(run_id, owner=owner)


@router.get("/training_runs/{run_id}/checkpoints")
async def checkpoints_of_run(run_id: Id, context: ContextOf, owner: Owner) -> wire.CheckpointsListResponse:
    return await context.service.catalogue.checkpoints(run_id, owner=owner)


@router.get("/checkpoints")
async def checkpoints(
    context: ContextOf, owner: Owner, limit: Limit = 100, offset: Offset = 0
) -> wire.CheckpointsListResponse:
    return await context.service.catalogue.all_checkpoints(owner=owner, offset=offset, limit=limit)


@router.delete("/training_runs/{run_id}/checkpoints/{kind}/{name}", status_code=204)
async def delete_checkpoint(run_id: Id, kind: Kind, name: Id, context: ContextOf, owner: Owner) -> None:
    await context.service.catalogue.delete_checkpoint(f"tinker://{run_id}/{kind}/{name}", owner=owner)


@router.put("/training_runs/{run_id}/checkpoints/{kind}/{name}/ttl", status_code=204)
async def set_ttl(run_id: Id, kind: Kind, name: Id, body: Ttl, context: ContextOf, owner: Owner) -> None:
    path = f"tinker://{run_id}/{kind}/{name}"
    await context.service.catalogue.set_ttl(path, body.ttl_seconds, owner=owner)


@router.post("/weights_info")
async def weights_info(
    tinker_path: Annotated[str, Body(embed=True)], context: ContextOf, owner: Owner
) -> wire.WeightsInfoResponse:
    return await context.service.catalogue.weights_info(tinker_path, owner=owner)
