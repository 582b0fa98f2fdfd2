"""Writing that would hold up an event loop, in a thread beside it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from rl.worker_thread import WorkerThread

CLOSE_S = 30.0
"""For what is being written when a run ends with an error."""

logger = logging.getLogger(__name__)


class BackgroundWriter:
    """Runs one piece of writing after another, in order; what one raises is seen before the next begins."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: WorkerThread | None = None
        self._writing: asyncio.Task[None] | None = None

    async def begin(self, write: Callable[[], None]) -> None:
        """Start it, as soon as the one before is done; raises what that one raised."""
        await self.finish()
        if self._thread is None:
            self._thread = WorkerThread(self._name)
        self._writing = asyncio.ensure_future(self._thread.run(write))

    async def finish(self) -> None:
        """Wait for what is under way; raises what it raised, once."""
        if (writing := self._writing) is not None:
            try:
                await asyncio.shield(writing)
            finally:
                if writing.done():
                    self._writing = None

    async def close(self) -> None:
        """End the thread, within `CLOSE_S`; an error that nobody has seen is logged. Idempotent."""
        writing, self._writing = self._writing, None
        if writing is not None:
            await asyncio.wait({writing}, timeout=CLOSE_S)
            if not writing.done():
                logger.warning("%s: not done after %g s", self._name, CLOSE_S)
                writing.cancel()
                return
            if not writing.cancelled() and (error := writing.exception()):
                logger.warning("%s: %r", self._name, error, exc_info=error)
        if self._thread is not None:
            self._thread.stop(timeout_s=CLOSE_S)
            self._thread = None
