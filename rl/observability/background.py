"""Writing that would hold up an event loop, in a thread beside it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from rl.errors import RunError
from rl.worker_thread import WorkerThread

CLOSE_S = 30.0
"""For what is being written when a run ends with an error."""

WRITE_S = 600.0
"""For one piece of writing: what takes longer is a file system that hangs."""

logger = logging.getLogger(__name__)


class WriteTimeoutError(RunError, TimeoutError):
    """What is written in the background did not end within its deadline."""


class BackgroundWriter:
    """Runs one piece of writing after another, in order; what one raises is seen before the next begins."""

    def __init__(self, name: str, *, close_s: float = CLOSE_S, write_s: float = WRITE_S) -> None:
        self._name = name
        self._close_s = close_s
        self._write_s = write_s
        self._thread: WorkerThread | None = None
        self._writing: asyncio.Task[None] | None = None

    async def begin(self, write: Callable[[], None]) -> None:
        """Start it, as soon as the one before is done; raises what that one raised."""
        await self.finish()
        if self._thread is None:
            self._thread = WorkerThread(self._name)
        self._writing = asyncio.ensure_future(self._thread.run(write))

    async def finish(self) -> None:
        """Wait for what is under way; raises what it raised, once.

        Raises:
            WriteTimeoutError: a disk takes nothing.
        """
        if (writing := self._writing) is not None:
            try:
                await asyncio.wait_for(asyncio.shield(writing), self._write_s)
            except TimeoutError as error:
                if writing.done():
                    raise
                raise WriteTimeoutError(f"{self._name}: not written after {self._write_s:g} s") from error
            finally:
                if writing.done():
                    self._writing = None

    async def last(self, write: Callable[[], None]) -> None:
        """Write what a run that stops leaves behind, here and now, after what is under way.

        The run has an error of its own to tell: what goes wrong here is logged. Nothing is written where the
        thread is not done within `close_s`, as two would write into one file.
        """
        if not await self.close():
            logger.warning("%s: what the run had when it stopped is not written", self._name)
            return
        try:
            write()
        except Exception as error:  # noqa: BLE001  (a full disk)
            self._log(error)

    async def close(self) -> bool:
        """End the thread, within `close_s`; an error that nobody has seen is logged. Idempotent.

        Returns False where it is still writing.
        """
        writing, self._writing = self._writing, None
        thread, self._thread = self._thread, None
        wait_s = self._close_s
        if writing is not None:
            await asyncio.wait({writing}, timeout=wait_s)
            if not writing.done():
                logger.warning("%s: not done after %g s", self._name, wait_s)
                writing.cancel()
                wait_s = 0.0
            elif not writing.cancelled() and (error := writing.exception()):
                self._log(error)
        return thread is None or thread.stop(timeout_s=wait_s)

    def _log(self, error: BaseException) -> None:
        logger.warning("%s: %r", self._name, error, exc_info=error)
