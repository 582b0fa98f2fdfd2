"""Turns of the snapshots: the generators have one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Waiting:
    version: int
    admitted: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Turns:
    """All requests of the snapshot that is served run at once. As soon as one for another snapshot waits, no more
    are admitted; when those that run have ended, the snapshot is served that the oldest request waits for. So no
    request waits for more than what was there before it."""

    def __init__(self, serve: Callable[[int], Awaitable[object]]) -> None:
        self._serve = serve
        self._served: int | None = None
        self._num_running = 0
        self._waiting: list[_Waiting] = []
        """Requests that are not admitted yet, oldest first."""
        self._swap: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def serving(self, version: int) -> AsyncIterator[None]:
        """Within the block the generators have this version; raises what `serve` raises."""
        waiting = _Waiting(version=version)
        self._waiting.append(waiting)
        self._advance()
        try:
            await waiting.admitted
        except asyncio.CancelledError:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            elif not waiting.admitted.cancelled() and waiting.admitted.exception() is None:
                self._num_running -= 1  # It was cancelled after it was admitted.
            self._advance()
            raise
        try:
            yield
        finally:
            self._num_running -= 1
            self._advance()

    def _advance(self) -> None:
        """Admit the requests whose turn it is, or serve the snapshot that the oldest waits for."""
        if self._swap is not None:
            return
        while self._waiting and self._waiting[0].version == self._served:
            self._admit(self._waiting[0])
        if self._waiting and not self._num_running:
            self._swap = asyncio.create_task(self._take(self._waiting[0].version))

    def _admit(self, waiting: _Waiting, error: Exception | None = None) -> None:
        self._waiting.remove(waiting)
        if waiting.admitted.done():  # It is cancelled, and has not had its turn to say so.
            return
        if error is not None:
            waiting.admitted.set_exception(error)
        else:
            self._num_running += 1
            waiting.admitted.set_result(None)

    async def _take(self, version: int) -> None:
        self._served, failure = None, None
        try:
            await self._serve(version)
            self._served = version
        except Exception as error:  # noqa: BLE001  (raised in the requests)
            failure = error
        finally:
            self._swap = None
        for waiting in [one for one in self._waiting if one.version == version]:
            self._admit(waiting, failure)
        self._advance()
