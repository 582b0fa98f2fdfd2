"""Threads that run blocking code beside the event loop and never delay the exit of the process."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


def run_now(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return a coroutine's result to synchronous code, even while an event loop runs in this thread."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


async def run_aside(function: Callable[[], T], *, name: str, limit_s: float | None = None) -> T:
    """Run a function in a daemon thread and return its result.

    `asyncio.to_thread` would wait for the thread when the process ends.

    Raises:
        TimeoutError: the function is still running after `limit_s`.
    """
    thread = WorkerThread(name)
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            return await thread.run(function)
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise TimeoutError(f"{name}: not done after {limit_s:g} s") from error
    finally:
        thread.stop(timeout_s=0.0)


class WorkerThread:
    """Daemon thread that runs functions one after another, for objects bound to one thread.

    A function stuck in a collective cannot delay the exit of the process.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Return the result of `function(*args)`, or raise what it raised.

        Cancelling the call does not interrupt a function that is already running.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def succeed(result: T) -> None:
            if not future.cancelled():
                future.set_result(result)

        def fail(error: BaseException) -> None:
            if not future.cancelled():
                future.set_exception(error)

        def settle(callback: Callable[[Any], None], value: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed, the caller is gone
                loop.call_soon_threadsafe(callback, value)

        def job() -> None:
            try:
                result = function(*args)
            except BaseException as error:  # noqa: BLE001  (raised in the caller)
                settle(fail, error)
            else:
                settle(succeed, result)

        self._jobs.put(job)
        return await future

    def stop(self, *, timeout_s: float) -> bool:
        """End the thread after its current job; return True if it ended in time."""
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
