"""Adapters on their way into a generator that has little room, in virtual time."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from actors.tinker import MAX_LOADS, ROOM_S, ActorWorkers, _Sampler
from actors.vllm.adapters import AdapterRoomError, MissingAdapterError
from rl.tinker.types import LimitReachedError
from tests.support.virtual_time import now_s, run_in_virtual_time


class Generator:
    """A pool of one generator, which refuses adapters until `room_s` and drops `num_drops` times
    what it has loaded.
    """

    def __init__(self, *, room_s: float = 0.0, num_drops: int = 0) -> None:
        self.room_s, self.num_drops = room_s, num_drops
        self.loaded: list[int] = []
        self.members: tuple[()] = ()
        config = SimpleNamespace(generator=SimpleNamespace(max_num_seqs=8))
        cluster = SimpleNamespace(trainer=None, pool=self, config=config)
        self.workers = ActorWorkers(cluster, resources=None)  # type: ignore[arg-type]
        self.sampler = _Sampler(group=None, client=None)  # type: ignore[arg-type]

    async def load_adapter(self, version: int, *, generators: object) -> None:
        await asyncio.sleep(0.1)
        if now_s() < self.room_s:
            raise AdapterRoomError("beside 7 (used by 3 requests)")
        self.loaded.append(version)

    async def ask(self, adapter: int) -> int:
        async def call() -> int:
            if self.num_drops:
                self.num_drops -= 1
                raise MissingAdapterError("it is not loaded")
            return adapter

        return await self.workers._call_with_adapter(self.sampler, adapter, call)


def test_adapter_is_loaded_once_for_all_requests_and_again_when_it_was_dropped():
    async def main() -> None:
        generator = Generator()
        asked = [asyncio.create_task(generator.ask(version)) for version in (5, 6, 5, 5)]
        await asyncio.sleep(0.05)
        asked[0].cancel()  # The others wait for the same load.
        assert await asyncio.gather(*asked[1:]) == [6, 5, 5]
        assert sorted(generator.loaded) == [5, 6]
        generator.num_drops = 1
        both = await asyncio.gather(generator.ask(5), generator.ask(6))
        assert list(both) == [5, 6]
        assert len(generator.loaded) == 3
        generator.num_drops = MAX_LOADS
        with pytest.raises(LimitReachedError, match="too little room for the adapters in use"):
            await generator.ask(5)

    run_in_virtual_time(main())


def test_adapter_without_room_waits_for_others_and_is_then_refused_by_who_holds_it():
    async def main() -> None:
        generator = Generator(room_s=ROOM_S / 2)
        assert await generator.ask(5) == 5
        generator.room_s = float("inf")
        began_s = now_s()
        asked = [asyncio.create_task(generator.ask(version)) for version in (6, 7, 8)]
        for one in asked:
            with pytest.raises(LimitReachedError, match=r"beside 7 \(used by 3 requests\)"):
                await one
        # Each waits from its own beginning, and not for those before it.
        assert now_s() - began_s == pytest.approx(ROOM_S, abs=1)
        generator.room_s = 0.0
        assert await generator.ask(6) == 6  # tried again

    run_in_virtual_time(main())
