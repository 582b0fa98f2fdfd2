"""Lock for devices that trainer and generators share: one side computes while the other sleeps.

    lock = DeviceLock(trainer=trainer, generators=generators, pull=pull)
    pool = GeneratorPool(lock.generators, trainer=lock.trainer, store=store)

Calls of one side overlap; a call of the other side waits until they have ended, and then takes the
devices.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

from actors.calls import ActorGroup, ActorLostError
from actors.recovery import Role
from rl.types import ServeResult

Side = Literal["trainer", "generators"]

Pull = Callable[
    [int, Sequence[ActorGroup]], Awaitable[tuple[ServeResult, Sequence[ActorLostError]]]
]
"""`GeneratorPool.pull`."""

_NEEDS_NO_DEVICE = frozenset({"abort", "close", "finish_saving"})
_NEEDS_NO_WEIGHTS = frozenset({"pull_model_state_dict"})


class DeviceLock:
    """Owner of the shared devices; at first the trainer holds them and the generators sleep."""

    def __init__(
        self, *, trainer: ActorGroup, generators: Sequence[ActorGroup], pull: Pull
    ) -> None:
        self._groups: dict[Side, Sequence[ActorGroup]] = {
            "trainer": [trainer],
            "generators": generators,
        }
        self._pull = pull
        self._holder: Side = "trainer"
        self._num_calls = 0
        self._changed = asyncio.Condition()
        self._served: int | None = None
        """Version that generators pull when they wake: they sleep without weights."""
        self._have_weights = False
        self.trainer = LockedRole(trainer, lock=self, side="trainer")
        self.generators = [LockedRole(g, lock=self, side="generators") for g in generators]

    @asynccontextmanager
    async def held(self, side: Side, endpoint: str, args: tuple[Any, ...]) -> AsyncIterator[None]:
        """Give `side` the devices for a call, with weights in the generators if the endpoint needs
        them.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self._holder == side or self._num_calls == 0)
            if self._holder != side:
                await self._hand_over(side)
            if (
                side == "generators"
                and endpoint not in _NEEDS_NO_WEIGHTS
                and not self._have_weights
            ):
                await self._pull_again()
            self._num_calls += 1
        try:
            yield
            if endpoint == "pull_model_state_dict":
                self._served, self._have_weights = args[0].version, True
        finally:
            async with self._changed:
                self._num_calls -= 1
                self._changed.notify_all()

    async def _hand_over(self, side: Side) -> None:
        await self._call_all(self._holder, "sleep")
        self._have_weights = False
        await self._call_all(side, "wake")
        self._holder = side

    async def _pull_again(self) -> None:
        """Pull and check the version that was served before the sleep; before the first pull do
        nothing.
        """
        if self._served is not None:
            _, lost = await self._pull(self._served, self._groups["generators"])
            if lost:
                raise lost[0]
            self._have_weights = True

    async def _call_all(self, side: Side, endpoint: str) -> None:
        groups = self._groups[side]
        await asyncio.gather(*(group.call(endpoint) for group in groups))


class LockedRole(Role):
    """A role whose calls wait for the devices; it is not restarted."""

    def __init__(self, group: ActorGroup, *, lock: DeviceLock, side: Side) -> None:
        super().__init__(group)
        self._lock = lock
        self._side: Side = side

    async def call(
        self, endpoint: str, *args: Any, extra_s: float = 0.0, **kwargs: Any
    ) -> list[Any]:
        """Call `endpoint` on every rank; the deadline counts from when the devices are
        available.
        """
        if endpoint in _NEEDS_NO_DEVICE:
            return await super().call(endpoint, *args, extra_s=extra_s, **kwargs)
        async with self._lock.held(self._side, endpoint, args):
            return await super().call(endpoint, *args, extra_s=extra_s, **kwargs)
