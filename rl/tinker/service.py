"""The Tinker service: sessions, ordered streams, results, samplers and storage, without a transport.

    routes.py  ->  Service  ->  TinkerBackend (this process or actors)

    sessions             sessions and their timeouts
    training             requests of models in training (streams.py orders them, datums.py translates them)
    sampling             sampling sessions and samples
    catalogue            answers about runs and checkpoints (storage.py)
    retrieve, cancel     results of requests (futures.py)

Everything runs in one event loop. A method that submits work is a plain function: it checks, queues and returns at
once. A mistake in the call raises a `TinkerError`; what goes wrong later is a `Failure` from `retrieve`. Every call
names its owner, and what belongs to another owner is not found.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rl.tinker.catalogue import Catalogue
from rl.tinker.futures import Futures, Result
from rl.tinker.limits import Limits
from rl.tinker.models import Models
from rl.tinker.parts import Parts, in_thread
from rl.tinker.sampling import SamplingSessions
from rl.tinker.sessions import Sessions
from rl.tinker.storage import Storage
from rl.tinker.training import Training
from rl.tinker.types import BaseModel, Failure

if TYPE_CHECKING:
    from rl.tinker.backend import TinkerBackend

log = logging.getLogger(__name__)

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
        self._parts = parts = Parts(
            backend=backend,
            storage=Storage(storage_folder, limits=limits, wall_time_s=wall_time_s),
            sessions=Sessions(limits=limits),
            futures=Futures(limits),
            limits=limits,
            wall_time_s=wall_time_s,
        )
        self.sessions = parts.sessions
        models = Models(parts)
        self.sampling = SamplingSessions(parts)
        self.training = Training(parts, models=models, sampling=self.sampling)
        self.catalogue = Catalogue(storage=parts.storage, models=models)
        self._sweeping: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    @property
    def base_models(self) -> Sequence[BaseModel]:
        return self._parts.backend.base_models

    async def start(self) -> None:
        """Start the backend, and remove checkpoints that have expired or are half written.

        Raises:
            ValueError: the storage folder cannot be written.
        """
        self._parts.storage.prepare()
        await self._parts.backend.start()
        self._sweeping = asyncio.get_running_loop().create_task(self._sweep(), name="sweep of the storage")

    async def close(self) -> None:
        """End all sessions, then the backend, within three times `limits.close_timeout_s`. Idempotent.

        Callers that wait for a result get a GoneError at once.
        """
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close(), name="close of the service")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        timeout_s = self.limits.close_timeout_s
        self._parts.futures.close()
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

    async def retrieve(self, request_id: str, *, owner: str, wait_s: float) -> Result | Failure | None:
        """Return a request's result, or None when there is none after `wait_s`. May be called repeatedly.

        Raises:
            NotFoundError: the id was never given to this owner.
            GoneError: the result is no longer kept, or belongs to an earlier process of the server.
        """
        self.sessions.touch(request_id, owner)
        return await self._parts.futures.retrieve(request_id, wait_s=wait_s)

    def cancel(self, request_id: str, *, owner: str) -> None:
        """Cancel a sample, whose result becomes a Failure. Without effect when it has ended.

        Raises:
            InvalidRequestError: the request is no sample.
            NotFoundError, GoneError: see `retrieve`.
        """
        self.sessions.touch(request_id, owner)
        self._parts.futures.cancel(request_id)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_EVERY_S)
            try:
                await in_thread(self._parts.storage.sweep)
            except OSError:
                log.exception("expired checkpoints could not be removed; the next sweep tries again")
