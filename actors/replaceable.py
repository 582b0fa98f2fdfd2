"""A role of which no part works without the rest: it is started again whole."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from actors.background import in_background
from actors.calls import ActorGroup, ActorLostError, Timeouts
from actors.supervision import Supervisor, first_line


class Replaceable:
    """A role that is started again whole when one of its processes is lost; a `Group` of who is there now."""

    def __init__(
        self,
        group: ActorGroup,
        *,
        start: Callable[[], Awaitable[ActorGroup]] | None = None,
        supervisor: Supervisor | None = None,
    ) -> None:
        """Without `start` and `supervisor` a loss stays what it is: an error."""
        self._group = group
        self._start = start
        self._supervisor = supervisor
        self._replacing: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self._group.name

    @property
    def timeouts(self) -> Timeouts:
        return self._group.timeouts

    def call(self, endpoint: str, *args: Any, limit: str, **kwargs: Any) -> Coroutine[Any, Any, list[Any]]:
        """As `ActorGroup.call`, of those that are there now."""
        return self._group.call(endpoint, *args, limit=limit, **kwargs)

    async def group(self) -> ActorGroup:
        """Those that are there now; waits while they are started again.

        Raises:
            RunError: they could not be.
        """
        while self._replacing is not None:
            await asyncio.shield(self._replacing)
        return self._group

    async def replace(self, lost: ActorGroup, error: ActorLostError) -> None:
        """Start them again because `lost` are; nothing if that was done, or is under way: then wait for it.

        Raises:
            ActorLostError: `error`, where nothing is started again.
            RestartsUsedUpError: it was lost too often.
        """
        if self._start is None or self._supervisor is None or not self._supervisor.config.max_restarts:
            raise error
        if self._replacing is None and self._group is lost:
            again = self._again(self._start, self._supervisor, reason=first_line(error))
            self._replacing = in_background(again, name=f"restart of {self.name}")
        await self.group()

    async def _again(
        self, start: Callable[[], Awaitable[ActorGroup]], supervisor: Supervisor, *, reason: str
    ) -> None:
        try:
            self._group = await supervisor.again(self.name, reason=reason, start=start)
        finally:
            self._replacing = None
