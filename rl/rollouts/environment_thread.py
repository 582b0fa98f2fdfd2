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

import logging
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from rl.errors import RunError
from rl.protocols import Environment
from rl.rollouts.environment_limit import within
from rl.rollouts.environment_loop import GRACE_S, BlockedError, EnvironmentThread
from rl.types import Problem, Reply

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

MAX_ABANDONED = 4
"""Threads that may be left behind before the run stops: each may hold a core for ever."""


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
        self,
        function: Callable[[], Awaitable[ResultT]],
        *,
        title: str,
        timeout_s: float,
        thread: EnvironmentThread | None = None,
    ) -> ResultT:
        """As `EnvironmentThread.call`, in a thread of these, or else the one that is used now.

        One that is blocked is left behind; raises RunError if too many are.
        """
        thread = thread or self._thread()
        try:
            return await thread.call(function, title=title, timeout_s=timeout_s)
        except BlockedError:
            self._abandon(thread)
            raise

    def _thread(self) -> EnvironmentThread:
        if self._current is None:
            self._current = EnvironmentThread(grace_s=self.grace_s)
            weakref.finalize(self, self._current.stop)
        return self._current

    def _abandon(self, thread: EnvironmentThread) -> None:
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
        return await self.threads.call(function, title=title, timeout_s=timeout_s, thread=self.thread)
