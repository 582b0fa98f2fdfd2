"""An event loop whose sleeps take no time: what waits is woken in the order of its deadlines."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class DeadlockError(AssertionError):
    """Every task waits for another one."""


class _InstantSelector(selectors.DefaultSelector):
    now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise DeadlockError(f"at {self.now_s:g} s every task waits for another one")
        self.now_s += max(timeout, 0.0)
        return super().select(0)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """`asyncio.sleep(s)` puts the loop's clock forward by s and returns at once."""

    def __init__(self) -> None:
        self._instant = _InstantSelector()
        super().__init__(self._instant)

    def time(self) -> float:
        return self._instant.now_s


def run_in_virtual_time(main: Coroutine[Any, Any, T]) -> tuple[T, float]:
    """What it returns, and the virtual seconds that it took."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        result = runner.run(main)
        return result, runner.get_loop().time()


def now_s() -> float:
    """Of the running loop."""
    return asyncio.get_running_loop().time()
