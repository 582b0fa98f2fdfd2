"""Time as the event loop counts it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


def run_now(coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Its result, from code that cannot await; an event loop may be running in this thread already."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


def now_s() -> float:
    """Seconds of the running event loop's clock, which is monotonic."""
    return asyncio.get_running_loop().time()


class BusyClock:
    """Seconds during which at least one of several overlapping activities went on."""

    def __init__(self) -> None:
        self._num_active = 0
        self._since = 0.0
        self._ended_s = 0.0

    @contextmanager
    def active(self) -> Iterator[None]:
        if self._num_active == 0:
            self._since = now_s()
        self._num_active += 1
        try:
            yield
        finally:
            self._num_active -= 1
            if self._num_active == 0:
                self._ended_s += now_s() - self._since

    def total_s(self) -> float:
        """Until now, what goes on included."""
        return self._ended_s + (now_s() - self._since if self._num_active else 0.0)
