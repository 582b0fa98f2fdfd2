"""The generators of a run, each of which is replaced when it is lost while the others go on.

    pool = GeneratorPool(generators, start=start, supervisor=supervisor, ...)
    pool.watch()
    sampler = Router([ActorSampler(slot) for slot in pool.slots], pool=pool)
    await pool.serve(version)

A generator is lost when one of its processes ends or its engine fails: told by a call, or by a look at the
processes twice a second. It is started again in the background, pulls the version that is served, is checked
as after any pull, and only then takes part. `serve` and those who join exclude each other, so that all that
are up hold the same version. Nobody waits for a replacement as long as another generator is up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

from actors.background import in_background
from actors.calls import LOOK_EVERY_S, PEER_GRACE_S, ActorLostError, ActorTimeoutError, Group, Timeouts
from actors.supervision import WRONG_WEIGHTS, Supervisor, first_line
from actors.sync_check import SyncCheck
from actors.vllm.errors import EngineFailedError
from rl.errors import RunError
from rl.types import ServeResult
from rl.weights.store import WeightStore

logger = logging.getLogger(__name__)

T = TypeVar("T")


class WatchedGroup(Group, Protocol):
    """Whose processes can be looked at: an `ActorGroup`."""

    def dead(self) -> list[int]:
        """As `ActorGroup.dead`."""
        ...

    async def while_alive(self, answer: Awaitable[T], what: str) -> T:
        """As `ActorGroup.while_alive`."""
        ...

    async def seen_dead(self, within_s: float) -> list[int]:
        """As `ActorGroup.seen_dead`."""
        ...


class Slot:
    """A generator's place in the pool; a `Group` of whoever is in it."""

    def __init__(
        self, group: WatchedGroup, *, on_loss: Callable[[Slot, WatchedGroup, ActorLostError], None]
    ) -> None:
        """`on_loss` is told who was lost, as often as that shows."""
        self.group = group
        self.is_up = True
        self._on_loss = on_loss

    @property
    def name(self) -> str:
        return self.group.name

    @property
    def timeouts(self) -> Timeouts:
        return self.group.timeouts

    def call(self, endpoint: str, *args: Any, limit: str, **kwargs: Any) -> Coroutine[Any, Any, list[Any]]:
        """As `ActorGroup.call`; `ActorLostError` also where the engine has failed, and at once while the
        generator is being started again."""
        if not self.is_up:
            return self._refused(endpoint)
        return self._answered(self.group, self.group.call(endpoint, *args, limit=limit, **kwargs))

    async def _answered(self, group: WatchedGroup, answer: Coroutine[Any, Any, list[Any]]) -> list[Any]:
        try:
            return await answer
        except ActorLostError as error:
            self._on_loss(self, group, error)
            raise
        except EngineFailedError as error:
            lost = ActorLostError(f"{self.name}: {error}", role=self.name)
            self._on_loss(self, group, lost)
            raise lost from error

    async def _refused(self, endpoint: str) -> list[Any]:
        raise ActorLostError(f"{self.name}.{endpoint} failed: it is being started again", role=self.name)


class GeneratorPool:
    """Every generator of a run has its slot."""

    def __init__(
        self,
        generators: Sequence[WatchedGroup],
        *,
        start: Callable[[int], Awaitable[WatchedGroup]],
        supervisor: Supervisor,
        trainer: WatchedGroup,
        store: WeightStore,
        check: SyncCheck,
    ) -> None:
        """
        Args:
            start: ends what is left of the generator of this number and starts it again, without weights.
            trainer: who pushes, and has the store's volumes.
        """
        self.slots = tuple(Slot(group, on_loss=self._lost) for group in generators)
        self.trainer = trainer
        self._start = start
        self._supervisor = supervisor
        self._store = store
        self._check = check
        self._membership = asyncio.Lock()
        """Held by whoever pulls: `serve`, or one who joins."""
        self._changed = asyncio.Event()
        self._version: int | None = None
        """That all who are up hold, or are about to."""
        self._served = ServeResult()
        """Of the last pull that was checked."""
        self._failure: RunError | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._is_closed = False

    def watch(self) -> None:
        """From now on a generator is replaced also when nobody asks it for anything."""
        self._tasks.append(in_background(self._watch(), name="watch over the generators"))

    def up(self) -> list[int]:
        """Who can be asked now.

        Raises:
            RunError: one of them was lost too often.
        """
        if self._failure is not None:
            raise self._failure
        return [number for number, slot in enumerate(self.slots) if slot.is_up]

    async def one_up(self) -> None:
        """Until there is one; the restarts, whose number is limited, have deadlines.

        Raises:
            RunError: one of them was lost too often.
        """
        while not self.up():
            self._changed.clear()
            await self._changed.wait()

    async def serve(self, version: int) -> ServeResult:
        """All that are up pull this version, and whoever joins later does; returns when one serves it.

        Raises:
            ActorLostError: the trainer is lost.
            RunError: a pull has failed, or a generator was lost too often.
        """
        async with self._membership:
            self.up()  # may say that one is lost for good
            self._version = version
            self._served = await self._pull(version, [s for s in self.slots if s.is_up], lost=[])
        # Where the last one was lost meanwhile: one who joins has pulled this version.
        await self.one_up()
        return self._served

    def close(self) -> Sequence[Slot]:
        """Replace nobody from now on; returns those that are up."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        return [slot for slot in self.slots if slot.is_up]

    @asynccontextmanager
    async def without_weights(self) -> AsyncIterator[None]:
        """Nobody pulls or joins meanwhile, and what was served counts no more: the store is replaced."""
        async with self._membership:
            self._version = None
            yield

    async def use_store(self) -> None:
        """All that are up drop what they do, and pull from the store as it is now; in `without_weights`."""
        await asyncio.gather(*(self._use_store(slot) for slot in self.slots if slot.is_up))

    async def _use_store(self, slot: Slot) -> None:
        group = slot.group
        try:
            await slot.call("abort", None, limit="close_s")
            await slot.call("use_store", self._store, limit="sync_s")
        except ActorLostError as error:
            logger.info("%s", error)  # it gets the store when it joins
        except ActorTimeoutError as error:
            # It is not the trainer that is to be started anew for this.
            self._lost(slot, group, ActorLostError(str(error), role=slot.name))

    async def _pull(
        self, version: int, generators: Sequence[Group], *, lost: list[ActorLostError]
    ) -> ServeResult:
        """`lost` takes the errors of those that are lost meanwhile; an error is raised if the trainer is."""
        pull, what = self._check.pull(version, generators=generators, lost=lost), f"pull of version {version}"
        try:
            # From a dead trainer's memory nothing comes, and a generator would only see that at its deadline.
            return await self.trainer.while_alive(pull, what)
        except (ActorLostError, *WRONG_WEIGHTS):
            raise
        except RunError as error:
            # Or it is the first to hear of it.
            if dead := await self.trainer.seen_dead(PEER_GRACE_S):
                message = f"{self.trainer.name}.{what} failed: {first_line(error)}"
                raise ActorLostError(message, role=self.trainer.name, ranks=dead) from error
            raise

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            for slot in self.slots:
                if slot.is_up and (dead := slot.group.dead()):
                    ranks = ", ".join(map(str, dead))
                    message = f"rank {ranks} is dead: its process ended"
                    self._lost(slot, slot.group, ActorLostError(message, role=slot.name, ranks=dead))

    def _lost(self, slot: Slot, group: WatchedGroup, error: ActorLostError) -> None:
        if slot.group is not group or not slot.is_up:
            return  # known already
        slot.is_up = False
        if self._is_closed:
            return
        again = self._replace(slot, reason=first_line(error))
        self._tasks.append(in_background(again, name=f"restart of {slot.name}"))

    async def _replace(self, slot: Slot, *, reason: str) -> None:
        number = self.slots.index(slot)

        async def start() -> None:
            group = await self._start(number)
            async with self._membership:
                await self._join(slot, group)

        try:
            await self._supervisor.again(slot.name, reason=reason, start=start, done="serves again")
        except asyncio.CancelledError:
            # Also where it comes from what was awaited: nobody is to wait for this one any more.
            self._failure = RunError(f"{slot.name} is not started again any more")
            self._changed.set()
            raise
        except RunError as error:
            self._failure = error
        except Exception as error:  # noqa: BLE001  (raised where somebody waits for a generator)
            self._failure = RunError(
                f"{slot.name} was not started again: {type(error).__name__}: {first_line(error)}"
            )
            self._failure.__cause__ = error
        self._changed.set()

    async def _join(self, slot: Slot, group: WatchedGroup) -> None:
        """Take the slot with the weights that the others have."""
        joining = Slot(group, on_loss=lambda *_: None)
        await joining.call("use_store", self._store, limit="sync_s")
        if self._version is not None:
            lost: list[ActorLostError] = []
            try:
                self._served = await self._pull(self._version, [joining], lost=lost)
            except ActorLostError as error:
                # The trainer: what the others hold counts no more either, all wait for its next version.
                logger.info("%s joins without weights: %s", slot.name, error)
            if lost:
                raise lost[0]
        slot.group, slot.is_up = group, True
