"""Turns of the snapshots, with generators that only record what they serve."""

from __future__ import annotations

import asyncio
from collections import defaultdict

import pytest

from rl.tinker.backend import Turns
from tests.support.fake_tinker import settled

pytestmark = pytest.mark.anyio


class Room:
    """Requests such as "b1" for the version of their letter, 2; they run until the test ends them."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.turns = Turns(self.serve)
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.ends: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    async def serve(self, version: int) -> None:
        await asyncio.sleep(0)
        if version < 0:
            raise ArithmeticError("the pull failed")
        self.log.append(f"serves {version}")

    async def request(self, name: str) -> None:
        async with self.turns.serving("xabc".index(name[0]) or -1):
            self.log.append(name)
            await self.ends[name].wait()

    async def after(self, *names: str) -> list[str]:
        """Start these requests and return the calls recorded since the last look."""
        self.tasks |= {name: asyncio.create_task(self.request(name)) for name in names}
        await settled()
        found, self.log = self.log, []
        return found

    async def ended(self, *names: str) -> list[str]:
        """End these requests and return the calls recorded since the last look."""
        for name in names:
            self.ends[name].set()
        await asyncio.gather(*(self.tasks[name] for name in names))
        return await self.after()


async def test_requests_of_one_snapshot_run_at_once_and_later_ones_do_not_overtake():
    room = Room()
    assert await room.after("a1", "a2") == ["serves 1", "a1", "a2"]
    assert await room.after("c1", "a3", "b1", "c2") == []
    assert await room.ended("a1") == []
    assert await room.ended("a2") == ["serves 3", "c1", "c2"]
    assert await room.ended("c1", "c2") == ["serves 1", "a3"]
    assert await room.ended("a3") == ["serves 2", "b1"]
    assert await room.ended("b1") == []
    assert await room.after("b2") == ["b2"]  # still served
    await room.ended("b2")
    await room.after("x1", "x2")
    for name in ("x1", "x2"):
        with pytest.raises(ArithmeticError, match="the pull failed"):
            await room.tasks[name]
    assert await room.after("b3") == ["serves 2", "b3"]
    await room.ended("b3")


async def test_cancelled_requests_block_no_other_and_their_weights_are_not_served():
    """A session that ends cancels several at once; the end of one would admit another cancelled one."""
    room = Room()
    assert await room.after("a1") == ["serves 1", "a1"]
    await room.after("b1", "a2", "c1")
    for name in ("b1", "a2"):
        room.tasks[name].cancel()
    assert await room.after() == []
    room.tasks["a1"].cancel()
    assert await room.after() == ["serves 3", "c1"]
    await room.after("b2")
    room.tasks["b2"].cancel()
    await room.ended("c1")
    assert await room.after("b3") == ["serves 2", "b3"]
    await room.ended("b3")
