"""Answers about training runs and checkpoints, from memory and disk together."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, TypeVar

import pydantic
from fastapi import Body, Path
from tinker import types as wire

from rl.tinker.futures import Parts
from rl.tinker.storage import RunRecord, Stored, parse_path
from rl.tinker.types import Id, Limit, NotFoundError, Offset, Owner, check_ttl

T = TypeVar("T")
Kind = Annotated[str, Path(min_length=1, max_length=64)]
"""Path segment `weights` or `sampler_weights`."""


class Ttl(pydantic.BaseModel):
    ttl_seconds: int | None
    """Seconds from now; None never expires."""


class Runs:
    """Calls about training runs and checkpoints.

    Raises:
        NotFoundError: from any call, for what is unknown or belongs to another owner.
    """

    def __init__(self, parts: Parts) -> None:
        self._storage = parts.storage
        self._sessions = parts.sessions

    async def training_runs(
        self, *, owner: Owner, limit: Limit = 20, offset: Offset = 0
    ) -> wire.TrainingRunsResponse:
        """Return the runs in memory or with checkpoints, newest first."""
        records = {record.model_id: record for record in self._storage.runs(owner)}
        records |= {i: model.record for i, model in self._sessions.models(owner).items()}
        newest = sorted(records.values(), key=lambda record: record.created_s, reverse=True)
        some, cursor = _page(newest, offset=offset, limit=limit)
        runs = [self._describe(record) for record in some]
        return wire.TrainingRunsResponse(training_runs=runs, cursor=cursor)

    async def training_run(self, run_id: Id, *, owner: Owner) -> wire.TrainingRun:
        return self._describe(self._record(run_id, owner))

    async def checkpoints_of_run(self, run_id: Id, *, owner: Owner) -> wire.CheckpointsListResponse:
        """Return a run's checkpoints of both kinds, newest first."""
        found = self._storage.checkpoints(self._record(run_id, owner).model_id)
        return wire.CheckpointsListResponse(checkpoints=[_checkpoint(stored) for stored in found])

    async def checkpoints(
        self, *, owner: Owner, limit: Limit = 100, offset: Offset = 0
    ) -> wire.CheckpointsListResponse:
        """Return the checkpoints of all runs, newest first."""
        newest = self._storage.checkpoints(*(run.model_id for run in self._storage.runs(owner)))
        some, cursor = _page(newest, offset=offset, limit=limit)
        return wire.CheckpointsListResponse(checkpoints=[_checkpoint(one) for one in some], cursor=cursor)

    async def delete_checkpoint(self, run_id: Id, kind: Kind, name: Id, *, owner: Owner) -> None:
        path = parse_path(f"tinker://{run_id}/{kind}/{name}")
        await self._storage.delete(path, owner)

    async def set_ttl(self, run_id: Id, kind: Kind, name: Id, body: Ttl, *, owner: Owner) -> None:
        """Let a checkpoint expire so many seconds from now, or never."""
        check_ttl(body.ttl_seconds)
        path = parse_path(f"tinker://{run_id}/{kind}/{name}")
        self._storage.set_expiry(path, owner, body.ttl_seconds)

    async def weights_info(
        self, tinker_path: Annotated[str, Body(embed=True)], *, owner: Owner
    ) -> wire.WeightsInfoResponse:
        """Return the settings that a model must have to load these weights."""
        stored = self._storage.find(parse_path(tinker_path), owner)
        settings = stored.record.settings
        lora = {} if settings.lora is None else settings.lora.model_dump(exclude={"rank", "seed"})
        return wire.WeightsInfoResponse(
            base_model=settings.base_model,
            is_lora=settings.lora is not None,
            lora_rank=None if settings.lora is None else settings.lora.rank,
            **lora,
        )

    def _record(self, model_id: str, owner: str) -> RunRecord:
        if (model := self._sessions.models(owner).get(model_id)) is not None:
            return model.record
        record = self._storage.run(model_id, owner)
        if record is None:
            raise NotFoundError(f"there is no training run {model_id!r:.100}")
        return record

    def _describe(self, record: RunRecord) -> wire.TrainingRun:
        found = self._storage.checkpoints(record.model_id)
        checkpoints = [_checkpoint(stored) for stored in found]
        newest = {one.checkpoint_type: one for one in reversed(checkpoints)}
        lora = record.settings.lora
        times_s = [record.created_s, *(stored.record.created_s for stored in found)]
        return wire.TrainingRun(
            training_run_id=record.model_id,
            base_model=record.settings.base_model,
            model_owner=record.owner_hash,
            is_lora=lora is not None,
            lora_rank=None if lora is None else lora.rank,
            last_request_time=_time(max(times_s)),
            last_checkpoint=newest.get("training"),
            last_sampler_checkpoint=newest.get("sampler"),
            user_metadata=record.user_metadata,
        )


def _checkpoint(stored: Stored) -> wire.Checkpoint:
    record, path = stored.record, stored.path
    return wire.Checkpoint(
        checkpoint_id=path.checkpoint_id,
        checkpoint_type=path.checkpoint_type,
        time=_time(record.created_s),
        tinker_path=path.tinker_path,
        size_bytes=record.size_bytes,
        user_metadata=record.user_metadata,
        expires_at=None if record.expires_s is None else _time(record.expires_s),
    )


def _page(items: Sequence[T], *, offset: int, limit: int) -> tuple[Sequence[T], wire.Cursor]:
    cursor = wire.Cursor(offset=offset, limit=limit, total_count=len(items))
    return items[offset : offset + limit], cursor


def _time(wall_s: float) -> datetime:
    return datetime.fromtimestamp(wall_s, UTC)
