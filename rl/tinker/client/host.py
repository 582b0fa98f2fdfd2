"""The service and its backend, in the event loop of a thread of their own.

    caller's thread --submit--> event loop of the host's thread --> Service --> Backend
                    <--future--

The loop is unblocked by calls that arrive and by results; it never waits for a caller. So a caller may wait
anywhere, in the event loop of a notebook too. Clients of one backend share a host (`hosts.py`).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from rl.tinker import errors
from rl.tinker.backend import Backend
from rl.tinker.client.errors import failed, official_error
from rl.tinker.client.futures import THREAD_NAME, ClientFuture
from rl.tinker.client.progress import Progress
from rl.tinker.service.limits import Limits
from rl.tinker.service.responses import Failure
from rl.tinker.service.service import LOCAL_OWNER, Service
from rl.tinker.service.storage_lock import StorageLock
from rl.worker_thread import WorkerThread

T = TypeVar("T")
logger = logging.getLogger(__name__)

START_TIMEOUT_S = 1800.0
"""Of a backend, which may load a large model."""
CALL_TIMEOUT_S = 60.0
"""Of what only looks something up."""
CLOSE_TIMEOUT_S = 30.0
"""Of service and backend, which have their own time limits within it."""
UNLIMITED = 2**62
LIMITS = Limits(
    result_kept_s=1.0,
    waiting=UNLIMITED,
    waiting_per_model=UNLIMITED,
    waiting_bytes=UNLIMITED,
    data_per_request=UNLIMITED,
    tokens_per_request=UNLIMITED,
)
"""Answers do not get lost here, so results need not be kept for another try. What waits is in this process's
memory in any case, and batches are as large as those that the official client sends to a server in parts."""
RETRIEVE_S = 30.0


class Host:
    """What `Service` has done, done from any thread, with the official client's exceptions."""

    def __init__(self, *, backend: Backend, storage_folder: str | Path, progress: Progress) -> None:
        """Starts it, and waits for that.

        Raises:
            ValueError: what the service says of the folder, or the backend of its config.
        """
        self._storage = StorageLock(storage_folder)
        self.service = Service(backend=backend, storage_folder=storage_folder, limits=LIMITS)
        self.custom_losses = WorkerThread("tinker-custom-loss")
        self._progress = progress
        self._pending: set[Future[Any]] = set()
        self._closing = threading.Lock()
        self._closed = self._is_parents = False
        self._why_closed = "the ServiceClient is closed"
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._thread.start()
        self._ready.wait(CALL_TIMEOUT_S)
        try:
            self.submit(self.service.start(), title="starting the backend").result(START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    @property
    def is_closed(self) -> bool:
        return self._closed

    def submit(self, coroutine: Coroutine[Any, Any, T], *, title: str) -> ClientFuture[T]:
        """Run it in the host's loop; begun in the order of the calls.

        Raises:
            RuntimeError: the host is closed.
        """
        if self._closed:
            coroutine.close()
            raise RuntimeError(self._why_closed)
        future = asyncio.run_coroutine_threadsafe(self._official(coroutine, title), self._loop)
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        return ClientFuture(future)

    def call(self, function: Callable[[], T], *, title: str) -> T:
        """The result of a function in the host's loop, waited for."""

        async def run() -> T:
            return function()

        return self.submit(run(), title=title).result(CALL_TIMEOUT_S)

    def post(self, function: Callable[[], object]) -> None:
        """Run a function in the host's loop some time, unless that has ended. Its refusals are nobody's."""

        def run() -> None:
            try:
                function()
            except errors.TinkerError as error:
                logger.debug("%s", error)

        if self._is_parents:
            return
        try:
            self._loop.call_soon_threadsafe(run)
        except RuntimeError:
            logger.debug("the event loop of the clients has ended")

    def leave_to_parent(self) -> None:
        """In a process that was just forked: what runs here runs in the other one."""
        self._is_parents = self._closed = True
        self._why_closed = "the ServiceClient is of the process that this one was forked from: make one here"
        self._storage.close()  # or the folder would be locked as long as this process lives

    async def retrieve(self, request_id: str) -> Any:
        """In the host's loop: the result.

        Raises:
            tinker.RequestFailedError: there is none.
        """
        while True:
            result = await self.service.retrieve(request_id, owner=LOCAL_OWNER, wait_s=RETRIEVE_S)
            if isinstance(result, Failure):
                raise failed(result, request_id=request_id)
            if result is not None:
                return result

    async def _official(self, coroutine: Coroutine[Any, Any, T], title: str) -> T:
        with self._progress.show(title):
            try:
                return await coroutine
            except errors.TinkerError as error:
                raise official_error(error) from error

    def close(self) -> None:
        """End backend, service and thread, within `CLOSE_TIMEOUT_S`. What waits fails. Idempotent."""
        if self._is_parents:
            return
        with self._closing:
            if not self._closed:
                self._closed = True
                self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(CLOSE_TIMEOUT_S)
            self.custom_losses.stop(timeout_s=0)
            if self._thread.is_alive():
                logger.warning("the backend has not ended within %.0f s: it is left behind", CLOSE_TIMEOUT_S)
            else:
                self._storage.close()
            for future in list(self._pending):
                future.cancel()

    def _run(self) -> None:
        with asyncio.Runner() as runner:  # at its end, cancels what is left
            runner.run(self._main())

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._ready.set()
        await self._stop.wait()
        try:
            with self._progress.show("closing the backend"):
                await self.service.close()
        except Exception:
            logger.exception("closing the backend failed")
