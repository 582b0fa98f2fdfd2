"""Two kinds of daemon threads, functions in them with a deadline, and coroutines together.

    engine = WorkerThread("training-engine")    # functions, one after another
    loss = await engine.run(compute_loss, batch)

    environments = LoopThread("environments")   # coroutines, at the same time
    reply = await environments.start(step(action))

Daemon threads, because `asyncio.to_thread` and `ThreadPoolExecutor` wait for theirs at the end of
the process: a function that is stuck in a collective or on a disk would delay the exit for ever.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from rl.utils.errors import RunError

T = TypeVar("T")

WRITE_S = 600.0
"""Timeout of one background write; a longer one means a file system that hangs."""


class WorkerThread:
    """Daemon thread that runs functions one after another, for objects bound to one thread.

    Example:
        >>> thread = WorkerThread("checksums")
        >>> await thread.run(sum, [1, 2, 3])
        6
        >>> thread.stop(timeout_s=1.0)
        True
    """

    def __init__(self, name: str, *, max_queued: int | None = None) -> None:
        """`max_queued` bounds the functions that wait; `submit` raises queue.Full beyond it."""
        self._max_queued = max_queued
        # Its `put` is safe in finalizers, which the garbage collector runs at any time.
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run_jobs, name=name, daemon=True)
        self._thread.start()

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Return the result of `function(*args)`, or raise its error.

        Cancelling the call does not interrupt a function that is already running; a function that
        waits is dropped.
        """
        return await asyncio.wrap_future(self.submit(function, *args))

    def submit(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """Queue `function(*args)` and return the future of its result."""
        if self._max_queued is not None and self._jobs.qsize() >= self._max_queued:
            raise queue.Full
        future: Future[T] = Future()
        self._jobs.put((future, partial(function, *args)))
        return future

    def stop(self, *, timeout_s: float) -> bool:
        """End the thread after the queued functions; return True if it ended in time.

        May be called again, to wait for longer.
        """
        self._jobs.put(None)
        self._thread.join(max(0.0, timeout_s))
        return not self._thread.is_alive()

    def _run_jobs(self) -> None:
        # A job's variables end with its call: a thread that waits must not keep a function, its
        # arguments and its result, which may be a model's cache, until the next job comes.
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Wait for a job and run it; return False if it was the last."""
        job = self._jobs.get()
        if job is None:
            return False
        future, function = job
        # The caller has been cancelled while the function was waiting.
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001  (raised in the caller)
                future.set_exception(error)
        return True


class LoopThread:
    """Event loop in a daemon thread, for coroutines whose code may block.

    The thread starts with the first coroutine and ends when this object is garbage-collected.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Start a coroutine in the thread; return a future of its result for the calling loop.

        Cancelling the future cancels the coroutine.
        """
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True).start()
            # Not at exit, when a task may still have to close what its coroutines share.
            weakref.finalize(self, self._loop.call_soon_threadsafe, self._loop.stop).atexit = False
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))


class OverdueError(RunError, TimeoutError):
    """A function in a thread did not return in time."""


async def run_in_thread(function: Callable[[], T], *, name: str, limit_s: float | None = None) -> T:
    """Run one function in a thread of its own and return its result.

    Raises OverdueError after `limit_s`; the function then goes on, and its result is dropped.
    """
    thread = WorkerThread(name)
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            return await thread.run(function)
    except TimeoutError as error:
        # The function may have raised a TimeoutError of its own.
        if not limit.expired():
            raise
        raise OverdueError(f"{name}: not done after {limit_s:g} s") from error
    finally:
        # Without a wait: the function may hang, which is why there is a limit.
        thread.stop(timeout_s=0.0)


def run_now(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return a coroutine's result to synchronous code, even below a running event loop."""
    # `asyncio.run` refuses to start in a thread whose loop is running, so it gets another thread.
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


async def gather_or_cancel(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines together and return their results in order.

    After the first error or a cancellation, the other coroutines are cancelled and waited for, and
    the error is raised as it is, not in an ExceptionGroup.

    Example:
        >>> await gather_or_cancel([asyncio.sleep(0, "a"), asyncio.sleep(0, "b")])
        ['a', 'b']
    """
    # Not a TaskGroup: on Python 3.11 an error in it leaves a cancellation of the caller behind, and
    # an `asyncio.timeout` around the caller then ends with CancelledError.
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def wait_until_event(
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
