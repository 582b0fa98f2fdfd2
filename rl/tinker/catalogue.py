"""Answers about training runs and checkpoints, from memory and disk together, in the official client's types."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TypeVar

from tinker import types as wire

from rl.tinker.ids import check_ttl, parse_path
from rl.tinker.models import Models
from rl.tinker.parts import in_thread
from rl.tinker.storage import RunRecord, Storage, Stored
from rl.tinker.types import ModelSettings, NotFoundError

T = TypeVar("T")


class Catalogue:
    """
    Raises:
        NotFoundError: from any method, for what is unknown or belongs to another owner.
        InvalidRequestError: from any method, for a text that is no id or path.
    """

    def __init__(self, *, storage: Storage, models: Models) -> None:
        self._storage = storage
        self._models = models

    async def training_runs(self, *, owner: str, offset: int, limit: int) -> wire.TrainingRunsResponse:
        """Return the runs in memory or with checkpoints, newest first."""
        records = {record.model_id: record for record in await in_thread(self._storage.runs, owner)}
        records |= {model.model_id: model.record() for model in self._models.of_owner(owner)}
        newest = sorted(records.values(), key=lambda record: record.created_s, reverse=True)
        some, cursor = page(newest, offset=offset, limit=limit)
        runs = [await self._describe(record, owner) for record in some]
        return wire.TrainingRunsResponse(training_runs=runs, cursor=cursor)

    async def training_run(self, run_id: str, *, owner: str) -> wire.TrainingRun:
        return await self._describe(await self._record(run_id, owner), owner)

    async def checkpoints(self, run_id: str, *, owner: str) -> wire.CheckpointsListResponse:
        """Return a run's checkpoints of both kinds, newest first."""
        record = await self._record(run_id, owner)
        found = await in_thread(self._storage.checkpoints, record.model_id)
        return wire.CheckpointsListResponse(checkpoints=[_checkpoint(stored) for stored in found])

    async def all_checkpoints(self, *, owner: str, offset: int, limit: int) -> wire.CheckpointsListResponse:
        """Return the checkpoints of all runs, newest first."""

        def found() -> list[Stored]:
            runs = self._storage.runs(owner)
            stored = [stored for run in runs for stored in self._storage.checkpoints(run.model_id)]
            return sorted(stored, key=lambda stored: stored.record.created_s, reverse=True)

        some, cursor = page(await in_thread(found), offset=offset, limit=limit)
        return wire.CheckpointsListResponse(
            checkpoints=[_checkpoint(stored) for stored in some], cursor=cursor
        )

    async def delete_checkpoint(self, path: str, *, owner: str) -> None:
        await in_thread(self._storage.delete, parse_path(path), owner)

    async def set_ttl(self, path: str, ttl_seconds: int | None, *, owner: str) -> None:
        """Let a checkpoint expire so many seconds from now, or never."""
        check_ttl(ttl_seconds)
        await in_thread(self._storage.set_expiry, parse_path(path), owner, ttl_seconds)

    async def weights_info(self, path: str, *, owner: str) -> wire.WeightsInfoResponse:
        """Return the settings that a model must have to load these weights."""
        stored = await in_thread(self._storage.find, parse_path(path), owner)
        settings = stored.record.settings
        lora = settings.lora
        return wire.WeightsInfoResponse(
            base_model=settings.base_model,
            is_lora=lora is not None,
            lora_rank=rank_of(settings),
            train_unembed=None if lora is None else lora.train_unembed,
            train_mlp=None if lora is None else lora.train_mlp,
            train_attn=None if lora is None else lora.train_attn,
        )

    async def _record(self, model_id: str, owner: str) -> RunRecord:
        if (model := self._models.find(model_id, owner)) is not None:
            return model.record()
        record = await in_thread(self._storage.run, model_id, owner)
        if record is None:
            raise NotFoundError(f"there is no training run {model_id!r:.100}")
        return record

    async def _describe(self, record: RunRecord, owner: str) -> wire.TrainingRun:
        found = await in_thread(self._storage.checkpoints, record.model_id)
        checkpoints = [_checkpoint(stored) for stored in found]
        model = self._models.find(record.model_id, owner)
        last = max((checkpoint.time for checkpoint in checkpoints), default=_time(record.created_s))

        def newest(kind: str) -> wire.Checkpoint | None:
            return next((one for one in checkpoints if one.checkpoint_type == kind), None)

        return wire.TrainingRun(
            training_run_id=record.model_id,
            base_model=record.settings.base_model,
            model_owner=owner,
            is_lora=record.settings.lora is not None,
            lora_rank=rank_of(record.settings),
            last_request_time=last if model is None else _time(model.requested_s),
            last_checkpoint=newest("training"),
            last_sampler_checkpoint=newest("sampler"),
            user_metadata=record.user_metadata,
        )


def _checkpoint(stored: Stored) -> wire.Checkpoint:
    record = stored.record
    return wire.Checkpoint(
        checkpoint_id=stored.path.checkpoint_id,
        checkpoint_type=stored.path.kind,
        time=_time(record.created_s),
        tinker_path=str(stored.path),
        size_bytes=record.size_bytes,
        user_metadata=record.user_metadata,
        expires_at=None if record.expires_s is None else _time(record.expires_s),
    )


def page(items: Sequence[T], *, offset: int, limit: int) -> tuple[Sequence[T], wire.Cursor]:
    cursor = wire.Cursor(offset=offset, limit=limit, total_count=len(items))
    return items[offset : offset + limit], cursor


def rank_of(settings: ModelSettings) -> int | None:
    return None if settings.lora is None else settings.lora.rank


def _time(wall_s: float) -> datetime:
    return datetime.fromtimestamp(wall_s, UTC)
