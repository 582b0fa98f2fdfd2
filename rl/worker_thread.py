"""A thread of one's own for an object that must always be used from the same one."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def run_aside(function: Callable[[], T], *, name: str, limit_s: float | None = None) -> T:
    """In a thread of its own, which unlike one of asyncio's nobody waits for when the process ends.

    Raises:
        TimeoutError: it is not done after `limit_s`; it goes on.
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
    """Runs functions one after another, away from the event loop.

    Unlike a thread of a pool it does not keep the process alive: a function stuck in a
    collective cannot hold up the exit.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """The result of `function(*args)`, or what it raised.

        Cancelling the wait does not stop a function that is running.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def succeed(result: T) -> None:
            if not future.cancelled():
                future.set_result(result)

        def fail(error: BaseException) -> None:
            if not future.cancelled():
                future.set_exception(error)

        def job() -> None:
            try:
                result = function(*args)
            except BaseException as error:  # noqa: BLE001  (handed to whoever waits)
                settle(fail, error)
            else:
                settle(succeed, result)

        def settle(how: Callable[[Any], None], what: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits
                loop.call_soon_threadsafe(how, what)

        self._jobs.put(job)
        return await future

    def stop(self, *, timeout_s: float) -> bool:
        """End the thread after what it is doing; whether it ended in time."""
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
