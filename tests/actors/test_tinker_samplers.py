"""Whose turn it is to sample, with generators that only write down what they are asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

import pytest

from actors.calls import ActorCallError, Timeouts
from actors.tinker_calls import BackendLostError
from actors.tinker_samplers import Snapshot, SnapshotServer
from rl.types import PullResult


class Generator:
    """A `Group` of one rank that pulls at once, or fails to."""

    def __init__(self, log: list[str], name: str = "generator") -> None:
        self.name = name
        self.timeouts = Timeouts()
        self.log = log
        self.failure: Exception | None = None

    def call(self, endpoint: str, *args: Any, limit: str, **kwargs: Any) -> Coroutine[Any, Any, list[Any]]:
        async def answer() -> list[Any]:
            await asyncio.sleep(0)
            if self.failure is not None:
                raise self.failure
            (version,) = args
            self.log.append(f"{self.name} pulls {version}")
            return [PullResult(policy_version=version, time_s=0.0, sums=())]

        assert endpoint == "pull_model_state_dict"
        return answer()


class Room:
    """A server with requests that run until they are told to end."""

    def __init__(self, num_replicas: int = 1) -> None:
        self.log: list[str] = []
        self.forgotten: list[int] = []
        self.generators = [Generator(self.log, f"g{i}") for i in range(num_replicas)]
        self.server = SnapshotServer(generators=self.generators, forget=self.forget)
        self.ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def forget(self, snapshot: Snapshot) -> None:
        self.forgotten.append(snapshot.version)

    def ask(self, name: str, snapshot: Snapshot, *, load: int = 1) -> None:
        self.ends[name] = asyncio.Event()

        async def request() -> None:
            async with self.server.serving(snapshot, load=load) as replica:
                self.log.append(f"{name} on {replica.generator.name}")
                await self.ends[name].wait()
            self.log.append(f"{name} ends")

        self.tasks[name] = asyncio.create_task(request())

    async def end(self, *names: str) -> None:
        for name in names:
            self.ends[name].set()
        await asyncio.gather(*(self.tasks[name] for name in names))
        await settled()

    def seen(self) -> list[str]:
        """What was written down since the last time."""
        found = list(self.log)
        self.log.clear()
        return found


async def settled() -> None:
    """Until nothing is left to do but wait."""
    for _ in range(20):
        await asyncio.sleep(0)


def snapshot(version: int) -> Snapshot:
    return Snapshot(version=version, sums=())


def in_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    @wraps(test)
    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), 10))

    return run


@in_loop
async def test_requests_of_one_snapshot_run_at_once_and_another_waits_for_them():
    room, a, b = Room(), snapshot(1), snapshot(2)
    room.ask("a1", a)
    room.ask("a2", a)
    await settled()
    assert room.seen() == ["g0 pulls 1", "a1 on g0", "a2 on g0"]
    room.ask("a3", a)
    await settled()
    assert room.seen() == ["a3 on g0"]
    room.ask("b1", b)
    await room.end("a1", "a2")
    assert room.seen() == ["a1 ends", "a2 ends"]
    await room.end("a3")
    assert room.seen() == ["a3 ends", "g0 pulls 2", "b1 on g0"]
    await room.end("b1")


@in_loop
async def test_nobody_is_let_in_before_one_that_has_waited_for_other_weights():
    room, a, b, c = Room(), snapshot(1), snapshot(2), snapshot(3)
    room.ask("a1", a)
    await settled()
    for name, of in (("c1", c), ("a2", a), ("b1", b), ("c2", c), ("a3", a)):
        room.ask(name, of)
    await settled()
    assert room.seen() == ["g0 pulls 1", "a1 on g0"]
    await room.end("a1")
    assert room.seen() == ["a1 ends", "g0 pulls 3", "c1 on g0", "c2 on g0"]
    await room.end("c1", "c2")
    assert room.seen() == ["c1 ends", "c2 ends", "g0 pulls 1", "a2 on g0", "a3 on g0"]
    await room.end("a2", "a3")
    assert room.seen() == ["a2 ends", "a3 ends", "g0 pulls 2", "b1 on g0"]
    await room.end("b1")


@in_loop
async def test_the_replica_with_the_fewest_completions_is_next_and_all_take_the_weights():
    room, a = Room(num_replicas=2), snapshot(1)
    room.ask("large", a, load=8)
    await settled()
    for number in range(3):
        room.ask(f"small {number}", a, load=3)
    await settled()
    assert sorted(room.log[:2]) == ["g0 pulls 1", "g1 pulls 1"]
    assert room.log[2:] == ["large on g0", "small 0 on g1", "small 1 on g1", "small 2 on g1"]
    await room.end("large", "small 0", "small 1", "small 2")


@in_loop
async def test_one_that_gives_up_stands_in_nobodys_way():
    room, a, b = Room(), snapshot(1), snapshot(2)
    room.ask("a1", a)
    room.ask("b1", b)
    room.ask("a2", a)
    await settled()
    assert room.seen() == ["g0 pulls 1", "a1 on g0", "a2 on g0"]
    room.ask("a3", a)
    await settled()
    assert room.seen() == []
    room.tasks["b1"].cancel()
    await settled()
    assert room.seen() == ["a3 on g0"]
    room.ask("b2", b)
    for name in ("a1", "a2", "a3"):
        room.tasks[name].cancel()
    await settled()
    assert room.seen() == ["g0 pulls 2", "b2 on g0"]
    assert (a.num_users, b.num_users) == (0, 1)
    await room.end("b2")


@in_loop
async def test_several_that_give_up_at_once_stand_in_nobodys_way():
    """As those of a session that ends; one of them would be let in by the end of the other."""
    room, a, b, c = Room(), snapshot(1), snapshot(2), snapshot(3)
    room.ask("a1", a)
    await settled()
    room.ask("b1", b)
    room.ask("a2", a)
    await settled()
    assert room.seen() == ["g0 pulls 1", "a1 on g0"]
    for name in ("b1", "a2"):
        room.tasks[name].cancel()
    await settled()
    assert [room.tasks[name].cancelled() for name in ("b1", "a2")] == [True, True]
    room.ask("c1", c)
    await room.end("a1")
    assert room.seen() == ["a1 ends", "g0 pulls 3", "c1 on g0"]
    await room.end("c1")


@in_loop
async def test_a_closed_snapshot_is_forgotten_after_its_last_request():
    room, a, b = Room(), snapshot(1), snapshot(2)
    room.ask("a1", a)
    room.ask("b1", b)
    await settled()
    room.server.close_snapshot(b)
    room.server.close_snapshot(a)
    await settled()
    assert room.forgotten == []
    await room.end("a1")
    assert room.forgotten == [1]
    await room.end("b1")
    assert room.forgotten == [1, 2]


@in_loop
async def test_a_generator_that_cannot_pull_ends_all_sampling_with_its_error():
    room, a, b = Room(num_replicas=2), snapshot(1), snapshot(2)
    room.ask("a1", a)
    await settled()
    room.ask("b1", b)
    room.ask("b2", b)
    room.generators[1].failure = ActorCallError("generator_1.pull failed: rank 0 of 1 is dead")
    room.ends["a1"].set()
    await settled()
    for name in ("b1", "b2"):
        with pytest.raises(BackendLostError, match=r"a generator is lost.* rank 0 of 1 is dead"):
            await room.tasks[name]
    room.ask("later", a)
    with pytest.raises(BackendLostError, match="nothing can be sampled any more"):
        await room.tasks["later"]
    assert (a.num_users, b.num_users) == (0, 0)


@in_loop
async def test_at_the_end_those_that_wait_hear_so():
    room, a, b = Room(), snapshot(1), snapshot(2)
    room.ask("a1", a)
    room.ask("b1", b)
    await settled()
    await room.server.end(RuntimeError("the backend was closed"))
    with pytest.raises(RuntimeError, match="the backend was closed"):
        await room.tasks["b1"]
    await room.end("a1")
    assert room.forgotten == []
