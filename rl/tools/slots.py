"""A number of places, so that the calls of hundreds of rollouts take turns."""

from __future__ import annotations

import asyncio
import weakref


class Slots:
    """`async with slots.here():` waits for one of `num` places; every event loop has its own."""

    def __init__(self, num: int) -> None:
        self.num = num
        self._by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )

    def here(self) -> asyncio.Semaphore:
        """The places of the running loop; they are given in the order in which they were asked for."""
        loop = asyncio.get_running_loop()
        if loop not in self._by_loop:
            self._by_loop[loop] = asyncio.Semaphore(self.num)
        return self._by_loop[loop]
