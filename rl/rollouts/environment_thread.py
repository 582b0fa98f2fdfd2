"""Environments away from the controller's event loop, so that one that blocks does not stall it.

    episode --call--> event loop of a thread that environments share --result--> episode

The thread is one, so that what a task shares between its episodes (a session, a semaphore) belongs to one
event loop. Who waits is unblocked by the loop's result, by the time limit that the loop keeps, or, where
neither comes as code of an environment blocks the loop, by a clock of its own a little later. Then the thread
is left behind, and episodes that begin later get another; those that have begun stay, and go on if it does.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rl.errors import RunError
from rl.protocols import Environment
from rl.types import Problem, Reply

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

GRACE_S = 1.0
"""After a time limit the thread's loop has so long to keep it."""
MAX_ABANDONED = 4
"""Threads that may be left behind before the run stops: each may hold a core for ever."""


class TooLongError(Exception):
    """A call took longer than its time limit; the message says so."""


async def within(function: Callable[[], Awaitable[ResultT]], timeout_s: float) -> ResultT:
    """Its result; raises TooLongError after `timeout_s`, whatever it makes of being cancelled."""
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            return await function()
    except Exception as error:
        if deadline.expired() and not isinstance(error, RunError):
            raise TooLongError(f"took longer than step_timeout_s={timeout_s:g}") from error
        raise


class EnvironmentThread:
    """An event loop in a daemon thread, which ends when nobody holds this object any more."""

    def __init__(self, *, grace_s: float = GRACE_S) -> None:
        self.grace_s = grace_s
        self.blocked_by = ""
        """Whose code it was left behind with; empty while it is in use."""
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=_serve, args=(self._loop,), name="environments", daemon=True).start()
        weakref.finalize(self, _stop, self._loop)

    async def call(
        self, function: Callable[[], Awaitable[ResultT]], *, title: str, timeout_s: float
    ) -> ResultT:
        """What `function` returns there; raises what it raises.

        Raises:
            TooLongError: it took longer than `timeout_s`; or the loop did not say so within `grace_s`, and
                then `blocked_by` is set, to the title of the call that it is in.
        """

        async def there() -> ResultT:
            task = asyncio.current_task()
            assert task is not None
            task.set_name(title)
            try:
                return await within(function, timeout_s)
            except (SystemExit, KeyboardInterrupt) as error:  # they would end the thread
                raise RuntimeError(f"{type(error).__name__} of an environment") from error

        waiting = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(there(), self._loop))
        try:
            await asyncio.wait({waiting}, timeout=timeout_s + self.grace_s)
            if waiting.done():
                return waiting.result()
        finally:
            waiting.cancel()
        running = asyncio.current_task(self._loop)
        self.blocked_by = self.blocked_by or ("an unknown call" if running is None else running.get_name())
        raise TooLongError(
            f"took longer than step_timeout_s={timeout_s:g}, as the event loop of the environments is "
            f"blocked by {self.blocked_by}"
        )

    def leave(self, function: Callable[[], Awaitable[Any]]) -> None:
        """Have it called when the loop is free, without waiting."""

        async def logged() -> None:
            try:
                await function()
            except Exception as error:  # of an environment's own code
                logger.warning("an environment could not be closed: %r", error, exc_info=error)

        asyncio.run_coroutine_threadsafe(logged(), self._loop)


@dataclass(slots=True)
class EnvironmentThreads:
    """The thread that episodes begin in now, and a count of those that were left behind."""

    grace_s: float = GRACE_S
    num_abandoned: int = 0
    _current: EnvironmentThread | None = field(default=None, init=False)

    def calls_of(self, environment: Environment, problem: Problem) -> EnvironmentCalls:
        """One that says `runs_inline` is called in the running loop."""
        thread = None if getattr(environment, "runs_inline", False) else self._thread()
        return EnvironmentCalls(environment=environment, problem=problem, thread=thread, threads=self)

    def _thread(self) -> EnvironmentThread:
        if self._current is None:
            self._current = EnvironmentThread(grace_s=self.grace_s)
        return self._current

    def abandon(self, thread: EnvironmentThread) -> None:
        """It is blocked; raises RunError if too many are."""
        if thread is not self._current:
            return
        self._current = None
        self.num_abandoned += 1
        why = f"the event loop of the environments was blocked by {thread.blocked_by}"
        logger.warning("%s; its thread is left behind (%d until now)", why, self.num_abandoned)
        if self.num_abandoned > MAX_ABANDONED:
            raise RunError(
                f"{why}, and {MAX_ABANDONED} times before, which is as often as a thread may be left behind: "
                "let `step` await what takes long, or run it in a thread or process of its own"
            )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EnvironmentCalls:
    """How an episode calls its environment."""

    environment: Environment
    problem: Problem
    thread: EnvironmentThread | None
    threads: EnvironmentThreads

    async def step(self, reply: Reply, *, turn: int, timeout_s: float) -> object:
        """What the environment returns, whatever that is.

        Raises:
            TooLongError: it took longer.
            RunError: it blocked, as too many did before.
            Exception: what it raises.
        """
        if self.thread is None:
            return await within(lambda: self.environment.step(reply), timeout_s)
        try:
            return await self.thread.call(
                lambda: self.environment.step(reply),
                title=f"turn {turn} of problem {self.problem.id!r}",
                timeout_s=timeout_s,
            )
        except TooLongError:
            if self.thread.blocked_by:
                self.threads.abandon(self.thread)
            raise

    async def close(self, *, timeout_s: float) -> None:
        """Raises what the environment raises. Where its thread is blocked, that is left to it for later."""
        if self.thread is None:
            await within(self.environment.close, timeout_s)
        elif self.thread.blocked_by:
            self.thread.leave(self.environment.close)
        else:
            title = f"closing problem {self.problem.id!r}"
            await self.thread.call(self.environment.close, title=title, timeout_s=timeout_s)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()


def _stop(loop: asyncio.AbstractEventLoop) -> None:
    with suppress(RuntimeError):  # it is closed already
        loop.call_soon_threadsafe(loop.stop)
