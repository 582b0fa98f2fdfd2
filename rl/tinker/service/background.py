"""Work that nobody awaits, and threads that are never left behind by it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

log = logging.getLogger(__name__)

P = ParamSpec("P")
ResultT = TypeVar("ResultT")


class Background:
    """Tasks that live until they end or the service closes. An error of one is logged."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None], what: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=what)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def close(self, timeout_s: float) -> None:
        """Wait for all, those they start included; cancel what then still runs, and wait as long again."""
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


async def in_thread(function: Callable[P, ResultT], *args: P.args, **kwargs: P.kwargs) -> ResultT:
    """Its result. When cancelled it is awaited nevertheless: a thread cannot be stopped, and what it works on
    must not be removed under it."""
    task = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
