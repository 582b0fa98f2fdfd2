"""Environments away from the controller's event loop, so that one that blocks does not stall it.

    episode --call--> event loop of a thread that environments share --result--> episode

    calls = EnvironmentThreads().calls_of(environment, problem)
    try:
        observation = await calls.step(reply, turn=1, timeout_s=60.0)  # raises TooLongError, RunError, ...
    finally:
        await calls.close(timeout_s=60.0)

The thread is one, so that what a task shares between its episodes (a session, a semaphore) belongs to one
event loop. Whoever awaits a call, in whatever event loop, is unblocked by its end or its time limit, both of
which the thread's loop tells; or by a second thread that watches that loop, where one call has kept it from
answering for longer than the limit. Then the thread is left behind, and episodes that begin later get
another; those that have begun stay, and go on if it does. Threads end when nobody holds their
`EnvironmentThreads`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rl.errors import RunError
from rl.protocols import Environment
from rl.rollouts.environment_limit import CLEAN_UP_S, TooLongError, within
from rl.types import Problem, Reply

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

GRACE_S = 1.0
"""How much longer than its time limit one call may keep the loop from all others."""
LOOK_S = 0.1
"""How often it is looked whether the loop answers."""
MAX_ABANDONED = 4
"""Threads that may be left behind before the run stops: each may hold a core for ever."""


class BlockedError(TooLongError):
    """A call could not end, as another one, or itself, blocks the event loop."""


class EnvironmentThread:
    """An event loop in a daemon thread, and another thread that watches it."""

    def __init__(self, *, grace_s: float = GRACE_S) -> None:
        self.grace_s = grace_s
        self.blocked_by = ""
        """Whose code it was left behind with; empty while it is in use."""
        self._loop = asyncio.new_event_loop()
        self._loop.set_task_factory(_named_as_its_maker)
        self._ending, self._stopped = asyncio.Event(), threading.Event()
        self._waiting: dict[Future[Any], float] = {}
        """Calls, and how many seconds the loop may be blocked before they fail."""
        threading.Thread(target=self._serve, name="environments", daemon=True).start()
        threading.Thread(target=self._watch, name="environments watch", daemon=True).start()

    async def call(
        self, function: Callable[[], Awaitable[ResultT]], *, title: str, timeout_s: float
    ) -> ResultT:
        """As `within`, there.

        Raises:
            BlockedError: one call kept the loop for longer than `timeout_s` and `grace_s`; `blocked_by` is
                its title.
        """
        future = asyncio.run_coroutine_threadsafe(within(function, timeout_s, title=title), self._loop)
        waiting = asyncio.wrap_future(future)
        self._waiting[future] = timeout_s + self.grace_s
        try:
            await asyncio.wait({waiting})
        finally:
            del self._waiting[future]
            future.cancel()
        if not waiting.cancelled():
            return waiting.result()
        if not self.blocked_by:
            raise RuntimeError("CancelledError of an environment")
        raise BlockedError(
            f"took longer than step_timeout_s={timeout_s:g}, as the event loop of the environments is "
            f"blocked by {self.blocked_by}"
        )

    def leave(self, function: Callable[[], Awaitable[Any]], *, title: str) -> None:
        """Have it called when the loop is free, without waiting."""

        async def logged() -> None:
            try:
                await within(function, CLEAN_UP_S, title=title)
            except Exception as error:  # of an environment's own code
                logger.warning("an environment could not be closed: %r", error, exc_info=error)

        asyncio.run_coroutine_threadsafe(logged(), self._loop)

    def stop(self) -> None:
        """Have the threads end when the loop is free and what is under way has ended, for a limited time."""
        self._stopped.set()
        self._loop.call_soon_threadsafe(self._ending.set)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        end = self._loop.create_task(_end(self._ending))
        while not end.done():
            try:
                self._loop.run_until_complete(end)
            except (SystemExit, KeyboardInterrupt) as error:  # of a task that an environment made
                logger.warning("%r in a task of an environment", error, exc_info=error)
        self._loop.close()

    def _watch(self) -> None:
        while not self._stopped.wait(LOOK_S):
            answered = threading.Event()
            with suppress(RuntimeError):  # it was stopped and closed just now
                self._loop.call_soon_threadsafe(answered.set)
            running, since = asyncio.current_task(self._loop), time.monotonic()
            while not answered.wait(LOOK_S) and not self._stopped.is_set():
                # Before it answers, each task runs once at most: the same task is in the same call.
                before, running = running, asyncio.current_task(self._loop)
                if running is not before:
                    since = time.monotonic()
                self._fail_waiting(running, blocked_s=time.monotonic() - since)

    def _fail_waiting(self, running: asyncio.Task[Any] | None, *, blocked_s: float) -> None:
        for future, limit_s in self._waiting.copy().items():
            if blocked_s > limit_s:
                self.blocked_by = self.blocked_by or ("a callback" if running is None else running.get_name())
                future.cancel()


@dataclass(slots=True, weakref_slot=True, eq=False)
class EnvironmentThreads:
    """The thread that episodes begin in now, and a count of those that were left behind."""

    grace_s: float = GRACE_S
    num_abandoned: int = 0
    _current: EnvironmentThread | None = field(default=None, init=False)
    _last_reason: str = field(default="", init=False)

    def calls_of(self, environment: Environment, problem: Problem) -> EnvironmentCalls:
        """One that says `runs_inline` is called in the running loop."""
        thread = None if getattr(environment, "runs_inline", False) else self._thread()
        return EnvironmentCalls(environment=environment, problem=problem, thread=thread, threads=self)

    async def call(
        self, function: Callable[[], Awaitable[ResultT]], *, title: str, timeout_s: float
    ) -> ResultT:
        """As `EnvironmentThread.call`, in the one that is used now; raises RunError as `abandon` does."""
        thread = self._thread()
        try:
            return await thread.call(function, title=title, timeout_s=timeout_s)
        except BlockedError:
            self.abandon(thread)
            raise

    def _thread(self) -> EnvironmentThread:
        if self._current is None:
            self._current = EnvironmentThread(grace_s=self.grace_s)
            weakref.finalize(self, self._current.stop)
        return self._current

    def abandon(self, thread: EnvironmentThread) -> None:
        """It is blocked; raises RunError if too many are."""
        if thread is self._current:
            self._current = None
            self.num_abandoned += 1
            self._last_reason = f"the event loop of the environments was blocked by {thread.blocked_by}"
            logger.warning(
                "%s; its thread is left behind (%d until now)", self._last_reason, self.num_abandoned
            )
            self.check()

    def check(self) -> None:
        """Raises RunError if too many were left behind."""
        if self.num_abandoned > MAX_ABANDONED:
            raise RunError(
                f"{self._last_reason}, and {MAX_ABANDONED} times before, which is as often as a thread may "
                "be left behind: let `step` and `close` await what takes long, or run it in a thread or "
                "process of its own"
            )


@dataclass(kw_only=True, slots=True, eq=False)
class EnvironmentCalls:
    """How an episode calls its environment."""

    environment: Environment
    problem: Problem
    thread: EnvironmentThread | None
    threads: EnvironmentThreads
    _closed: bool = field(default=False, init=False)

    async def step(self, reply: Reply, *, turn: int, timeout_s: float) -> object:
        """What the environment returns, whatever that is.

        Raises:
            TooLongError: it took longer, or its event loop is blocked.
            RunError: that is blocked, as too many were before.
            Exception: what it raises.
        """
        title = f"turn {turn} of problem {self.problem.id!r}"
        return await self._call(lambda: self.environment.step(reply), title, timeout_s)

    async def close(self, *, timeout_s: float) -> None:
        """As `step`. While its event loop is blocked, that is left to it for later and not waited for."""
        title = f"closing problem {self.problem.id!r}"
        try:
            if self.thread is None or not self.thread.blocked_by:
                await self._call(self._close, title, timeout_s)
        finally:
            if self.thread is not None and not self._closed:
                self.thread.leave(self._close, title=title)

    async def _close(self) -> None:
        """Once: whoever stopped waiting for it cannot know whether it will begin."""
        if not self._closed:
            self._closed = True
            await self.environment.close()

    async def _call(
        self, function: Callable[[], Awaitable[ResultT]], title: str, timeout_s: float
    ) -> ResultT:
        if self.thread is None:
            return await within(function, timeout_s, title=title)
        try:
            return await self.thread.call(function, title=title, timeout_s=timeout_s)
        except BlockedError:
            self.threads.abandon(self.thread)
            raise


def _named_as_its_maker(
    loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **settings: Any
) -> asyncio.Task[Any]:
    """So that whoever is blocked by a task learns which problem's it is."""
    maker = asyncio.current_task(loop)
    name = {} if maker is None else {"name": maker.get_name()}
    return asyncio.Task(coroutine, loop=loop, **(name | settings))


async def _end(ending: asyncio.Event) -> None:
    """When it is set: what is under way has a while to end, and another one to end cancelled."""
    await ending.wait()
    for _ in range(2):
        if left := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(left, timeout=CLEAN_UP_S)
            for task in left:
                task.cancel()
