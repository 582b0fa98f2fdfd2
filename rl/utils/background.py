"""Writes beside the training, one after another."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from rl.utils.threads import WRITE_S, OverdueError, run_in_thread

logger = logging.getLogger(__name__)

CLOSE_S = 30.0
"""Timeout of a background write that is under way when a run ends with an error."""


class BackgroundWriter:
    """Writer that runs one write at a time in a thread, while the loop trains.

    An error surfaces before the next write begins, so no step is recorded after a step that is
    missing in the file.
    """

    def __init__(self, name: str, *, close_s: float = CLOSE_S) -> None:
        self._name = name
        self._close_s = close_s
        self._writing: asyncio.Task[None] | None = None
        self._hangs = False

    async def begin(self, write: Callable[[], None]) -> None:
        """Start a write after the previous write; raise the error of the previous write."""
        await self.finish()
        self._writing = asyncio.create_task(run_in_thread(write, name=self._name, limit_s=WRITE_S))

    async def finish(self) -> None:
        """Wait for the write that is under way, and raise its error once.

        Raises OverdueError if the disk hangs.
        """
        writing = self._writing
        if writing is None:
            return
        try:
            # A cancelled run still finishes the write: `close` waits for it.
            await asyncio.shield(writing)
        except OverdueError:
            self._hangs = True
            raise
        finally:
            if writing.done():
                self._writing = None

    async def last(self, write: Callable[[], None]) -> None:
        """Write the last part of a run that stops with an error, in the calling thread.

        Errors are logged, since the run reports its own. If the thread is not done within
        `close_s`, nothing is written, since two threads would write into one file.
        """
        if not await self.close():
            logger.warning("%s: the last part of the run is not written", self._name)
            return
        try:
            write()
        except Exception as error:
            logger.warning("%s: %r", self._name, error, exc_info=error)

    async def close(self) -> bool:
        """Wait up to `close_s` and log an unseen error; return False if the thread still writes.

        Idempotent.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            await asyncio.wait({writing}, timeout=self._close_s)
            if not writing.done():
                logger.warning("%s: not done after %g s", self._name, self._close_s)
                writing.cancel()
                self._hangs = True
            elif not writing.cancelled() and writing.exception():
                error = writing.exception()
                logger.warning("%s: %r", self._name, error, exc_info=error)
        return not self._hangs
