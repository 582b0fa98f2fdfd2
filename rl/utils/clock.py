"""Monotonic time of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


def now_s() -> float:
    """Return the running event loop's time in seconds."""
    return asyncio.get_running_loop().time()


class BusyClock:
    """Seconds during which at least one of several overlapping activities was running.

    Example:
        >>> clock = BusyClock()
        >>> with clock.measure(), clock.measure():
        ...     await asyncio.sleep(0.5)
        >>> round(clock.total_s(), 1)
        0.5
    """

    def __init__(self) -> None:
        self._num_active = 0
        self._since = 0.0
        self._ended_s = 0.0

    @contextmanager
    def measure(self) -> Iterator[None]:
        # Only the first activity starts the clock, and the last stops it.
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
        """Return the busy time until now, a running activity included."""
        return self._ended_s + (now_s() - self._since if self._num_active else 0.0)
