"""An event loop in a thread, watched by another: a loop that is blocked is told from one that is busy.

    call --> loop, in its turn --result, or that its time is over--> who awaits it
    watch --ping--> loop --no answer--> watch --that one call blocks it--> who awaits any

Time in which a call waits for its turn in the loop is not the call's: none fails of how many there are.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from rl.rollouts.environment_limit import CLEAN_UP_S, TooLongError, within

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

GRACE_S = 1.0
"""How much longer than its time limit one call may keep the loop from all others."""
LOOK_S = 0.05
"""How often it is looked whether the loop answers."""


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


def _named_as_its_maker(
    loop: asyncio.AbstractEventLoop,
    coroutine: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
    /,
    **settings: Any,
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
