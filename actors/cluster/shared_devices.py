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
from dataclasses import replace
from functools import partial
from typing import Literal

from actors.cluster.group import ActorGroup
from actors.launch.calls import ActorLostError
from rl.types import PullResult

Side = Literal["trainer", "generators"]

Pull = Callable[[int, Sequence[ActorGroup]], Awaitable[tuple[PullResult, Sequence[ActorLostError]]]]
"""`GeneratorPool.pull_and_check`."""


class DeviceLock:
    """Owner of the shared devices; at first the trainer holds them and the generators sleep.

    `trainer` and `generators` are the groups to call, whose calls wait for the devices. The groups
    that the lock was made of are for its own calls.
    """

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
        hold = partial(self.hold, "generators")
        self.trainer = replace(trainer, hold_devices=partial(self.hold, "trainer"))
        self.generators = [replace(group, hold_devices=hold) for group in generators]

    @asynccontextmanager
    async def hold(self, side: Side, *, pulls: int | None) -> AsyncIterator[None]:
        """Give `side` the devices for a call, with weights in the generators unless it pulls them.

        Args:
            pulls: version of the weights that the call pulls; None if it uses those that are there.
        """
        async with self._changed:
            # Calls under way need the devices to the end: the other side has no turn before.
            await self._changed.wait_for(lambda: self._holder == side or self._num_calls == 0)
            if self._holder != side:
                await self._switch_to(side)
            if side == "generators" and pulls is None and not self._have_weights:
                await self._pull_again()
            self._num_calls += 1

        # Outside of the condition: calls of one side overlap.
        try:
            yield
            if pulls is not None:
                self._served, self._have_weights = pulls, True
        finally:
            async with self._changed:
                self._num_calls -= 1
                self._changed.notify_all()

    async def _switch_to(self, side: Side) -> None:
        # One side frees its memory before the other takes it: both do not fit on a device.
        await self._call_all(self._holder, "sleep")
        self._have_weights = False
        await self._call_all(side, "wake")
        self._holder = side

    async def _pull_again(self) -> None:
        """Pull and check the version that was served before the sleep, if there was one."""
        if self._served is None:
            return
        _, lost = await self._pull(self._served, self._groups["generators"])
        if lost:
            raise lost[0]
        self._have_weights = True

    async def _call_all(self, side: Side, endpoint: Literal["sleep", "wake"]) -> None:
        groups = self._groups[side]
        await asyncio.gather(*(group.call(endpoint, timeout="sync_s") for group in groups))
