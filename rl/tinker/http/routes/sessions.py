"""What the client shall do, and sessions."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query

from rl.tinker.http import answers, messages
from rl.tinker.http.context import ContextOf, Owner

router = APIRouter(tags=["sessions"])
SessionId = Annotated[str, Path(min_length=1, max_length=512)]
Offset = Annotated[int, Query(ge=0, lt=2**31)]
Limit = Annotated[int, Query(ge=1, le=1000)]
Scope = Annotated[str, Query(max_length=64)]
"""Whose: here it is always the caller's own."""


@router.post("/client/config")
async def client_config(body: messages.ClientConfigRequest, context: ContextOf) -> answers.ClientConfig:
    return answers.ClientConfig(
        fwdbwd_max_chunk_len=context.limits.chunk_data,
        fwdbwd_max_chunk_bytes_count=context.limits.chunk_bytes,
    )


@router.post("/client/dynamic_config")
async def dynamic_config(body: messages.ClientConfigRequest) -> answers.DynamicConfig:
    return answers.DynamicConfig()


@router.post("/telemetry")
async def telemetry(body: messages.TelemetryReport) -> answers.Accepted:
    """Nothing of it is kept."""
    return answers.Accepted()


@router.get("/get_server_capabilities")
async def capabilities(context: ContextOf) -> answers.Capabilities:
    return answers.Capabilities(
        supported_models=[
            answers.SupportedModel(
                model_name=base.name,
                max_context_length=base.max_context_length,
                trainable=base.trainable,
                sampleable=base.sampleable,
            )
            for base in context.service.catalogue.base_models()
        ]
    )


@router.post("/create_session")
async def create_session(
    body: messages.CreateSession, context: ContextOf, owner: Owner
) -> answers.CreatedSession:
    session_id = context.service.sessions.create(
        owner=owner, tags=body.tags, user_metadata=body.user_metadata, display_name=body.display_name
    )
    return answers.CreatedSession(session_id=session_id)


@router.post("/session_heartbeat")
async def heartbeat(body: messages.SessionHeartbeat, context: ContextOf, owner: Owner) -> answers.Heard:
    context.service.sessions.heartbeat(body.session_id, owner=owner)
    return answers.Heard()


@router.post("/sessions/{session_id}/finish", status_code=204)
async def finish(
    session_id: SessionId, body: messages.FinishSession, context: ContextOf, owner: Owner
) -> None:
    context.service.sessions.finish(session_id, owner=owner)


@router.get("/sessions")
async def sessions(
    context: ContextOf, owner: Owner, limit: Limit = 20, offset: Offset = 0, access_scope: Scope = "owned"
) -> answers.SessionList:
    page = context.service.sessions.list(owner=owner, offset=offset, limit=limit)
    return answers.SessionList(sessions=list(page.items))


@router.get("/sessions/{session_id}")
async def session(
    session_id: SessionId, context: ContextOf, owner: Owner, access_scope: Scope = "owned"
) -> answers.Session:
    info = context.service.sessions.info(session_id, owner=owner)
    return answers.Session(
        training_run_ids=list(info.model_ids),
        sampler_ids=list(info.sampling_session_ids),
        user_metadata=answers.metadata(info.user_metadata),
        display_name=info.display_name,
    )
