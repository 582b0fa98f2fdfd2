"""The Tinker service: sessions, ordered streams, results, samplers and storage.

    app.py  ->  Service  ->  TinkerBackend (this process or actors)

Everything runs in one event loop. The calls of the official client are methods, in its types;
app.py gives them their paths. A call that submits work checks it, queues it and returns at once. A
mistake in the call raises a `TinkerError`; what goes wrong later is a `RequestFailedResponse` from
`retrieve_future`. Every call names its owner, and what belongs to another owner is not found.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import pydantic
from fastapi import Body
from fastapi import Path as PathSegment
from starlette.responses import JSONResponse, Response
from tinker import types as wire
from tinker.types.try_again_response import TryAgainResponse

from rl.http.open_files import limit_connections
from rl.ledger.config import LedgerConfig
from rl.rollouts.renderer import RendererConfig
from rl.tinker.backend import TinkerBackend
from rl.tinker.queues import FairLock
from rl.tinker.service.chat import Chats
from rl.tinker.service.futures import Background, Futures, Result
from rl.tinker.service.ledger import Ledgers, import_pyarrow
from rl.tinker.service.sampling import OpenWeights, SamplingSessions
from rl.tinker.service.sessions import Sessions
from rl.tinker.service.storage import RunRecord, Storage, Stored, parse_path
from rl.tinker.service.training import TrainingCalls
from rl.tinker.types import Id, Limit, Limits, NotFoundError, Offset, Owner, check_ttl

log = logging.getLogger(__name__)

T = TypeVar("T")
CHUNK_BYTES = 5_000_000
"""Bytes per request that the client cuts larger batches into."""
CLOSE_TIMEOUT_S = 10.0
"""Wait for work in progress when the service closes. The backend has twice as long afterwards: a
generator that is busy takes more than ten seconds to end."""
Kind = Annotated[str, PathSegment(min_length=1, max_length=64)]
"""Path segment `weights` or `sampler_weights`."""


class Service:
    """`start`, and every call after it, belong to one event loop."""

    def __init__(
        self,
        *,
        backend: TinkerBackend,
        storage_folder: str | Path,
        limits: Limits | None = None,
        renderer: RendererConfig | None = None,
        ledger: LedgerConfig | None = None,
        wall_time_s: Callable[[], float] = time.time,
    ) -> None:
        """
        Args:
            renderer: writes the conversations of other APIs' clients for the base model.
            ledger: what is recorded of the training; None: nothing.
        """
        self.limits = limits = limits or Limits()
        self._backend = backend
        self._storage = storage = Storage(storage_folder, wall_time_s=wall_time_s)
        self._futures = futures = Futures(limits)
        self._background = background = Background()
        self.sessions = sessions = Sessions(limits=limits)
        ledgers = Ledgers(ledger) if ledger is not None and ledger.enable else None
        self._has_ledgers = ledgers is not None
        self.sampling = SamplingSessions(
            backend=backend,
            storage=storage,
            sessions=sessions,
            futures=futures,
            background=background,
            weights=OpenWeights(
                backend=backend,
                sessions=sessions,
                background=background,
                limits=limits,
                sequences=None if ledgers is None else ledgers.sequences,
            ),
        )
        sessions.end_samplers = self.sampling.end_session  # Samplers end with their session.
        self.training = TrainingCalls(
            backend=backend,
            storage=storage,
            sessions=sessions,
            futures=futures,
            background=background,
            sampling=self.sampling,
            limits=limits,
            wall_time_s=wall_time_s,
            ledgers=ledgers,
        )
        self.chats = Chats(
            backend=backend,
            storage=storage,
            weights=self.sampling.weights,
            renderer=renderer or RendererConfig(),
        )
        self.runs = Runs(storage=storage, sessions=sessions, sampling=self.sampling)

    async def start(self) -> None:
        """Start the backend, and remove checkpoints that have expired or are incomplete.

        Raises ValueError if the storage folder cannot be made, or the backend refuses its config.
        """
        await self._storage.prepare()
        starting = [self._backend.start()]
        if self._has_ledgers:
            # Here, because the first optimizer step would wait for the import.
            starting.append(import_pyarrow())
        await asyncio.gather(*starting)

    @property
    def has_work(self) -> bool:
        """True while a request waits for its result."""
        return self._futures.has_work or self.chats.has_work

    def stop_waiting(self) -> None:
        """End the waits for results with a GoneError, and accept no more requests. Idempotent."""
        self._futures.close()
        self.chats.end_samples()

    async def close(self) -> None:
        """End all sessions, then the backend, within four times `CLOSE_TIMEOUT_S`.
        Idempotent.
        """
        # Polls first, then what they wait for; the backend last, because models and samplers end
        # by calls to it.
        self.stop_waiting()
        self.sessions.close()
        self.chats.close()
        await self._background.close(CLOSE_TIMEOUT_S)
        try:
            async with asyncio.timeout(2 * CLOSE_TIMEOUT_S):
                await self._backend.close()
        except TimeoutError:
            log.error("the backend did not close within %g s", 2 * CLOSE_TIMEOUT_S)

    # Calls about the server

    async def get_client_config(self, body: wire.ClientConfigRequest) -> wire.ClientConfigResponse:
        """Tell the client how many samples to wait for, and how to cut batches."""
        default = wire.ClientConfigResponse().sample_max_concurrent_requests
        return wire.ClientConfigResponse(
            # A client waits for each sample on a connection, and a key has half of them; some are
            # for other calls.
            sample_max_concurrent_requests=min(default, max(1, limit_connections() // 2 - 16)),
            fwdbwd_max_chunk_len=self.limits.chunk_data,
            fwdbwd_max_chunk_bytes_count=CHUNK_BYTES,
        )

    async def get_dynamic_config(
        self, body: wire.ClientConfigRequest
    ) -> wire.ClientDynamicConfigResponse:
        """Tell the client that samples can be cancelled."""
        return wire.ClientDynamicConfigResponse(sample_cancel_enabled=True)

    async def discard_telemetry(self, body: dict[str, Any]) -> dict[str, str]:
        """Discard the client's telemetry."""
        return {"status": "accepted"}

    async def get_capabilities(self) -> wire.GetServerCapabilitiesResponse:
        """Return the base model that the server offers, first by its own name."""
        base = self._backend.base_model
        models = []
        for name in (base.name, *base.aliases):
            model = wire.SupportedModel(
                model_name=name,
                max_context_length=base.max_context_length,
                trainable=True,
                sampleable=True,
            )
            models.append(model)
        return wire.GetServerCapabilitiesResponse(supported_models=models)

    # Calls about results

    async def retrieve(self, request_id: str, *, owner: str, wait_s: float) -> Result | None:
        """Return a request's result, or None when there is none after `wait_s`.

        Raises:
            NotFoundError: the id was never given to this owner.
            GoneError: the result is no longer kept, or belongs to an earlier process of the server.
        """
        self.sessions.keep_alive(request_id, owner)
        return await self._futures.retrieve(request_id, wait_s=wait_s)

    async def retrieve_future(self, body: wire.FutureRetrieveRequest, *, owner: Owner) -> Response:
        """Wait for a result: protobuf for the results of forward_backward and sample, else JSON."""
        result = await self.retrieve(body.request_id, owner=owner, wait_s=self.limits.poll_s)
        if result is None:
            # 408 with this body is the API's word for "not yet": the client asks again at once.
            again = TryAgainResponse(request_id=body.request_id, queue_state="active")
            return JSONResponse(
                again.model_dump() | {"queue_state_reason": "waiting for its turn"}, 408
            )
        return Response(result.body, media_type=result.media_type)

    async def cancel_future(
        self, request_id: Annotated[str, Body(embed=True)], *, owner: Owner
    ) -> None:
        """Cancel a sample, whose result becomes a failure unless it has ended."""
        self.sessions.keep_alive(request_id, owner)
        self._futures.cancel(request_id)


class Ttl(pydantic.BaseModel):
    ttl_seconds: int | None
    """Seconds from now; None never expires."""


class Runs:
    """Calls about training runs and checkpoints, in memory and on the disk together; lists are
    newest first.

    Lists read many files, in a thread and in turns of the owners.
    """

    def __init__(self, *, storage: Storage, sessions: Sessions, sampling: SamplingSessions) -> None:
        self._order = FairLock()
        self._storage = storage
        self._sessions = sessions
        self._sampling = sampling

    async def list_training_runs(
        self, *, owner: Owner, limit: Limit = 20, offset: Offset = 0
    ) -> wire.TrainingRunsResponse:
        """Return the runs in memory or with checkpoints."""
        streams = self._sessions.list_streams(owner)
        in_memory = {model_id: stream.record for model_id, stream in streams.items()}

        def read() -> wire.TrainingRunsResponse:
            records = {record.model_id: record for record in self._storage.list_runs(owner)}
            records |= in_memory
            newest = sorted(records.values(), key=lambda record: record.created_s, reverse=True)
            page, cursor = _take_page(newest, offset=offset, limit=limit)
            runs = [self._describe(record) for record in page]
            return wire.TrainingRunsResponse(training_runs=runs, cursor=cursor)

        return await self._run_in_turn(owner, read)

    async def get_training_run(self, run_id: Id, *, owner: Owner) -> wire.TrainingRun:
        """Return a run in memory or with checkpoints."""
        return await self._run_in_turn(owner, partial(self._describe, self._record(run_id, owner)))

    async def list_checkpoints_of_run(
        self, run_id: Id, *, owner: Owner
    ) -> wire.CheckpointsListResponse:
        read = partial(self._storage.list_checkpoints, self._record(run_id, owner).model_id)
        checkpoints = await self._run_in_turn(owner, read)
        return wire.CheckpointsListResponse(
            checkpoints=[_describe_checkpoint(stored) for stored in checkpoints]
        )

    async def list_checkpoints(
        self, *, owner: Owner, limit: Limit = 100, offset: Offset = 0
    ) -> wire.CheckpointsListResponse:
        """Return a page of an owner's checkpoints of all runs."""

        def read() -> list[Stored]:
            return self._storage.list_checkpoints(
                *(run.model_id for run in self._storage.list_runs(owner))
            )

        newest = await self._run_in_turn(owner, read)
        page, cursor = _take_page(newest, offset=offset, limit=limit)
        return wire.CheckpointsListResponse(
            checkpoints=[_describe_checkpoint(one) for one in page], cursor=cursor
        )

    async def delete_checkpoint(self, run_id: Id, kind: Kind, name: Id, *, owner: Owner) -> None:
        """Delete a checkpoint, also one that sessions have open."""
        path = parse_path(f"tinker://{run_id}/{kind}/{name}")
        self._sampling.close_checkpoint(self._storage.find(path, owner))
        await self._storage.delete(path, owner)

    async def set_ttl(self, run_id: Id, kind: Kind, name: Id, body: Ttl, *, owner: Owner) -> None:
        """Let a checkpoint expire later, sooner or never."""
        check_ttl(body.ttl_seconds)
        path = parse_path(f"tinker://{run_id}/{kind}/{name}")
        self._storage.set_expiry(path, owner, body.ttl_seconds)

    async def get_weights_info(
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

    async def _run_in_turn(self, owner: str, read: Callable[[], T]) -> T:
        async with self._order.lock_for(owner):
            return await asyncio.to_thread(read)

    def _record(self, model_id: str, owner: str) -> RunRecord:
        # Only the first checkpoint writes a run's record, so memory comes first.
        stream = self._sessions.list_streams(owner).get(model_id)
        if stream is not None:
            return stream.record
        record = self._storage.find_run(model_id, owner)
        if record is None:
            raise NotFoundError(f"there is no training run {model_id!r:.100}")
        return record

    def _describe(self, record: RunRecord) -> wire.TrainingRun:
        stored_checkpoints = self._storage.list_checkpoints(record.model_id)
        checkpoints = [_describe_checkpoint(stored) for stored in stored_checkpoints]
        # The list is newest first, and the last entry of a kind counts.
        newest = {one.checkpoint_type: one for one in reversed(checkpoints)}
        lora = record.settings.lora
        times_s = [record.created_s, *(stored.record.created_s for stored in stored_checkpoints)]
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


def _describe_checkpoint(stored: Stored) -> wire.Checkpoint:
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


def _take_page(items: Sequence[T], *, offset: int, limit: int) -> tuple[Sequence[T], wire.Cursor]:
    cursor = wire.Cursor(offset=offset, limit=limit, total_count=len(items))
    return items[offset : offset + limit], cursor


def _time(wall_s: float) -> datetime:
    return datetime.fromtimestamp(wall_s, UTC)
