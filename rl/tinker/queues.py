"""Queues of the owners of requests: at the trainer (`FairLock`), at the sampler (`FairSlots`), and
for the weights that the sampler has (`VersionGate`).
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

SHARE = 7 / 8
"""Largest share of an owner in the slots that the others leave. The rest is for the next owner, who
need not wait then."""


def _make_future() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


class FairLock:
    """Lock for which the owners who wait take turns; the requests of one owner come in order.

    Example:
        With a1, a2, a3 of owner a waiting, and then b1 of owner b, the order is a1, b1, a2, a3.
    """

    def __init__(self) -> None:
        self._is_held = False
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """Requests by owner; the first owner is next, and then goes to the end."""

    @asynccontextmanager
    async def lock_for(self, owner: str) -> AsyncIterator[None]:
        """Hold the lock in the block, in the owner's turn."""
        if self._is_held:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(owner, deque()).append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():  # the turn had come at this very moment
                    self._pass_on()
                raise
        self._is_held = True
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting:
            owner = next(iter(self._waiting))
            own = self._waiting.pop(owner)
            turn = own.popleft()
            while own and turn.done():  # It was cancelled.
                turn = own.popleft()
            # At the end of the dict, so that every other owner comes first.
            if own:
                self._waiting[owner] = own
            if not turn.done():
                turn.set_result(None)
                return
        self._is_held = False


@dataclass(slots=True, eq=False, kw_only=True)
class _Asked:
    """Slots that a request waits for, and then holds."""

    count: int
    admitted: asyncio.Future[None] = field(default_factory=_make_future)


class FairSlots:
    """Slots of a sampler that draws so many sequences at once.

    An owner holds at most `SHARE` of the slots that the others leave, so that some are free when
    the next owner comes. Owners who wait take turns; the requests of one owner come in order.

    Example:
        Of 64 slots a busy owner gets 56, a second one 7, and a third one the last:

        async with slots.take("owner", 4):
            await sample()
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, deque[_Asked]] = {}
        """Requests by owner; the first owner is next, and then goes to the end."""

    @asynccontextmanager
    async def take(self, owner: str, count: int = 1) -> AsyncIterator[None]:
        """Hold slots in the block.

        An owner who holds none gets as many as there are for this owner, although that may be fewer
        than `count`: a large request does not wait until the sampler is empty.
        """
        asked = _Asked(count=count)
        # Queued in any case: a request that found free slots must not overtake the owner's others.
        self._waiting.setdefault(owner, deque()).append(asked)
        self._admit()
        try:
            await asked.admitted
        except asyncio.CancelledError:
            if not asked.admitted.cancelled():  # It was admitted at this very moment.
                self._give_back(owner, asked)
            raise
        try:
            yield
        finally:
            self._give_back(owner, asked)

    def _give_back(self, owner: str, asked: _Asked) -> None:
        self._held[owner] -= asked.count
        self._held = +self._held  # without owners who hold nothing
        self._admit()

    def _admit(self) -> None:
        """Admit what has room: one request of each owner in turn, again and again."""
        while any(self._admit_first(owner) for owner in list(self._waiting)):
            pass

    def _admit_first(self, owner: str) -> bool:
        """Admit an owner's first request, if it has room."""
        queue = self._waiting[owner]
        while queue and queue[0].admitted.done():  # It was cancelled.
            queue.popleft()
        if not queue:
            del self._waiting[owner]
            return False

        held, total = self._held[owner], self._held.total()
        # At least one slot, so that a small sampler serves anybody at all.
        most = max(1, int(SHARE * (self._capacity - (total - held))))
        num_free = min(most - held, self._capacity - total)
        # An owner who has slots waits for the whole request, which the own requests make room for.
        if num_free < (queue[0].count if held else 1):
            return False
        asked = queue.popleft()
        # What it holds now is what it gives back.
        asked.count = min(asked.count, num_free)
        self._held[owner] += asked.count
        asked.admitted.set_result(None)
        # At the end of the dict, so that every other owner comes first.
        del self._waiting[owner]
        if queue:
            self._waiting[owner] = queue
        return True


@dataclass(slots=True, eq=False, kw_only=True)
class _Ticket:
    """Place of a request in the queue of the gate."""

    weights: int
    admitted: asyncio.Future[None] = field(default_factory=_make_future)


class VersionGate:
    """Gate in front of a sampler that has one set of weights at a time.

    Requests for the same weights run together. A request for other weights waits, and those that
    come later wait behind it, until the running ones have ended and the weights were switched.
    Adapters share the weights beside them, so their requests never wait for each other.
    """

    def __init__(self, switch: Callable[[int], Awaitable[object]], *, weights: int | None) -> None:
        """`switch` gives the sampler weights; it has `weights` already, None: none."""
        self._switch = switch
        self._weights = weights
        self._num_running = 0
        self._queue: deque[_Ticket] = deque()
        self._switching: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def use(self, weights: int) -> AsyncIterator[None]:
        """Run the block while the sampler has these weights; raise what `switch` raises."""
        ticket = _Ticket(weights=weights)
        # Behind requests for other weights, also if these are there: the others would starve.
        self._queue.append(ticket)
        self._admit()
        try:
            await ticket.admitted
        except asyncio.CancelledError:
            if not ticket.admitted.cancelled() and ticket.admitted.exception() is None:
                self._num_running -= 1  # It was admitted at this very moment.
            self._admit()  # Others may have waited behind it.
            raise
        try:
            yield
        finally:
            self._num_running -= 1
            self._admit()

    def _admit(self) -> None:
        """Admit the requests at the head of the queue, or switch the weights for the first."""
        while self._queue and self._switching is None:
            ticket = self._queue[0]
            if ticket.admitted.done():  # It was cancelled.
                self._queue.popleft()
            elif ticket.weights == self._weights:
                self._queue.popleft()
                self._num_running += 1
                ticket.admitted.set_result(None)
            elif self._num_running:
                return
            else:
                # Nothing runs, and nothing begins until the weights have changed.
                self._switching = asyncio.create_task(self._change(ticket.weights))

    async def _change(self, weights: int) -> None:
        # Until it has succeeded the sampler may have parts of two versions.
        self._weights = None
        try:
            await self._switch(weights)
            self._weights = weights
        except Exception as error:  # noqa: BLE001  (of those who wait for the weights)
            for ticket in self._queue:
                if ticket.weights == weights and not ticket.admitted.done():
                    ticket.admitted.set_exception(error)
        finally:
            self._switching = None
            self._admit()
