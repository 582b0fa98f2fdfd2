"""What can be asked about base models, training runs and checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from rl.tinker.backend import Backend
from rl.tinker.errors import NotFoundError
from rl.tinker.messages import BaseModel
from rl.tinker.service.background import in_thread
from rl.tinker.service.checks import check_ttl
from rl.tinker.service.model_work import run_record
from rl.tinker.service.models import Models
from rl.tinker.service.names import parse_path, shown
from rl.tinker.service.responses import Checkpoint, Page, TrainingRun
from rl.tinker.service.run_files import RunRecord
from rl.tinker.service.sessions import page
from rl.tinker.service.storage import Storage, Stored


class Catalogue:
    """Those that read the disk are awaited. They raise NotFoundError for what is unknown or another's, and
    InvalidRequestError for what is no id or path at all."""

    def __init__(self, *, backend: Backend, storage: Storage, models: Models) -> None:
        self._backend = backend
        self._storage = storage
        self._models = models

    def base_models(self) -> Sequence[BaseModel]:
        return self._backend.base_models

    async def training_runs(self, *, owner: str, offset: int = 0, limit: int = 20) -> Page[TrainingRun]:
        """In memory or with checkpoints, the newest first."""
        records = {record.model_id: record for record in await in_thread(self._storage.runs, owner)}
        records |= {model.model_id: run_record(model) for model in self._models.of_owner(owner)}
        newest = sorted(records.values(), key=lambda record: record.created_s, reverse=True)
        some = page(newest, offset=offset, limit=limit)
        runs = [await self._run(record, owner) for record in some.items]
        return Page(items=tuple(runs), offset=offset, limit=limit, total=some.total)

    async def training_run(self, training_run_id: str, *, owner: str) -> TrainingRun:
        return await self._run(await self._record(training_run_id, owner), owner)

    async def checkpoints(self, training_run_id: str, *, owner: str) -> tuple[Checkpoint, ...]:
        """Of both kinds, the newest first."""
        record = await self._record(training_run_id, owner)
        found = await in_thread(self._storage.checkpoints, record.model_id)
        return tuple(stored.described() for stored in found)

    async def all_checkpoints(self, *, owner: str, offset: int = 0, limit: int = 100) -> Page[Checkpoint]:
        """Of all runs, the newest first."""

        def found() -> list[Stored]:
            runs = self._storage.runs(owner)
            stored = [stored for run in runs for stored in self._storage.checkpoints(run.model_id)]
            return sorted(stored, key=lambda stored: stored.record.created_s, reverse=True)

        some = page(await in_thread(found), offset=offset, limit=limit)
        items = tuple(stored.described() for stored in some.items)
        return Page(items=items, offset=offset, limit=limit, total=some.total)

    async def delete_checkpoint(self, path: str, *, owner: str) -> None:
        await in_thread(self._storage.delete, parse_path(path), owner)

    async def set_ttl(self, path: str, ttl_seconds: int | None, *, owner: str) -> Checkpoint:
        """Seconds from now; None: it never expires."""
        check_ttl(ttl_seconds)
        stored = await in_thread(self._storage.set_expiry, parse_path(path), owner, ttl_seconds)
        return stored.described()

    async def weights_info(self, path: str, *, owner: str) -> Checkpoint:
        """Of weights of either kind; its settings are what a model to load them into must have."""
        return (await in_thread(self._storage.find, parse_path(path), owner)).described()

    async def _record(self, model_id: str, owner: str) -> RunRecord:
        if (model := self._models.find(model_id, owner)) is not None:
            return run_record(model)
        record = await in_thread(self._storage.run, model_id, owner)
        if record is None:
            raise NotFoundError(f"there is no training run {shown(model_id)}")
        return record

    async def _run(self, record: RunRecord, owner: str) -> TrainingRun:
        checkpoints = [
            stored.described() for stored in await in_thread(self._storage.checkpoints, record.model_id)
        ]
        model = self._models.find(record.model_id, owner)
        last = max((checkpoint.created for checkpoint in checkpoints), default=_time(record.created_s))
        return TrainingRun(
            training_run_id=record.model_id,
            session_id=record.session_id,
            settings=record.settings,
            created=_time(record.created_s),
            last_request=last if model is None else _time(model.requested_s),
            last_checkpoint=next((c for c in checkpoints if c.kind == "training"), None),
            last_sampler_checkpoint=next((c for c in checkpoints if c.kind == "sampler"), None),
            user_metadata=record.user_metadata,
        )


def _time(wall_s: float) -> datetime:
    return datetime.fromtimestamp(wall_s, UTC)
