"""Graceful shutdown: finish the current step, save, exit.

A signal handler calls `StopRequest.ask`. A second request, or a request while no loop listens,
returns False, and the handler ends the run at once in its own way.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from rl.observability.console import print_line
from rl.utils.errors import StopRequestedError

T = TypeVar("T")


class StopRequest:
    """A request to stop, made at most once in a run; one loop after another may listen.

    Example:
        signal.signal(signal.SIGINT, lambda *_: stop.ask() or sys.exit(130))
        with stop.listen(lambda: "saving step 41, then ending"):
            batch = await stop.run_until_stop(producer.take_batch())
    """

    def __init__(self) -> None:
        self._describe: Callable[[], str] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._event = asyncio.Event()
        self.was_asked = False

    @contextmanager
    def listen(self, describe: Callable[[], str]) -> Iterator[None]:
        """Accept a request while the block runs; `describe` returns what the loop will do then."""
        self._loop, self._describe = asyncio.get_running_loop(), describe
        try:
            yield
        finally:
            self._describe = None

    def ask(self) -> bool:
        """Request a stop from a signal handler; return True if the loop will stop."""
        if self._describe is None or self._loop is None or self.was_asked:
            return False
        self.was_asked = True
        # A signal may interrupt a print, so the message is printed later.
        self._loop.call_soon_threadsafe(self._begin)
        return True

    def check(self) -> None:
        if self.was_asked:
            raise StopRequestedError

    async def run_until_stop(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`; on a request cancel it and raise StopRequestedError."""
        task, event = asyncio.ensure_future(work), asyncio.ensure_future(self._event.wait())
        try:
            await asyncio.wait({task, event}, return_when=asyncio.FIRST_COMPLETED)
            # A result that arrived together with the request is used.
            if task.done():
                return task.result()
            raise StopRequestedError
        finally:
            # Also when the caller is cancelled, which does not reach the two tasks by itself.
            task.cancel()
            event.cancel()
            await asyncio.gather(task, event, return_exceptions=True)

    def _begin(self) -> None:
        self._event.set()
        if self._describe is not None:
            print_line(self._describe(), stream=sys.stderr)
