"""The Tinker service: sessions, ordered streams, results, samplers and storage, without a transport.

    routes.py  ->  Service  ->  TinkerBackend (this process or actors)

    sessions             sessions and their timeouts
    models               models in training, and the order of their requests
    training             requests of models in training (datums.py translates them)
    sampling             sampling sessions and samples
    retrieve, cancel     results of requests (futures.py)
    the rest             answers about training runs and checkpoints, from memory and disk (storage.py) together

Everything runs in one event loop. A method that submits work is a plain function: it checks, queues and returns at
once. A mistake in the call raises a `TinkerError`; what goes wrong later is a `RequestFailedResponse` from
`retrieve`. Every call names its owner, and what belongs to another owner is not found.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tinker import types as wire

from rl.tinker.futures import Futures, Parts, Result, in_thread
from rl.tinker.models import Models
from rl.tinker.sampling import SamplingSessions
from rl.tinker.sessions import Sessions
from rl.tinker.storage import RunRecord, Storage, Stored
from rl.tinker.training import Training
from rl.tinker.types import BaseModel, Limits, NotFoundError, check_ttl, parse_path

if TYPE_CHECKING:
    from rl.tinker.backend import TinkerBackend

log = logging.getLogger(__name__)

T = TypeVar("T")
SWEEP_EVERY_S = 300.0


class Service:
    """`start`, and every call after it, belong to one event loop."""

    def __init__(
        self,
        *,
        backend: TinkerBackend,
        storage_folder: str | Path,
        limits: Limits | None = None,
        wall_time_s: Callable[[], float] = time.time,
    ) -> None:
        self.limits = limits = limits or Limits()
        self._storage = Storage(storage_folder, limits=limits, wall_time_s=wall_time_s)
        self._parts = parts = Parts(
            backend=backend,
            storage=self._storage,
            sessions=Sessions(limits=limits),
            futures=Futures(limits),
            limits=limits,
            wall_time_s=wall_time_s,
        )
        self.sessions = parts.sessions
        self.models = Models(parts)
        self.sampling = SamplingSessions(parts)
        self.training = Training(parts, models=self.models, sampling=self.sampling)
        self._sweeping: asyncio.Task[None] | None = None

    @property
    def base_models(self) -> Sequence[BaseModel]:
        return self._parts.backend.base_models

    async def start(self) -> None:
        """Start the backend, and remove checkpoints that have expired or are half written.

        Raises:
            ValueError: the storage folder cannot be written.
        """
        self._storage.prepare()
        await self._parts.backend.start()
        self._sweeping = asyncio.get_running_loop().create_task(self._sweep(), name="sweep of the storage")

    def stop_waiting(self) -> None:
        """Give callers that wait for a result a GoneError at once, and accept no more requests. Idempotent."""
        self._parts.futures.close()

    async def close(self) -> None:
        """End all sessions, then the backend, within three times `limits.close_timeout_s`. Idempotent."""
        timeout_s = self.limits.close_timeout_s
        self.stop_waiting()
        self.sessions.close()
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.wait([self._sweeping], timeout=timeout_s)
        await self._parts.background.close(timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                await self._parts.backend.close()
        except TimeoutError:
            log.error("the backend did not close within %g s", timeout_s)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_EVERY_S)
            try:
                await in_thread(self._storage.sweep)
            except OSError:
                log.exception("expired checkpoints could not be removed; the next sweep tries again")

    # Results

    async def retrieve(self, request_id: str, *, owner: str, wait_s: float) -> Result | None:
        """Return a request's result, or None when there is none after `wait_s`. May be called repeatedly.

        Raises:
            NotFoundError: the id was never given to this owner.
            GoneError: the result is no longer kept, or belongs to an earlier process of the server.
        """
        self.sessions.touch(request_id, owner)
        return await self._parts.futures.retrieve(request_id, wait_s=wait_s)

    def cancel(self, request_id: str, *, owner: str) -> None:
        """Cancel a sample, whose result becomes a failure. Without effect when it has ended.

        Raises:
            InvalidRequestError: the request is no sample.
            NotFoundError, GoneError: see `retrieve`.
        """
        self.sessions.touch(request_id, owner)
        self._parts.futures.cancel(request_id)

    # Training runs and checkpoints: NotFoundError for what is unknown or belongs to another owner

    async def training_runs(self, *, owner: str, offset: int, limit: int) -> wire.TrainingRunsResponse:
        """Return the runs in memory or with checkpoints, newest first."""
        records = {record.model_id: record for record in await in_thread(self._storage.runs, owner)}
        records |= {model.model_id: model.record for model in self.models.of_owner(owner)}
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
        listed = [_checkpoint(stored) for stored in some]
        return wire.CheckpointsListResponse(checkpoints=listed, cursor=cursor)

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
        lora = {} if settings.lora is None else settings.lora.model_dump(exclude={"rank", "seed"})
        return wire.WeightsInfoResponse(
            base_model=settings.base_model,
            is_lora=settings.lora is not None,
            lora_rank=None if settings.lora is None else settings.lora.rank,
            **lora,
        )

    async def _record(self, model_id: str, owner: str) -> RunRecord:
        if (model := self.models.find(model_id, owner)) is not None:
            return model.record
        record = await in_thread(self._storage.run, model_id, owner)
        if record is None:
            raise NotFoundError(f"there is no training run {model_id!r:.100}")
        return record

    async def _describe(self, record: RunRecord, owner: str) -> wire.TrainingRun:
        found = await in_thread(self._storage.checkpoints, record.model_id)
        checkpoints = [_checkpoint(stored) for stored in found]
        newest = {one.checkpoint_type: one for one in reversed(checkpoints)}
        model = self.models.find(record.model_id, owner)
        last = max((checkpoint.time for checkpoint in checkpoints), default=_time(record.created_s))
        lora = record.settings.lora
        return wire.TrainingRun(
            training_run_id=record.model_id,
            base_model=record.settings.base_model,
            model_owner=owner,
            is_lora=lora is not None,
            lora_rank=None if lora is None else lora.rank,
            last_request_time=last if model is None else _time(model.requested_s),
            last_checkpoint=newest.get("training"),
            last_sampler_checkpoint=newest.get("sampler"),
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


def _time(wall_s: float) -> datetime:
    return datetime.fromtimestamp(wall_s, UTC)
