"""A wish that a loop ends soon, between two of its steps: Ctrl-C, SIGTERM.

Signal handlers ask, the loop hears. Who asks when no loop hears, or a second time, is told so, and ends the
run at once in its own way.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from rl.observability.console import say

T = TypeVar("T")


class StopAskedError(Exception):
    """A loop has ended between two steps, as it was asked to."""


class StopRequest:
    """Asked at most once in a run; one loop after another may hear it."""

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        """`say` tells who asked what will be done; None prints it to standard error."""
        self._say = say or _print
        self._describe: Callable[[], str] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asked = asyncio.Event()
        self._was_asked = False

    @contextmanager
    def heard(self, describe: Callable[[], str]) -> Iterator[None]:
        """Within it a loop hears; `describe` says what it will do."""
        self._loop, self._describe = asyncio.get_running_loop(), describe
        try:
            yield
        finally:
            self._describe = None

    def ask(self) -> bool:
        """Whether the loop will end for it; may be called by a signal handler of the loop's thread."""
        if self._describe is None or self._loop is None or self._was_asked:
            return False
        self._was_asked = True
        # Not here: the signal may have come in the middle of a print.
        self._loop.call_soon_threadsafe(self._begin)
        return True

    @property
    def was_asked(self) -> bool:
        """Of a loop that heard it."""
        return self._was_asked

    def check(self) -> None:
        """Raises StopAskedError if the loop was asked to end."""
        if self._was_asked:
            raise StopAskedError

    async def cutting_short(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns; cancels it and raises StopAskedError where the loop is asked before."""
        task, asked = asyncio.ensure_future(work), asyncio.ensure_future(self._asked.wait())
        try:
            await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise StopAskedError
        finally:
            task.cancel()
            asked.cancel()
            await asyncio.gather(task, asked, return_exceptions=True)

    def _begin(self) -> None:
        self._asked.set()
        if self._describe is not None:
            self._say(self._describe())


def _print(text: str) -> None:
    say(text, stream=sys.stderr)
