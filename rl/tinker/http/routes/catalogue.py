"""Training runs and checkpoints."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query

from rl.tinker.http import answers, messages
from rl.tinker.http.context import ContextOf, Owner
from rl.tinker.http.routes.sessions import Limit, Offset, Scope

router = APIRouter(tags=["runs and checkpoints"])
RunId = Annotated[str, Path(min_length=1, max_length=512)]
Kind = Annotated[str, Path(min_length=1, max_length=64)]
"""`weights` or `sampler_weights`."""
Name = Annotated[str, Path(min_length=1, max_length=512)]
Project = Annotated[str | None, Query(max_length=512)]
"""There are no projects here: it is without effect."""


def _path(run_id: str, kind: str, name: str) -> str:
    return f"tinker://{run_id}/{kind}/{name}"


@router.get("/training_runs")
async def training_runs(
    context: ContextOf,
    owner: Owner,
    limit: Limit = 20,
    offset: Offset = 0,
    access_scope: Scope = "owned",
    project_id: Project = None,
) -> answers.TrainingRunList:
    page = await context.service.catalogue.training_runs(owner=owner, offset=offset, limit=limit)
    return answers.TrainingRunList(
        training_runs=[answers.TrainingRun.of(run, owner=owner) for run in page.items],
        cursor=answers.cursor(page),
    )


@router.get("/training_runs/{run_id}")
async def training_run(
    run_id: RunId, context: ContextOf, owner: Owner, access_scope: Scope = "owned"
) -> answers.TrainingRun:
    run = await context.service.catalogue.training_run(run_id, owner=owner)
    return answers.TrainingRun.of(run, owner=owner)


@router.get("/training_runs/{run_id}/checkpoints")
async def checkpoints_of_run(run_id: RunId, context: ContextOf, owner: Owner) -> answers.CheckpointList:
    found = await context.service.catalogue.checkpoints(run_id, owner=owner)
    return answers.CheckpointList(checkpoints=[answers.Checkpoint.of(item) for item in found], cursor=None)


@router.get("/checkpoints")
async def checkpoints(
    context: ContextOf, owner: Owner, limit: Limit = 100, offset: Offset = 0
) -> answers.CheckpointList:
    page = await context.service.catalogue.all_checkpoints(owner=owner, offset=offset, limit=limit)
    return answers.CheckpointList(
        checkpoints=[answers.Checkpoint.of(item) for item in page.items], cursor=answers.cursor(page)
    )


@router.delete("/training_runs/{run_id}/checkpoints/{kind}/{name}", status_code=204)
async def delete_checkpoint(run_id: RunId, kind: Kind, name: Name, context: ContextOf, owner: Owner) -> None:
    await context.service.catalogue.delete_checkpoint(_path(run_id, kind, name), owner=owner)


@router.put("/training_runs/{run_id}/checkpoints/{kind}/{name}/ttl", status_code=204)
async def set_ttl(
    run_id: RunId, kind: Kind, name: Name, body: messages.SetTtl, context: ContextOf, owner: Owner
) -> None:
    await context.service.catalogue.set_ttl(_path(run_id, kind, name), body.ttl_seconds, owner=owner)


@router.post("/weights_info")
async def weights_info(body: messages.WeightsInfo, context: ContextOf, owner: Owner) -> answers.WeightsInfo:
    checkpoint = await context.service.catalogue.weights_info(body.tinker_path, owner=owner)
    return answers.WeightsInfo.of(checkpoint.settings)
