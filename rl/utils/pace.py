"""Turns in an event loop, so that a crowd of coroutines does not hold it for long."""

from __future__ import annotations

import asyncio


class Pace:
    """Lets coroutines that are ready at the same time continue one by one.

    An event loop runs everything that is ready before it looks at its sockets and clocks again: 400
    requests that arrive together, each with a millisecond of work, would stop it for 0.4 s.

    Example:
        await pace.wait_for_turn()
        plan = record.plan(request)  # A millisecond; the loop looks around before the next one.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def wait_for_turn(self) -> None:
        """Wait until the loop has looked around after the coroutine before this one."""
        async with self._lock:
            await asyncio.sleep(0)
