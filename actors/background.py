"""What runs beside the controller's own coroutine, and has to end before the actors do."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

logger = logging.getLogger(__name__)

_tasks: set[asyncio.Task[None]] = set()


def in_background(work: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
    """Let it run in this event loop until it returns, or `end_background` cancels it.

    Whoever wants to know of an error awaits the task.
    """
    task = asyncio.create_task(work, name=name)
    _tasks.add(task)
    task.add_done_callback(_ended)
    return task


async def end_background(*, timeout_s: float) -> None:
    """Cancel all that runs, and wait until it has ended: what starts actors again, for one."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while _tasks:  # what ends may have begun something else
        for task in _tasks:
            task.cancel()
        left_s = deadline - asyncio.get_running_loop().time()
        _, late = await asyncio.wait(set(_tasks), timeout=max(left_s, 0.0))
        if late:
            for task in late:
                logger.warning("%s did not end within %g s", task.get_name(), timeout_s)
            return


def _ended(task: asyncio.Task[None]) -> None:
    _tasks.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.debug("%s ended: %s", task.get_name(), error)
