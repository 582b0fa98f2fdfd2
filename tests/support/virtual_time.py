"""Event loop whose sleeps take no time: waiting tasks wake up in the order of their deadlines."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _InstantSelector(selectors.DefaultSelector):
    now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, f"at {self.now_s:g} s every task waits for another one"
        self.now_s += max(timeout, 0.0)
        return super().select(0)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Event loop in which `asyncio.sleep(s)` advances the clock by s and returns at once."""

    def __init__(self) -> None:
        self._instant = _InstantSelector()
        super().__init__(self._instant)

    def time(self) -> float:
        return self._instant.now_s


def run_in_virtual_time(main: Coroutine[Any, Any, T]) -> tuple[T, float]:
    """Return the coroutine's result and the elapsed virtual seconds."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        result = runner.run(main)
        return result, runner.get_loop().time()


def now_s() -> float:
    """Return the running loop's time in virtual seconds."""
    return asyncio.get_running_loop().time()
