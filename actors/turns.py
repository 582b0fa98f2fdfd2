"""Trainer and generators that share their devices: whoever is called has them, the others sleep.

    turns = Turns(trainer=fleet.trainer, generators=fleet.generators, check=fleet.check)
    learner = ActorLearner(turns.trainer)
    sampler = Router([ActorSampler(generator) for generator in turns.generators])

Calls of one side overlap; a call of the other side waits until they have ended, and then takes the devices.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

from actors.calls import Group
from actors.sync_check import SyncCheck

Side = Literal["trainer", "generators"]

_NEEDS_NO_DEVICE = frozenset({"abort", "close", "finish_saving", "random_states", "restore_random_states"})
_NEEDS_NO_WEIGHTS = frozenset({"pull_model_state_dict"})


class Turns:
    """Who has the devices. At first the trainer, with the generators asleep."""

    def __init__(self, *, trainer: Group, generators: Sequence[Group], check: SyncCheck) -> None:
        """`check` is of every pull."""
        self._groups: dict[Side, Sequence[Group]] = {"trainer": [trainer], "generators": generators}
        self._check = check
        self._holder: Side = "trainer"
        self._num_calls = 0
        self._changed = asyncio.Condition()
        self._served: int | None = None
        """Version that generators pull when they wake: they sleep without weights."""
        self._have_weights = False
        self.trainer = TakingTurns(trainer, turns=self, side="trainer")
        self.generators = [TakingTurns(g, turns=self, side="generators") for g in generators]

    @asynccontextmanager
    async def turn(self, side: Side, endpoint: str, args: tuple[Any, ...]) -> AsyncIterator[None]:
        """Within it `side` has the devices, and generators have weights if the endpoint needs some."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._holder == side or self._num_calls == 0)
            if self._holder != side:
                await self._hand_over(side)
            if side == "generators" and endpoint not in _NEEDS_NO_WEIGHTS and not self._have_weights:
                await self._pull_again()
            self._num_calls += 1
        try:
            yield
            if endpoint == "pull_model_state_dict":
                self._served, self._have_weights = args[0], True
        finally:
            async with self._changed:
                self._num_calls -= 1
                self._changed.notify_all()

    async def _hand_over(self, side: Side) -> None:
        await self._all(self._holder, "sleep")
        self._have_weights = False
        await self._all(side, "wake")
        self._holder = side

    async def _pull_again(self) -> None:
        """What was served before they slept, checked once more; before the first pull there is nothing."""
        if self._served is not None:
            await self._check.pull(self._served, generators=self._groups["generators"])
            self._have_weights = True

    async def _all(self, side: Side, endpoint: str) -> None:
        await asyncio.gather(*(g.call(endpoint, limit="sync_s") for g in self._groups[side]))


class TakingTurns:
    """An `ActorGroup` whose calls wait for the devices."""

    def __init__(self, group: Group, *, turns: Turns, side: Side) -> None:
        self.name = group.name
        self.timeouts = group.timeouts
        self._group = group
        self._turns = turns
        self._side: Side = side

    async def call(self, endpoint: str, *args: Any, limit: str, **kwargs: Any) -> list[Any]:
        """As `ActorGroup.call`; the deadline counts from when the devices are there."""
        if endpoint in _NEEDS_NO_DEVICE:
            return await self._group.call(endpoint, *args, limit=limit, **kwargs)
        async with self._turns.turn(self._side, endpoint, args):
            return await self._group.call(endpoint, *args, limit=limit, **kwargs)
