"""Lock around the trainer (`FairLock`), and queue in front of the generators (`Turns`).

The generators hold one snapshot at a time. Requests of a snapshot run at once, and a request for
another snapshot waits until they have ended. This holds for the requests of one owner. Between
owners a turn ends after `TURN_S` if an owner waits who has used the generators less: the running
requests are interrupted, and go on in a later turn from where they are.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import itertools
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TypeVar

from rl.models.generate import Interrupted
from rl.utils.errors import RunError

T = TypeVar("T")

TURN_S = 2.0
"""Shortest turn at the generators while another owner waits."""
LAG_S = 2.0
"""Seconds of the generators by which an owner who runs may be ahead of another one. Interrupted
requests read their prompts again, so owners who are equally busy should change places rarely."""
CREDIT_S = 1.0
"""Seconds that an owner who comes, or comes back, may be behind the others: little work is done at
once.
"""
LONGEST_TURN_S = 60.0
"""Time after which requests are interrupted in any case: calls to actors have deadlines, and an
owner may ask for more at once than they can do until then."""
MIN_SEQUENCES = 512
"""Sequences that one owner may have in a turn in any case: two groups of a local sampler."""
AGAIN_S = 0.25
"""Time between two looks at a turn that should end, and between two interruptions of requests that
go on.
"""


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
class _Request:
    """Request that waits for its turn or has it."""

    version: int
    owner: str
    num_sequences: int
    number: int
    started: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    is_late: bool = False
    """True if it joined a running turn, in which the engine may have kept it waiting behind the
    others.
    """
    is_first: bool = False
    """True if a turn began with it, so that no other one can have kept the generators from it."""
    patience: int = 1
    """Factor of the shortest turn that it needs; grows with turns in which it was the first and got
    no token.
    """


class Turns:
    """Turns at the generators.

    Args:
        pull: gives the generators a version.
        interrupt: ends the running calls, whose work returns `Interrupted`.
        capacity: sequences that the generators draw at once. Below it, requests of several owners
            share a turn. Of an owner alone twice as many run, so that the generators always have
            work; the rest waits here, because an interruption costs time for each request that
            runs.
    """

    def __init__(
        self,
        pull: Callable[[int], Awaitable[object]],
        *,
        interrupt: Callable[[], Awaitable[object]],
        capacity: int = 0,
    ) -> None:
        self._pull = pull
        self._interrupt = interrupt
        self._capacity = capacity
        self._most = max(2 * capacity, MIN_SEQUENCES)
        self._numbers = itertools.count()
        self._active: Counter[str] = Counter()
        """Requests by owner, whether they wait or run."""
        self._waiting: dict[str, list[_Request]] = {}
        """Waiting requests by owner, oldest first."""
        self._running: dict[_Request, None] = {}
        self._num_sequences: Counter[str] = Counter()
        """Sequences of the running requests by owner."""
        self._used_s: dict[str, float] = {}
        """Seconds of the generators by owner, while owners compete."""
        self._charged_s = 0.0
        """Time of the last addition to `_used_s`."""
        self._version: int | None = None
        """The served version; None at the start and after an error."""
        self._paid_by: str | None = None
        """Owner for whom the version was changed, until a request has started."""
        self._began_s = 0.0
        self._switch_s = 0.0
        """Time that the last change of versions took."""
        self._is_idle = asyncio.Event()
        self._change: asyncio.Task[None] | None = None
        """Change of versions or interruption under way, during which no request starts."""
        self._timer: asyncio.TimerHandle | None = None

    async def run(
        self,
        work: Callable[[], Awaitable[T | Interrupted[T]]],
        *,
        version: int,
        owner: str = "",
        num_sequences: int = 1,
    ) -> T:
        """Do work on generators that hold a version, until it is done; raise what `pull`
        raises.
        """
        request = _Request(
            version=version, owner=owner, num_sequences=num_sequences, number=next(self._numbers)
        )
        self._join(owner)
        try:
            while True:
                done = await self._run_in_turn(request, work)
                if not isinstance(done, Interrupted):
                    return done
                work = done.resume
                is_stuck = request.is_first and not done.has_advanced
                request.patience = 2 * request.patience if is_stuck else 1
                request.started = asyncio.get_running_loop().create_future()
        finally:
            self._active[owner] -= 1
            if not self._active[owner]:
                del self._active[owner]

    async def _run_in_turn(
        self, request: _Request, work: Callable[[], Awaitable[T | Interrupted[T]]]
    ) -> T | Interrupted[T]:
        # An interrupted request is older than those that have not started.
        bisect.insort(
            self._waiting.setdefault(request.owner, []), request, key=attrgetter("number")
        )
        self._start_ready()
        try:
            await request.started
            return await work()
        finally:
            self._leave(request)
            self._start_ready()

    # Accounts

    def _join(self, owner: str) -> None:
        """Open an owner's account, at most `CREDIT_S` behind those who run and not behind those who
        wait already.
        """
        self._charge()
        if not self._active[owner]:
            others = [one for one in self._active if one != owner and self._active[one]]
            starts_s = []
            for one in others:
                credit_s = CREDIT_S if one in self._num_sequences else 0.0
                starts_s.append(self._used_s[one] - credit_s)
            least_s = min(starts_s, default=0.0)

            # Owners who are gone and not ahead of the others would come back with the same account,
            # so theirs need not be remembered.
            accounts: dict[str, float] = {}
            for one, used_s in self._used_s.items():
                if one in others or (others and used_s > least_s):
                    accounts[one] = used_s
            self._used_s = accounts
            self._used_s.setdefault(owner, least_s)
        self._active[owner] += 1

    def _charge(self) -> None:
        """Add the time since the last call to the accounts of those who run, by the number of their
        sequences.
        """
        now_s = asyncio.get_running_loop().time()
        elapsed_s, self._charged_s = now_s - self._charged_s, now_s
        # An owner alone pays nothing: nobody was kept from the generators.
        for owner, num_sequences in self._num_sequences.items() if len(self._active) > 1 else ():
            self._used_s[owner] += elapsed_s * num_sequences / self._num_sequences.total()

    def _is_behind(self, owner: str) -> bool:
        """Return whether an owner who runs is so far ahead of this one that the turn should end."""
        return self._used_s[owner] < max(self._used_s[one] for one in self._num_sequences) - LAG_S

    # Turns

    def _start_ready(self) -> None:
        """Start the waiting requests that may run now, if any."""
        self._drop_cancelled()
        # A change of versions and an interruption start what is ready when they have ended.
        if self._change is not None or not self._waiting:
            return
        if self._running:
            self._fill_turn()
        else:
            self._begin_turn()
        self._schedule_end()

    def _fill_turn(self) -> None:
        """Start requests for the weights of the running turn; those of each owner keep their
        order.
        """
        for owner in self._sort_waiting_owners():
            while (own := self._waiting.get(owner)) and self._has_room(own[0]):
                self._start(own[0], is_late=True)

    def _begin_turn(self) -> None:
        """Begin a turn for the owner who has used the generators least, or first change their
        version for this owner.
        """
        owners = self._sort_waiting_owners()
        version = self._waiting[owners[0]][0].version
        if self._paid_by is not None and self._waits_for(self._version):
            # The weights were changed for this owner, who may be ahead of another one by the time
            # that the change took: without a turn now they would be changed back.
            assert self._version is not None
            version = self._version
            owners.sort(key=lambda owner: owner != self._paid_by)
        self._paid_by = None
        if version != self._version:
            self._begin_change(self._switch(version, owners[0]))
            return

        self._began_s = asyncio.get_running_loop().time()
        # Only here may requests overtake older ones of their owner for other versions.
        for owner in owners:
            for request in self._find_waiting(owner, version):
                if not self._has_room(request):
                    break
                self._start(request, is_late=False)

    def _sort_waiting_owners(self) -> list[str]:
        """Return the owners of waiting requests: who has used the generators least comes first, and
        of two who are equal the owner of the older request.
        """
        return sorted(
            self._waiting, key=lambda owner: (self._used_s[owner], self._waiting[owner][0].number)
        )

    def _find_waiting(self, owner: str, version: int) -> list[_Request]:
        """Return an owner's waiting requests for a version, oldest first."""
        return [one for one in self._waiting[owner] if one.version == version]

    def _waits_for(self, version: int | None) -> bool:
        """Return whether any request waits for a version."""
        for requests in self._waiting.values():
            for request in requests:
                if request.version == version:
                    return True
        return False

    def _has_room(self, request: _Request) -> bool:
        is_alone = not self._num_sequences.keys() - {request.owner}
        most = self._most if is_alone else self._capacity
        return request.version == self._version and self._num_sequences.total() < most

    def _start(self, request: _Request, *, is_late: bool) -> None:
        self._leave(request)
        if not request.started.done():
            request.is_late = is_late
            request.is_first = not self._running
            self._running[request] = None
            self._num_sequences[request.owner] += request.num_sequences
            self._is_idle.clear()
            request.started.set_result(None)

    def _leave(self, request: _Request) -> None:
        """Remove a request from those that wait or run."""
        self._charge()
        if request in self._running:
            del self._running[request]
            self._num_sequences[request.owner] -= request.num_sequences
            self._num_sequences = +self._num_sequences
        elif request in (own := self._waiting.get(request.owner, [])):
            own.remove(request)
            if not own:
                del self._waiting[request.owner]
        if not self._running:
            self._is_idle.set()

    def _drop_cancelled(self) -> None:
        """Drop the oldest requests of each owner that were cancelled and have not noticed yet."""
        for own in list(self._waiting.values()):
            for request in list(itertools.takewhile(lambda one: one.started.done(), own)):
                self._leave(request)

    def _schedule_end(self) -> None:
        """Schedule a look at whether the turn is over (`_end_turn_if_over`)."""
        if not self._running:
            return
        loop, at_s = asyncio.get_running_loop(), self._began_s + LONGEST_TURN_S
        if self._waiting or len(self._num_sequences) > 1:
            at_s = min(at_s, max(self._compute_end_s(), loop.time() + AGAIN_S))
        if self._timer is not None:
            # An earlier look plans the next one itself.
            if self._timer.when() <= at_s:
                return
            self._timer.cancel()
        self._timer = loop.call_at(at_s, self._end_turn_if_over)

    def _compute_end_s(self) -> float:
        """Return the earliest time at which the turn may end for another owner."""
        return self._began_s + max(
            self._switch_s, TURN_S * max(one.patience for one in self._running)
        )

    def _end_turn_if_over(self) -> None:
        """Interrupt the running requests if an owner who waits is far enough behind; else look
        again later.
        """
        self._timer = None
        self._charge()
        if self._change is not None or not self._running:
            return
        # An owner who joined late may wait inside the engine, behind the owner who began the turn.
        late = {one.owner for one in self._running if one.is_late}
        now_s = asyncio.get_running_loop().time()
        may_end = now_s >= self._compute_end_s()
        is_over = may_end and any(map(self._is_behind, {*self._waiting, *late}))
        if is_over or now_s >= self._began_s + LONGEST_TURN_S:
            self._begin_change(self._interrupt_all())
        else:
            self._schedule_end()

    def _begin_change(self, change: Awaitable[None]) -> None:
        async def change_and_start() -> None:
            try:
                await change
            finally:
                # Only now may requests start: until here the generators hold no version, or end
                # the calls that they run.
                self._change = None
                self._start_ready()

        self._change = asyncio.create_task(change_and_start(), name="change of turns")

    async def _switch(self, version: int, owner: str) -> None:
        began_s, self._version = asyncio.get_running_loop().time(), None
        try:
            await self._pull(version)
        except Exception as error:  # noqa: BLE001  (of those who wait for the version)
            for one in list(self._waiting):
                for request in self._find_waiting(one, version):
                    self._leave(request)
                    if not request.started.done():
                        request.started.set_exception(error)
        else:
            self._version, self._paid_by = version, owner
        self._switch_s = asyncio.get_running_loop().time() - began_s
        if len(self._active) > 1 and owner in self._used_s:
            self._used_s[owner] += self._switch_s

    async def _interrupt_all(self) -> None:
        # Again and again, because an interruption may miss a request that is on its way.
        while self._running:
            with contextlib.suppress(RunError):  # of a backend that is lost, where all calls fail
                await self._interrupt()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(AGAIN_S):
                    await self._is_idle.wait()
