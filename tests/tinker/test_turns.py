"""Turns of the snapshots, with generators that only record what they serve."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps

import pytest

from rl.tinker.turns import Turns
from tests.support.fake_tinker import settled


class Room:
    """Requests that run until the test ends them."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.failure: Exception | None = None
        self.turns = Turns(self.serve)
        self.ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def serve(self, version: int) -> None:
        await asyncio.sleep(0)
        if self.failure is not None:
            raise self.failure
        self.log.append(f"serves {version}")

    def ask(self, name: str, version: int) -> None:
        self.ends[name] = asyncio.Event()

        async def request() -> None:
            async with self.turns.serving(version):
                self.log.append(name)
                await self.ends[name].wait()

        self.tasks[name] = asyncio.create_task(request())

    async def end(self, *names: str) -> None:
        for name in names:
            self.ends[name].set()
        await asyncio.gather(*(self.tasks[name] for name in names))
        await settled()

    async def seen(self) -> list[str]:
        """Return the calls recorded since the last look."""
        await settled()
        found, self.log = self.log, []
        return found


def in_loop(test: Callable[[], Coroutine[None, None, None]]) -> Callable[[], None]:
    @wraps(test)
    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), 10))

    return run


@in_loop
async def test_requests_of_one_snapshot_run_at_once_and_later_ones_do_not_overtake():
    room = Room()
    room.ask("a1", 1)
    room.ask("a2", 1)
    assert await room.seen() == ["serves 1", "a1", "a2"]
    for name, version in (("c1", 3), ("a3", 1), ("b1", 2), ("c2", 3)):
        room.ask(name, version)
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


@in_loop
async def test_cancelled_requests_block_no_other():
    """A session that ends cancels several at once; the end of one would admit another cancelled one."""
    room = Room()
    room.ask("a1", 1)
    await settled()
    for name, version in (("b1", 2), ("a2", 1), ("c1", 3)):
        room.ask(name, version)
    await settled()
    for name in ("b1", "a2"):
        room.tasks[name].cancel()
    assert await room.seen() == ["serves 1", "a1"]
    room.tasks["a1"].cancel()
    assert await room.seen() == ["serves 3", "c1"]
    await room.end("c1")


@in_loop
async def test_snapshot_that_cannot_be_served_fails_its_requests_only():
    room = Room()
    room.failure = ArithmeticError("the pull failed")
    room.ask("a1", 1)
    room.ask("a2", 1)
    await settled()
    for name in ("a1", "a2"):
        with pytest.raises(ArithmeticError, match="the pull failed"):
            await room.tasks[name]
    room.failure = None
    room.ask("b1", 2)
    assert await room.seen() == ["serves 2", "b1"]
    await room.end("b1")
