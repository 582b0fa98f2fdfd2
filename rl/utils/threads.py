"""Threads that run blocking code beside the event loop and never delay the exit of the process;
calls together.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from rl.utils.errors import RunError

T = TypeVar("T")

CLOSE_S = 30.0
"""Timeout of a background write that is under way when a run ends with an error."""
WRITE_S = 600.0
"""Timeout of one background write; a longer one means a file system that hangs."""

logger = logging.getLogger(__name__)


def run_now(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return a coroutine's result to synchronous code, even while an event loop runs in this
    thread.
    """
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


async def all_or_cancel(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines together and return their results; the first error cancels the others and is
    raised.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0]  # noqa: B904  (its own cause is what callers look for)
    return [task.result() for task in tasks]


class OverdueError(RunError, TimeoutError):
    """A function in a thread did not return in time."""


async def run_aside(function: Callable[[], T], *, name: str, limit_s: float | None = None) -> T:
    """Run a function in a daemon thread and return its result; raises OverdueError after `limit_s`.

    `asyncio.to_thread` would wait for the thread when the process ends.
    """
    thread = WorkerThread(name)
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            return await thread.run(function)
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise OverdueError(f"{name}: not done after {limit_s:g} s") from error
    finally:
        thread.stop(timeout_s=0.0)


class WorkerThread:
    """Daemon thread that runs functions one after another, for objects bound to one thread.

    A function stuck in a collective cannot delay the exit of the process.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Return the result of `function(*args)`, or raise what it raised.

        Cancelling the call does not interrupt a function that is already running; one that waits is
        dropped.
        """
        return await asyncio.wrap_future(self.submit(function, *args))

    def submit(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """Queue `function(*args)` and return the future of its result."""
        future: Future[T] = Future()
        self._jobs.put((future, partial(function, *args)))
        return future

    def stop(self, *, timeout_s: float) -> bool:
        """End the thread after its current job; return True if it ended in time."""
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, function = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001  (raised in the caller)
                future.set_exception(error)


class BackgroundWriter:
    """Runs writes in a thread, one after another; an error surfaces before the next write
    begins.
    """

    def __init__(self, name: str, *, close_s: float = CLOSE_S) -> None:
        self._name = name
        self._close_s = close_s
        self._writing: asyncio.Task[None] | None = None
        self._hangs = False

    async def begin(self, write: Callable[[], None]) -> None:
        """Start a write as soon as the previous one is done; raise the error of the previous
        one.
        """
        await self.finish()
        self._writing = asyncio.create_task(run_aside(write, name=self._name, limit_s=WRITE_S))

    async def finish(self) -> None:
        """Wait for the write that is under way, and raise its error once; OverdueError if the disk
        hangs.
        """
        if (writing := self._writing) is not None:
            try:
                await asyncio.shield(writing)
            except OverdueError:
                self._hangs = True
                raise
            finally:
                if writing.done():
                    self._writing = None

    async def last(self, write: Callable[[], None]) -> None:
        """Write the last part of a run that stops with an error, in the calling thread.

        Errors are logged, since the run reports its own. If the thread is not done within
        `close_s`, nothing is written, since two threads would write into one file.
        """
        if not await self.close():
            logger.warning("%s: the last part of the run is not written", self._name)
            return
        try:
            write()
        except Exception as error:
            logger.warning("%s: %r", self._name, error, exc_info=error)

    async def close(self) -> bool:
        """Wait up to `close_s` and log an unseen error; return False if the thread still writes.
        Idempotent.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            await asyncio.wait({writing}, timeout=self._close_s)
            if not writing.done():
                logger.warning("%s: not done after %g s", self._name, self._close_s)
                writing.cancel()
                self._hangs = True
            elif not writing.cancelled() and (error := writing.exception()):
                logger.warning("%s: %r", self._name, error, exc_info=error)
        return not self._hangs


async def until_event(
    event: asyncio.Event, work: Coroutine[Any, Any, None], *, grace_s: float = 0.0
) -> None:
    """Wait for a coroutine, after the event only for `grace_s` more, and cancel it then."""
    working, waiting = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            await asyncio.wait({working}, timeout=grace_s)
        if working.done():
            working.result()
    finally:
        working.cancel()
        waiting.cancel()
