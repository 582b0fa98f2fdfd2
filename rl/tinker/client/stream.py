"""One model's requests, in the order in which they were made."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from rl.tinker.client.host import Host
from rl.tinker.errors import TinkerError
from rl.tinker.service.responses import Submitted

Submit = Callable[[int], Submitted]
"""Submits a request with this seq id; a function of the host's loop."""


class Stream:
    """Numbers are drawn when a request is made, by the caller; all else happens in the host's loop, where the
    requests begin in the same order.

    A request that waits for earlier ones takes its turn as they are submitted, not as they are done. One of
    several parts keeps its turn until the last part is submitted. If it fails before, what was made meanwhile
    is refused, for it was made believing that this would succeed: a step of the optimizer, most likely.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._numbers = itertools.count()
        self._turn = asyncio.Lock()  # first come, first served
        self._next_seq_id = 1
        self._refused_below = 0
        self._reason: BaseException | None = None

    def draw_number(self) -> int:
        return next(self._numbers)

    async def request(self, number: int, submit: Submit) -> Any:
        """The result of a request."""
        async with self.turn(number):
            submitted = self.submit(submit)
        return await self._host.retrieve(submitted.request_id)

    async def in_two_parts(
        self, number: int, first: Submit, second: Callable[[Any], Awaitable[Submit]]
    ) -> Any:
        """The result of a request that `second` makes of the result of `first`, with nothing in between."""
        async with self.turn(number):
            try:
                submitted = self.submit(first)
                result = await self._host.retrieve(submitted.request_id)
                submitted = self.submit(await second(result))
            except BaseException as error:
                self._refused_below, self._reason = self.draw_number(), error
                raise
        return await self._host.retrieve(submitted.request_id)

    @asynccontextmanager
    async def turn(self, number: int) -> AsyncIterator[None]:
        async with self._turn:
            if number < self._refused_below:
                raise RuntimeError(
                    "not done: an earlier request of this model failed while this one waited for its turn "
                    f"({type(self._reason).__name__}: {self._reason})"
                ) from self._reason
            yield

    def submit(self, submit: Submit) -> Submitted:
        """Within a turn."""
        try:
            submitted = submit(self._next_seq_id)
        except TinkerError:
            self._next_seq_id += 1  # What is refused has had its turn too.
            raise
        self._next_seq_id += 1
        return submitted
