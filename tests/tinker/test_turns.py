"""Turns of the snapshots, with generators that only record what they serve."""

from __future__ import annotations

import asyncio

import pytest

from rl.tinker.backend import Turns
from tests.support.fake_tinker import settled

pytestmark = pytest.mark.anyio


class Room:
    """Requests that run until the test ends them."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.turns = Turns(self.serve)
        self.ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def serve(self, version: int) -> None:
        await asyncio.sleep(0)
        if version < 0:
            raise ArithmeticError("the pull failed")
        self.log.append(f"serves {version}")

    def ask(self, *names: str) -> None:
        """Start requests such as "b1" for the version of their letter, 2."""
        for name in names:
            self.ends[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self.request(name))

    async def request(self, name: str) -> None:
        async with self.turns.serving("xabc".index(name[0]) or -1):
            self.log.append(name)
            await self.ends[name].wait()

    async def end(self, *names: str) -> None:
        for name in names:
            self.ends[name].set()
        await asyncio.gather(*(self.tasks[name] for name in names))

    async def seen(self) -> list[str]:
        """Return the calls recorded since the last look."""
        await settled()
        found, self.log = self.log, []
        return found


async def test_requests_of_one_snapshot_run_at_once_and_later_ones_do_not_overtake():
    room = Room()
    room.ask("a1", "a2")
    assert await room.seen() == ["serves 1", "a1", "a2"]
    room.ask("c1", "a3", "b1", "c2")
    assert await room.seen() == []
    await room.end("a1")
    assert await room.seen() == []
    await room.end("a2")
    assert await room.seen() == ["serves 3", "c1", "c2"]
    await room.end("c1", "c2")
    assert await room.seen() == ["serves 1", "a3"]
    await room.end("a3")
    assert await room.seen() == ["serves 2", "b1"]
    await room.end("b1")
    room.ask("b2")
    assert await room.seen() == ["b2"]  # still served
    await room.end("b2")
    room.ask("x1", "x2")
    for name in ("x1", "x2"):
        with pytest.raises(ArithmeticError, match="the pull failed"):
            await room.tasks[name]
    room.ask("b3")
    assert await room.seen() == ["serves 2", "b3"]
    await room.end("b3")


async def test_cancelled_requests_block_no_other_and_their_weights_are_not_served():
    """A session that ends cancels several at once; the end of one would admit another cancelled one."""
    room = Room()
    room.ask("a1")
    await settled()
    room.ask("b1", "a2", "c1")
    await settled()
    for name in ("b1", "a2"):
        room.tasks[name].cancel()
    assert await room.seen() == ["serves 1", "a1"]
    room.tasks["a1"].cancel()
    assert await room.seen() == ["serves 3", "c1"]
    room.ask("b2")
    await settled()
    room.tasks["b2"].cancel()
    await room.end("c1")
    room.ask("b3")
    assert await room.seen() == ["serves 2", "b3"]
    await room.end("b3")
