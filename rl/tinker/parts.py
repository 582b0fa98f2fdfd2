"""Collaborators that all parts of the service share, and their background tasks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from rl.tinker.futures import Futures
from rl.tinker.limits import Limits
from rl.tinker.sessions import Sessions

if TYPE_CHECKING:
    from rl.tinker.backend import TinkerBackend
    from rl.tinker.storage import Storage

log = logging.getLogger(__name__)

P = ParamSpec("P")
ResultT = TypeVar("ResultT")


class Background:
    """Tasks that run until they end or the service closes. A failed one is logged."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None], what: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=what)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def close(self, timeout_s: float) -> None:
        """Wait for all tasks, also those that they start; then cancel the rest and wait as long again."""
        for cancel in (False, True):
            deadline = asyncio.get_running_loop().time() + timeout_s
            while self._tasks and (left_s := deadline - asyncio.get_running_loop().time()) > 0:
                if cancel:
                    for task in self._tasks:
                        task.cancel()
                await asyncio.wait(set(self._tasks), timeout=left_s)
        for task in self._tasks:
            log.error("%s did not end", task.get_name())

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s failed", task.get_name(), exc_info=error)


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    backend: TinkerBackend
    storage: Storage
    sessions: Sessions
    futures: Futures
    limits: Limits
    wall_time_s: Callable[[], float]
    """Unix time, by which checkpoints are stamped and expire."""
    background: Background = field(default_factory=Background)


async def in_thread(function: Callable[P, ResultT], *args: P.args, **kwargs: P.kwargs) -> ResultT:
    """Run a function in a thread. When cancelled, wait for it nevertheless: a thread cannot be stopped, and
    the files that it works on must not be removed meanwhile."""
    task = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
