"""The Tinker service: sessions, ordered streams, results, samplers and storage.

    app.py  ->  Service  ->  TinkerBackend (this process or actors)

    sessions     sessions and their timeouts
    training     requests about models in training (datums.py translates them), each model's in order (models.py)
    sampling     sampling sessions and samples
    runs         training runs and checkpoints, in memory and on the disk (storage.py)
    futures      requests and their results

Everything runs in one event loop. The calls of the official client are methods, in its types; app.py gives them
their paths. A call that submits work checks it, queues it and returns at once. A mistake in the call raises a
`TinkerError`; what goes wrong later is a `RequestFailedResponse` from `retrieve_future`. Every call names its owner,
and what belongs to another owner is not found.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Body
from google.protobuf.message import Message
from starlette.responses import JSONResponse, Response
from tinker import types as wire
from tinker.types.try_again_response import TryAgainResponse

from rl.tinker.codec import PROTOBUF
from rl.tinker.futures import Futures, Parts, Result
from rl.tinker.runs import Runs
from rl.tinker.sampling import SamplingSessions
from rl.tinker.sessions import Sessions
from rl.tinker.storage import Storage
from rl.tinker.training import TrainingCalls
from rl.tinker.types import HttpLimits, Limits, Owner

if TYPE_CHECKING:
    from rl.tinker.backend import TinkerBackend

log = logging.getLogger(__name__)


class Service:
    """`start`, and every call after it, belong to one event loop."""

    def __init__(
        self,
        *,
        backend: TinkerBackend,
        storage_folder: str | Path,
        limits: Limits | None = None,
        http: HttpLimits | None = None,
        wall_time_s: Callable[[], float] = time.time,
    ) -> None:
        limits = limits or Limits()
        self._parts = parts = Parts(
            backend=backend,
            storage=Storage(storage_folder, wall_time_s=wall_time_s),
            sessions=Sessions(limits=limits),
            futures=Futures(limits),
            limits=limits,
            http=http or HttpLimits(),
            wall_time_s=wall_time_s,
        )
        self.http = parts.http
        self.sessions = parts.sessions
        self.sampling = SamplingSessions(parts)
        self.training = TrainingCalls(parts, sampling=self.sampling)
        self.runs = Runs(parts)

    async def start(self) -> None:
        """Start the backend, and remove checkpoints that have expired or are half written.

        Raises:
            ValueError: the storage folder cannot be made.
        """
        await self._parts.storage.prepare()
        await self._parts.backend.start()

    def stop_waiting(self) -> None:
        """Give callers that wait for a result a GoneError at once, and accept no more requests. Idempotent."""
        self._parts.futures.close()

    async def close(self) -> None:
        """End all sessions, then the backend, within three times `limits.close_timeout_s`. Idempotent."""
        timeout_s = self._parts.limits.close_timeout_s
        self.stop_waiting()
        self.sessions.close()
        await self._parts.background.close(timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                await self._parts.backend.close()
        except TimeoutError:
            log.error("the backend did not close within %g s", timeout_s)

    # Calls about the server

    async def client_config(self, body: wire.ClientConfigRequest) -> wire.ClientConfigResponse:
        return wire.ClientConfigResponse(
            fwdbwd_max_chunk_len=self.http.chunk_data,
            fwdbwd_max_chunk_bytes_count=self.http.chunk_bytes,
        )

    async def dynamic_config(self, body: wire.ClientConfigRequest) -> wire.ClientDynamicConfigResponse:
        return wire.ClientDynamicConfigResponse(sample_cancel_enabled=True)

    async def telemetry(self, body: dict[str, Any]) -> dict[str, str]:
        """Discard the client's telemetry."""
        return {"status": "accepted"}

    async def capabilities(self) -> wire.GetServerCapabilitiesResponse:
        base = self._parts.backend.base_model
        model = wire.SupportedModel(
            model_name=base.name, max_context_length=base.max_context_length, trainable=True, sampleable=True
        )
        return wire.GetServerCapabilitiesResponse(supported_models=[model])

    # Calls about results

    async def retrieve(self, request_id: str, *, owner: str, wait_s: float) -> Result | None:
        """Return a request's result, or None when there is none after `wait_s`. May be called repeatedly.

        Raises:
            NotFoundError: the id was never given to this owner.
            GoneError: the result is no longer kept, or belongs to an earlier process of the server.
        """
        self.sessions.touch(request_id, owner)
        return await self._parts.futures.retrieve(request_id, wait_s=wait_s)

    async def retrieve_future(self, body: wire.FutureRetrieveRequest, *, owner: Owner) -> Response:
        """Wait for a result: protobuf if it has tensors, else JSON."""
        result = await self.retrieve(body.request_id, owner=owner, wait_s=self.http.poll_s)
        if result is None:
            again = TryAgainResponse(request_id=body.request_id, queue_state="active")
            return JSONResponse(again.model_dump() | {"queue_state_reason": "waiting for its turn"}, 408)
        if isinstance(result, Message):
            return Response(result.SerializeToString(), media_type=PROTOBUF)
        # Python's JSON has NaN, as the official client reads it: null would not be a number.
        return Response(json.dumps(result.model_dump()), media_type="application/json")

    async def cancel_future(self, request_id: Annotated[str, Body(embed=True)], *, owner: Owner) -> None:
        """Cancel a sample, whose result becomes a failure; training cannot be cancelled.

        Without effect when it has ended.
        """
        self.sessions.touch(request_id, owner)
        self._parts.futures.cancel(request_id)
