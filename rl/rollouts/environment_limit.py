"""A function of an environment under a time limit, whatever it does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from rl.errors import RunError

ResultT = TypeVar("ResultT")

CLEAN_UP_S = 10.0
"""How long what was cancelled may take to end."""
NUM_PARTS = 20
"""Of a time limit: at its end the event loop has come to the call so many times at least."""


class TooLongError(Exception):
    """A call took longer than its time limit; the message says so."""


async def within(
    function: Callable[[], Awaitable[ResultT]],
    timeout_s: float,
    *,
    title: str,
    clean_up_s: float = CLEAN_UP_S,
) -> ResultT:
    """What it returns. Its time begins when it does, and what one turn of the event loop takes longer than
    a part of the limit, as that is busy with other calls, is not counted.

    Args:
        title: name of the task that it runs in.

    Raises:
        TooLongError: after `timeout_s`, when it has ended or did not for another `clean_up_s`.
        RuntimeError: it was cancelled, though this was not, or raised what would end the event loop.
        Exception: what it raises.
    """
    task = asyncio.create_task(_contained(function), name=title)
    in_time = False
    try:
        await asyncio.sleep(0)  # first come, first run: now the task has begun
        for _ in range(NUM_PARTS):
            if not in_time:
                await asyncio.wait({task}, timeout=timeout_s / NUM_PARTS)
                in_time = task.done()
    finally:
        if not in_time:
            task.cancel()
            await asyncio.wait({task}, timeout=clean_up_s)
    if not task.done():
        raise TooLongError(f"took longer than step_timeout_s={timeout_s:g}, and did not end when cancelled")
    error = None if task.cancelled() else task.exception()
    if not in_time and not isinstance(error, RunError):
        raise TooLongError(f"took longer than step_timeout_s={timeout_s:g}") from error
    if task.cancelled():
        raise RuntimeError("CancelledError of an environment")
    return task.result()


async def _contained(function: Callable[[], Awaitable[ResultT]]) -> ResultT:
    try:
        return await function()
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"{type(error).__name__} of an environment") from error
