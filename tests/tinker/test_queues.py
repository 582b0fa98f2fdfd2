"""Queues of the owners at the trainer and at the sampler, and the gate of the weights."""

from __future__ import annotations

import asyncio
from collections import defaultdict

import pytest

from rl.tinker.queues import FairLock, FairSlots, VersionGate
from tests.support.fake_tinker import settled
from tests.support.virtual_time import now_s, run_in_virtual_time

pytestmark = pytest.mark.anyio
BASE = 0


class Room:
    """Requests by name, which run until the test ends them."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.ends: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    async def run(self, name: str) -> None:
        self.log.append(name)
        await self.ends[name].wait()

    async def request(self, name: str) -> None:
        raise NotImplementedError

    async def after(self, *names: str) -> list[str]:
        """Start these requests and return what was recorded since the last look."""
        self.tasks |= {name: asyncio.create_task(self.request(name)) for name in names}
        await settled()
        found, self.log = self.log, []
        return found

    async def ended(self, *names: str) -> list[str]:
        for name in names:
            self.ends[name].set()
        return await self.after()

    async def cancelled(self, *names: str) -> list[str]:
        for name in names:
            self.tasks[name].cancel()
        return await self.after()


# FairLock


def test_owners_take_turns_at_the_trainer():
    async def main() -> list[str]:
        lock, order = FairLock(), []

        async def call(name: str) -> None:
            async with lock.lock_for(name[0]):
                order.append(name)
                await asyncio.sleep(1)

        calls = [
            asyncio.create_task(call(name)) for name in ("a1", "a2", "a3", "a4", "b1", "c1", "b2")
        ]
        await asyncio.sleep(0.5)
        calls[2].cancel()
        await asyncio.wait(calls)
        async with lock.lock_for("d"):
            return order

    assert run_in_virtual_time(main())[0] == ["a1", "a2", "b1", "c1", "a4", "b2"]


# FairSlots


class Slots(Room):
    """Requests such as "a1x4": the first of owner a, for 4 slots."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.slots = FairSlots(capacity)

    async def request(self, name: str) -> None:
        async with self.slots.take(name[0], int(name.partition("x")[2] or 1)):
            await self.run(name)


async def test_owner_leaves_room_for_the_next_ones():
    """Of 64 slots a busy owner gets 56, a second one 7, and a third one the last."""
    slots = Slots(64)
    assert len(await slots.after(*(f"a{n}x4" for n in range(50)))) == 14
    assert len(await slots.after(*(f"b{n}" for n in range(50)))) == 7
    assert len(await slots.after(*(f"c{n}" for n in range(50)))) == 1
    assert await slots.after("d0") == []
    # A free slot goes to the owner who has none, although others have waited for longer.
    assert await slots.ended("b0") == ["d0"]
    assert await slots.ended("c0") == ["c1"]


async def test_owners_who_wait_take_turns_and_those_of_one_owner_keep_their_order():
    slots = Slots(8)
    assert await slots.after("a1x7", "b1") == ["a1x7", "b1"]
    assert await slots.after("a2x2", "a3x2", "b2x2", "b3x2", "c1x2") == []
    # c has nothing, so it waits for one slot; a and b get theirs in turns.
    assert await slots.ended("a1x7") == ["a2x2", "b2x2", "c1x2"]
    assert await slots.ended("a2x2", "b1") == ["a3x2"]
    assert await slots.ended("b2x2") == ["b3x2"]


async def test_request_for_more_than_there_is_takes_what_its_owner_may_have():
    slots = Slots(8)
    assert await slots.after("a1x1000", "a2", "b1x1000") == ["a1x1000", "b1x1000"]
    assert await slots.ended("a1x1000") == ["a2"]
    await slots.ended("a2", "b1x1000")
    assert await slots.after("c1x7", "c2x7") == ["c1x7"]
    assert await Slots(1).after("a1x4") == ["a1x4"]


async def test_cancelled_requests_leave_their_slots_to_others():
    slots = Slots(8)
    await slots.after("a1x7", "b1")
    await slots.after("c1", "d1", "d2")
    assert await slots.cancelled("c1") == []
    assert await slots.cancelled("b1") == ["d1"]
    # Admitted and cancelled at once: it gives back what it never used.
    slots.ends["a1x7"].set()
    await asyncio.sleep(0)
    assert slots.slots._held == {"d": 2}
    await slots.cancelled("d2")
    assert slots.tasks["d2"].cancelled()
    assert slots.slots._held == {"d": 1}
    assert await slots.after("e1x7") == ["e1x7"]


def test_small_request_of_another_owner_is_not_kept_waiting_by_large_ones():
    async def main() -> float:
        slots = FairSlots(64)

        async def draw(owner: str, count: int, seconds: float) -> None:
            async with slots.take(owner, count):
                await asyncio.sleep(seconds)

        busy = [asyncio.create_task(draw(key, 1, 100.0)) for key in "ab" * 500]
        await asyncio.sleep(5)
        longest_s = 0.0
        for _ in range(20):
            began_s = now_s()
            await draw("you", 1, 0.1)
            longest_s = max(longest_s, now_s() - began_s)
            await asyncio.sleep(1.0)
        for one in busy:
            one.cancel()
        await asyncio.wait(busy)
        assert not slots._held
        assert not slots._waiting
        return longest_s

    assert run_in_virtual_time(main())[0] == pytest.approx(0.1)


# VersionGate


class Gate(Room):
    """Requests such as "b1" for the weights of their letter: a 1, b 2, c 3, or "-1" for the base;
    those of "x" cannot be switched to."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = VersionGate(self.switch, weights=BASE)

    async def switch(self, weights: int) -> None:
        await asyncio.sleep(0)
        if weights < 0:
            raise ArithmeticError("the pull failed")
        self.log.append(f"has {weights}")

    async def request(self, name: str) -> None:
        async with self.gate.use(-1 if name[0] == "x" else "-abc".index(name[0])):
            await self.run(name)


async def test_requests_for_the_same_weights_run_together_and_later_ones_do_not_overtake():
    gate = Gate()
    assert await gate.after("-1", "-2") == ["-1", "-2"]  # the base is there from the start
    assert await gate.after("a1", "-3", "a2", "b1") == []
    assert await gate.ended("-1") == []
    assert await gate.ended("-2") == ["has 1", "a1"]
    assert await gate.ended("a1") == ["has 0", "-3"]
    assert await gate.ended("-3") == ["has 1", "a2"]
    assert await gate.ended("a2") == ["has 2", "b1"]
    assert await gate.after("b2") == ["b2"]
    await gate.ended("b1", "b2")
    assert await gate.after("b3") == ["b3"]


async def test_switch_that_fails_is_the_error_of_those_who_wait_for_these_weights():
    gate = Gate()
    assert await gate.after("x1", "x2", "-1") == ["has 0", "-1"]
    for name in ("x1", "x2"):
        with pytest.raises(ArithmeticError, match="the pull failed"):
            await gate.tasks[name]


async def test_cancelled_requests_block_no_other_and_their_weights_are_not_switched_to():
    """A session that ends cancels several at once; the end of one would admit another."""
    gate = Gate()
    assert await gate.after("a1") == ["has 1", "a1"]
    await gate.after("b1", "a2", "c1")
    assert await gate.cancelled("b1") == ["a2"]
    assert await gate.cancelled("a2") == []
    assert await gate.cancelled("a1") == ["has 3", "c1"]
    await gate.after("b2")
    await gate.cancelled("b2")
    await gate.ended("c1")
    assert await gate.after("b3") == ["has 2", "b3"]
    # Cancelled while the weights change: the next one gets in.
    await gate.ended("b3")
    gate.tasks["a3"] = asyncio.create_task(gate.request("a3"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert await gate.cancelled("a3") == ["has 1"]
    assert await gate.after("b4") == ["has 2", "b4"]
    # Admitted and cancelled at once: it counts no more.
    gate.ends["b4"].set()
    await settled()
    gate.tasks["b5"] = asyncio.create_task(gate.request("b5"))
    await asyncio.sleep(0)
    await gate.cancelled("b5")
    assert await gate.after("a4") == ["has 1", "a4"]
