"""The calls of the official client, one function each, in its types."""

from __future__ import annotations

import json
from typing import Annotated, Any

import pydantic
from fastapi import APIRouter, Body, Depends, HTTPException, Path, Query, Request
from google.protobuf.message import Message
from starlette.responses import JSONResponse, Response
from tinker import types as wire
from tinker.types.session_status import ClientSessionFinishReason
from tinker.types.try_again_response import TryAgainResponse

from rl.tinker.auth import PROTOBUF, media_type
from rl.tinker.codec import parse_forward_backward
from rl.tinker.service import Service, page
from rl.tinker.types import HttpLimits


def _service(request: Request) -> Service:
    return request.app.state.service


def _http(request: Request) -> HttpLimits:
    return request.app.state.http


def _owner(request: Request) -> str:
    return request.state.owner


router = APIRouter()
ServiceOf = Annotated[Service, Depends(_service)]
Http = Annotated[HttpLimits, Depends(_http)]
Owner = Annotated[str, Depends(_owner)]
Id = Annotated[str, Path(min_length=1, max_length=512)]
Kind = Annotated[str, Path(min_length=1, max_length=64)]
"""Path segment `weights` or `sampler_weights`."""
Offset = Annotated[int, Query(ge=0, lt=2**31)]
Limit = Annotated[int, Query(ge=1, le=1000)]
JSON = "application/json"
BINARY = {"schema": {"type": "string", "format": "binary"}}


class ErrorAnswer(pydantic.BaseModel):
    detail: str
    """Explanation with the field, its value and valid values."""


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
async def client_config(body: wire.ClientConfigRequest, http: Http) -> wire.ClientConfigResponse:
    return wire.ClientConfigResponse(
        fwdbwd_max_chunk_len=http.chunk_data,
        fwdbwd_max_chunk_bytes_count=http.chunk_bytes,
    )


@router.post("/client/dynamic_config")
async def dynamic_config(body: wire.ClientConfigRequest) -> wire.ClientDynamicConfigResponse:
    return wire.ClientDynamicConfigResponse(sample_cancel_enabled=True)


@router.post("/telemetry")
async def telemetry(body: dict[str, Any]) -> dict[str, str]:
    """Discard the client's telemetry."""
    return {"status": "accepted"}


@router.get("/get_server_capabilities")
async def capabilities(service: ServiceOf) -> wire.GetServerCapabilitiesResponse:
    return wire.GetServerCapabilitiesResponse(
        supported_models=[
            wire.SupportedModel(
                model_name=base.name,
                max_context_length=base.max_context_length,
                trainable=True,
                sampleable=True,
            )
            for base in service.base_models
        ]
    )


# Sessions


@router.post("/create_session")
async def create_session(
    body: wire.CreateSessionRequest, service: ServiceOf, owner: Owner
) -> wire.CreateSessionResponse:
    session_id = service.sessions.create(
        owner=owner, user_metadata=body.user_metadata, display_name=body.display_name
    )
    return wire.CreateSessionResponse(session_id=session_id)


@router.post("/session_heartbeat")
async def heartbeat(
    body: wire.SessionHeartbeatRequest, service: ServiceOf, owner: Owner
) -> wire.SessionHeartbeatResponse:
    service.sessions.live(body.session_id, owner)
    return wire.SessionHeartbeatResponse()


@router.post("/sessions/{session_id}/finish", status_code=204)
async def finish(
    session_id: Id,
    reason: Annotated[ClientSessionFinishReason, Body()],
    service: ServiceOf,
    owner: Owner,
    detail: Annotated[str | None, Body()] = None,
) -> None:
    service.sessions.finish(session_id, owner=owner)


@router.get("/sessions")
async def sessions(
    service: ServiceOf, owner: Owner, limit: Limit = 20, offset: Offset = 0
) -> wire.ListSessionsResponse:
    some, _ = page(service.sessions.ids(owner=owner), offset=offset, limit=limit)
    return wire.ListSessionsResponse(sessions=list(some))


@router.get("/sessions/{session_id}")
async def session(session_id: Id, service: ServiceOf, owner: Owner) -> wire.GetSessionResponse:
    found = service.sessions.live(session_id, owner)
    return wire.GetSessionResponse(
        training_run_ids=found.model_ids,
        sampler_ids=found.sampling_session_ids,
        user_metadata=found.user_metadata,
        display_name=found.display_name,
    )


# Training


@router.post("/create_model")
async def create_model(body: wire.CreateModelRequest, service: ServiceOf, owner: Owner) -> Future:
    return _future(service.training.create_model(body, owner=owner))


@router.post("/get_info")
async def get_info(body: wire.GetInfoRequest, service: ServiceOf, owner: Owner) -> wire.GetInfoResponse:
    model = service.models.live(body.model_id, owner)
    lora = model.settings.lora
    return wire.GetInfoResponse(
        model_id=model.model_id,
        model_name=model.base.name,
        model_data=wire.ModelData(
            arch=model.base.architecture,
            model_name=model.base.name,
            tokenizer_id=model.base.tokenizer_folder,
        ),
        is_lora=lora is not None,
        lora_rank=None if lora is None else lora.rank,
    )


@router.post(
    "/forward_backward",
    openapi_extra={"requestBody": {"required": True, "content": {PROTOBUF: BINARY}}},
)
async def forward_backward(request: Request, service: ServiceOf, http: Http, owner: Owner) -> Future:
    """Take a ForwardBackwardRequest of the official client's protobuf messages."""
    if media_type(request.headers) != PROTOBUF:
        content_type = request.headers.get("content-type", "")
        raise HTTPException(415, f"Content-Type: {content_type!a}, must be {PROTOBUF}")
    message = parse_forward_backward(await request.body())
    most = http.values_per_request
    return _future(service.training.forward_backward(message, max_values=most, owner=owner))


@router.post("/optim_step")
async def optim_step(body: wire.OptimStepRequest, service: ServiceOf, owner: Owner) -> Future:
    return _future(service.training.optim_step(body, owner=owner))


@router.post("/save_weights")
async def save_weights(body: wire.SaveWeightsRequest, service: ServiceOf, owner: Owner) -> Future:
    return _future(service.training.save_weights(body, owner=owner))


@router.post("/save_weights_for_sampler")
async def save_weights_for_sampler(
    body: wire.SaveWeightsForSamplerRequest, service: ServiceOf, owner: Owner
) -> Future:
    return _future(service.training.save_weights_for_sampler(body, owner=owner))


@router.post("/load_weights")
async def load_weights(body: wire.LoadWeightsRequest, service: ServiceOf, owner: Owner) -> Future:
    return _future(service.training.load_weights(body, owner=owner))


@router.post("/unload_model")
async def unload_model(body: wire.UnloadModelRequest, service: ServiceOf, owner: Owner) -> Future:
    return _future(service.training.unload(body.model_id, owner=owner))


# Sampling


@router.post("/create_sampling_session")
async def create_sampling_session(
    body: wire.CreateSamplingSessionRequest, service: ServiceOf, owner: Owner
) -> wire.CreateSamplingSessionResponse:
    sampling_session_id = service.sampling.create(body, owner=owner)
    return wire.CreateSamplingSessionResponse(sampling_session_id=sampling_session_id)


@router.post("/asample")
async def asample(body: wire.SampleRequest, service: ServiceOf, owner: Owner) -> Future:
    request_id = service.sampling.sample(body, owner=owner)
    ids = [f"{request_id}:{i}" for i in range(body.num_samples)]
    return Future(request_id=request_id, sample_sequence_ids=ids)


@router.get("/samplers/{sampler_id}")
async def sampler(sampler_id: Id, service: ServiceOf, owner: Owner) -> wire.GetSamplerResponse:
    one = service.sampling.live(sampler_id, owner)
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
    body: wire.FutureRetrieveRequest, service: ServiceOf, http: Http, owner: Owner
) -> Response:
    """Wait for a result: protobuf if it has tensors, else JSON."""
    result = await service.retrieve(body.request_id, owner=owner, wait_s=http.poll_s)
    if result is None:
        again = TryAgainResponse(request_id=body.request_id, queue_state="active")
        return JSONResponse(again.model_dump() | {"queue_state_reason": "waiting for its turn"}, 408)
    if isinstance(result, Message):
        return Response(result.SerializeToString(), media_type=PROTOBUF)
    # Python's JSON has NaN, as the official client reads it: null would not be a number.
    return Response(json.dumps(result.model_dump()), media_type=JSON)


@router.post("/cancel_future", status_code=204)
async def cancel_future(
    request_id: Annotated[str, Body(embed=True)], service: ServiceOf, owner: Owner
) -> None:
    """Cancel a sample; training cannot be cancelled."""
    service.cancel(request_id, owner=owner)


# Training runs and checkpoints


@router.get("/training_runs")
async def training_runs(
    service: ServiceOf, owner: Owner, limit: Limit = 20, offset: Offset = 0
) -> wire.TrainingRunsResponse:
    return await service.training_runs(owner=owner, offset=offset, limit=limit)


@router.get("/training_runs/{run_id}")
async def training_run(run_id: Id, service: ServiceOf, owner: Owner) -> wire.TrainingRun:
    return await service.training_run(run_id, owner=owner)


@router.get("/training_runs/{run_id}/checkpoints")
async def checkpoints_of_run(run_id: Id, service: ServiceOf, owner: Owner) -> wire.CheckpointsListResponse:
    return await service.checkpoints(run_id, owner=owner)


@router.get("/checkpoints")
async def checkpoints(
    service: ServiceOf, owner: Owner, limit: Limit = 100, offset: Offset = 0
) -> wire.CheckpointsListResponse:
    return await service.all_checkpoints(owner=owner, offset=offset, limit=limit)


@router.delete("/training_runs/{run_id}/checkpoints/{kind}/{name}", status_code=204)
async def delete_checkpoint(run_id: Id, kind: Kind, name: Id, service: ServiceOf, owner: Owner) -> None:
    await service.delete_checkpoint(f"tinker://{run_id}/{kind}/{name}", owner=owner)


@router.put("/training_runs/{run_id}/checkpoints/{kind}/{name}/ttl", status_code=204)
async def set_ttl(run_id: Id, kind: Kind, name: Id, body: Ttl, service: ServiceOf, owner: Owner) -> None:
    path = f"tinker://{run_id}/{kind}/{name}"
    await service.set_ttl(path, body.ttl_seconds, owner=owner)


@router.post("/weights_info")
async def weights_info(
    tinker_path: Annotated[str, Body(embed=True)], service: ServiceOf, owner: Owner
) -> wire.WeightsInfoResponse:
    return await service.weights_info(tinker_path, owner=owner)
