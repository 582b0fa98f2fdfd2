"""The Tinker service: sessions, models' ordered streams, results, samplers and storage. No transport.

    client.py, http/   ->   Service   ->   Backend (this process or actors)
    sessions                 who is there, and what ends with them
    training                 requests of models in training, in their order (streams.py)
    sampling                 sampling sessions (samplers.py holds what they sample from)
    catalogue                what can be asked about models, runs and checkpoints (storage.py)
    retrieve, cancel         results of what was submitted (futures.py)

Everything runs in one event loop. What submits work is a plain function: it checks, queues and returns at
once; what was wrong with the call is raised as one of errors.py, what goes wrong afterwards is a `Failure`
from `retrieve`. Every call names its owner, and what belongs to another owner is not found.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

from rl.tinker.backend import Backend
from rl.tinker.service.background import Background, in_thread
from rl.tinker.service.catalogue import Catalogue
from rl.tinker.service.futures import Futures
from rl.tinker.service.limits import Limits
from rl.tinker.service.model_work import ModelWork
from rl.tinker.service.models import Models
from rl.tinker.service.names import Ids
from rl.tinker.service.responses import Failure, Response
from rl.tinker.service.samplers import Samplers
from rl.tinker.service.sampling import SamplingSessions
from rl.tinker.service.sessions import Session, Sessions
from rl.tinker.service.storage import Storage
from rl.tinker.service.submission import Submission
from rl.tinker.service.training import Training

log = logging.getLogger(__name__)

LOCAL_OWNER = "local"
"""Of everything that is asked for in this process."""

_SWEEP_EVERY_S = 60.0


class Service:
    """Build it anywhere; `start`, and every call after it, in one event loop.

    `wall_time_s` is the time that checkpoints are stamped with and expire by.
    """

    def __init__(
        self,
        *,
        backend: Backend,
        storage_folder: str | Path,
        limits: Limits | None = None,
        wall_time_s: Callable[[], float] = time.time,
    ) -> None:
        self.limits = limits or Limits()
        self._backend = backend
        self._background = Background()
        self._futures = Futures(self.limits)
        self._storage = Storage(storage_folder, limits=self.limits, wall_time_s=wall_time_s)
        self.sessions = Sessions(ids=Ids(), limits=self.limits, wall_time_s=wall_time_s)
        self._build_rooms(wall_time_s)
        self.sessions.on_end.append(self._forget_results)
        self._sweeping: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    def _build_rooms(self, wall_time_s: Callable[[], float]) -> None:
        backend, storage, sessions = self._backend, self._storage, self.sessions
        futures, background = self._futures, self._background
        models = Models(
            backend=backend,
            storage=storage,
            sessions=sessions,
            futures=futures,
            background=background,
            limits=self.limits,
            wall_time_s=wall_time_s,
        )
        samplers = Samplers(backend=backend, storage=storage, background=background, limits=self.limits)
        self.sampling = SamplingSessions(
            backend=backend,
            storage=storage,
            samplers=samplers,
            sessions=sessions,
            futures=futures,
            background=background,
            limits=self.limits,
        )
        self.training = Training(
            backend=backend,
            storage=storage,
            models=models,
            submission=Submission(
                backend=backend,
                sessions=sessions,
                models=models,
                futures=futures,
                background=background,
                limits=self.limits,
            ),
            sampling=self.sampling,
            work=ModelWork(
                backend=backend,
                storage=storage,
                sessions=sessions,
                models=models,
                samplers=samplers,
                sampling=self.sampling,
            ),
            limits=self.limits,
        )
        self.catalogue = Catalogue(backend=backend, storage=storage, models=models)

    async def start(self) -> None:
        """Start the backend, and remove what has expired or was left half written.

        Raises:
            ValueError: the storage folder cannot be written.
        """
        self._storage.prepare()
        await self._backend.start()
        self._sweeping = asyncio.get_running_loop().create_task(self._sweep(), name="sweep of the storage")

    async def close(self) -> None:
        """End all sessions, then the backend, within thrice `limits.close_timeout_s`. Idempotent.

        Whoever waits for a result gets a GoneError at once.
        """
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close(), name="close of the service")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._futures.close()
        self.sessions.close()
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.wait([self._sweeping], timeout=self.limits.close_timeout_s)
        await self._background.close(self.limits.close_timeout_s)
        try:
            async with asyncio.timeout(self.limits.close_timeout_s):
                await self._backend.close()
        except TimeoutError:
            log.error("the backend did not close within %g s", self.limits.close_timeout_s)

    async def retrieve(self, request_id: str, *, owner: str, wait_s: float) -> Response | Failure | None:
        """The result; None when there is none yet after `wait_s`. May be called again, and several times at
        once.

        Raises:
            NotFoundError: it was never given to this owner.
            GoneError: it is no longer kept, or of an earlier process of the server.
        """
        self.sessions.hear(request_id, owner)
        return await self._futures.retrieve(request_id, wait_s=wait_s)

    def cancel(self, request_id: str, *, owner: str) -> None:
        """End a sample's work; its result becomes a Failure. Without effect when it has ended.

        Raises:
            InvalidRequestError: it is not a sample.
            NotFoundError, GoneError: as `retrieve`.
        """
        self.sessions.hear(request_id, owner)
        self._futures.cancel(request_id)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_EVERY_S)
            if not self._storage.has_expired():
                continue
            try:
                await in_thread(self._storage.sweep)
            except OSError:
                log.exception("what has expired could not be removed; it is tried again")

    def _forget_results(self, session: Session, why: str) -> None:
        self._futures.forget_session(session.session_id, session.owner)
