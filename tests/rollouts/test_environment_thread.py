"""Environments that block, in real time: the episodes' limits hold and the controller's loop goes on."""

import asyncio
import contextlib
import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest

from rl.errors import RunError
from rl.rollouts.environment import SingleTurn
from rl.rollouts.environment_thread import MAX_ABANDONED, EnvironmentThreads
from rl.rollouts.episodes import Episodes
from rl.rollouts.settings import EpisodeLimits
from rl.types import Message, Observation, Problem, Reply, Rollout, SamplingParams
from tests.support.conversations import Counting, Factory, ScriptedSampler, TwinRenderer

STEP_S = 0.05
SAMPLING = SamplingParams(max_tokens=16)


def problem(name: str) -> Problem:
    return Problem(id=f"ask/{name}", question=name, answer="")


class Threaded(Counting):
    """Of other people's code; `free` lets blocked ones go on, so that no thread outlives its test."""

    runs_inline: ClassVar[bool] = False
    free: ClassVar[threading.Event] = threading.Event()
    shared: ClassVar[asyncio.Semaphore] = asyncio.Semaphore(1)
    loops: ClassVar[set[asyncio.AbstractEventLoop]] = set()

    async def step(self, reply: Reply) -> Observation:
        self.loops.add(asyncio.get_running_loop())
        if self.problem.question.startswith("block"):
            assert self.free.wait(60)
        async with self.shared:
            return await super().step(reply)


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    Threaded.free, Threaded.shared, Threaded.loops = threading.Event(), asyncio.Semaphore(1), set()
    yield
    Threaded.free.set()


def episodes_of(environment: Callable[[Problem], Any], *, step_timeout_s: float = STEP_S) -> Episodes:
    return Episodes(
        sampler=ScriptedSampler(reply=lambda prompt, sampling, sample: "yes"),
        renderer=TwinRenderer(),
        environment=environment,
        limits=EpisodeLimits(step_timeout_s=step_timeout_s),
        max_tokens=200,
        threads=EnvironmentThreads(grace_s=0.05),
    )


def threads() -> set[threading.Thread]:
    """Those that environments run in."""
    return {thread for thread in threading.enumerate() if thread.name == "environments"}


async def one(episodes: Episodes, name: str) -> Rollout:
    ((rollout,),) = await episodes.run([problem(name)], sampling=SAMPLING)
    return rollout


def test_a_step_that_blocks_fails_its_rollout_while_the_controller_goes_on_and_the_next_gets_another_thread():
    factory = Factory(Threaded)

    async def main() -> tuple[Rollout, Rollout, int]:
        episodes = episodes_of(factory)
        blocked = asyncio.create_task(one(episodes, "block"))
        num_turns = 0
        while not blocked.done():
            num_turns += 1
            await asyncio.sleep(0.001)
        return await blocked, await one(episodes, "after"), num_turns

    blocked, after, num_turns = asyncio.run(main())
    assert blocked.end == "failed"
    assert blocked.failure == (
        "the environment took longer than step_timeout_s=0.05, as the event loop of the environments is "
        "blocked by turn 1 of problem 'ask/block' in turn 1 of problem 'ask/block', reply 'yes'"
    )
    assert num_turns > 5
    assert (after.end, len(after.turns)) == ("done", 3)
    assert len(Threaded.loops) == 2
    assert [environment.num_closed for environment in factory.made] == [0, 1]  # not while it is blocked


def test_what_waited_for_a_blocked_loop_is_closed_to_its_end_when_that_goes_on_though_nobody_waits_for_it(
    caplog,
):
    caplog.set_level(logging.ERROR, logger="rl.rollouts")  # a record holds the error, and that the episode

    class Awaits(Threaded):
        async def close(self) -> None:
            for _ in range(3):
                await asyncio.sleep(0.001)
            await super().close()

    factory, before = Factory(Awaits), threads()
    rollout = asyncio.run(one(episodes_of(factory), "block"))
    assert rollout.end == "failed"
    assert factory.closed == [0]
    (made,) = threads() - before
    gc.collect()  # of what the error's traceback holds: the thread is told to end before it can go on
    Threaded.free.set()
    made.join(30)
    assert not made.is_alive()
    assert factory.closed == [1]
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR] == []


def test_a_close_that_blocks_leaves_the_thread_behind_and_the_next_episode_is_none_the_worse(caplog):
    class Closing(Threaded):
        async def close(self) -> None:
            await super().close()
            if self.problem.question.startswith("close"):
                assert self.free.wait(60)

    factory = Factory(Closing)

    async def main() -> None:
        episodes = episodes_of(factory)
        for i in range(MAX_ABANDONED):
            assert (await one(episodes, f"close {i}")).end == "done"
            assert (await one(episodes, f"after {i}")).failure is None
            assert episodes.threads.num_abandoned == i + 1
        assert (await one(episodes, "close last")).end == "done"
        await one(episodes, "none")

    with pytest.raises(
        RunError, match=r"was blocked by closing problem 'ask/close last', and 4 times before"
    ):
        asyncio.run(main())
    assert factory.closed == [1] * (2 * MAX_ABANDONED + 1)


def test_however_many_wait_for_their_turn_in_the_loop_none_fails_of_that():
    class Computes(Threaded):
        async def step(self, reply: Reply) -> Observation:
            for _ in range(4):
                until = time.monotonic() + 0.01
                while time.monotonic() < until:
                    pass
                await asyncio.sleep(0)
            return Observation()

    async def main() -> tuple[list[Rollout], float, int]:
        episodes, began = episodes_of(Factory(Computes), step_timeout_s=0.2), time.monotonic()
        problems = [problem(str(i)) for i in range(24)]
        groups = await episodes.run(problems, sampling=SAMPLING)
        return [r for (r,) in groups], time.monotonic() - began, episodes.threads.num_abandoned

    rollouts, took_s, num_abandoned = asyncio.run(main())
    assert {(r.end, r.failure) for r in rollouts} == {("done", None)}
    assert took_s > 4 * (0.2 + 0.01)  # each turn of the loop is longer than the limit
    assert num_abandoned == 0


def test_a_step_that_takes_its_time_to_clean_up_blocks_nothing():
    cleaned = []

    class Cleans(Threaded):
        async def step(self, reply: Reply) -> Observation:
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.2)
                cleaned.append(self.problem.id)
            raise AssertionError

    factory = Factory(Cleans)
    episodes = episodes_of(factory)
    rollout = asyncio.run(one(episodes, "clean"))
    assert rollout.failure is not None
    assert rollout.failure.startswith("the environment took longer than step_timeout_s=0.05 in turn 1")
    assert (cleaned, factory.closed, episodes.threads.num_abandoned) == (["ask/clean"], [1], 0)


def test_a_task_that_an_environment_made_blocks_by_its_problems_name_and_cannot_end_the_thread():
    class Makes(Threaded):
        async def step(self, reply: Reply) -> Observation:
            if self.problem.question == "exit":
                task = asyncio.create_task(self.exit())
                with contextlib.suppress(SystemExit):
                    await task
            else:
                await asyncio.gather(super().step(reply), asyncio.sleep(0))
            return Observation()

        async def exit(self) -> None:
            raise SystemExit(3)

    async def main() -> tuple[Rollout, Rollout]:
        episodes = episodes_of(Factory(Makes))
        return await one(episodes, "exit"), await one(episodes, "block")

    exited, blocked = asyncio.run(main())
    assert exited.end == "done"
    assert "is blocked by turn 1 of problem 'ask/block'" in str(blocked.failure)


def test_too_many_threads_left_behind_stop_the_run_by_the_last_problems_name(caplog):
    async def main() -> None:
        episodes = episodes_of(Factory(Threaded), step_timeout_s=0.01)
        for i in range(MAX_ABANDONED):
            assert (await one(episodes, f"block {i}")).end == "failed"
        await one(episodes, "block last")

    with pytest.raises(
        RunError, match=r"was blocked by turn 1 of problem 'ask/block last', and 4 times before"
    ):
        asyncio.run(main())
    assert sum("its thread is left behind" in message for message in caplog.messages) == MAX_ABANDONED + 1


def test_one_that_awaits_too_long_fails_at_its_limit_and_leaves_no_thread_behind():
    class Waits(Threaded):
        async def step(self, reply: Reply) -> Observation:
            await asyncio.Event().wait()
            raise AssertionError

    factory = Factory(Waits)
    episodes = episodes_of(factory)
    episodes.threads.grace_s = 60.0
    rollout = asyncio.run(one(episodes, "wait"))
    assert rollout.failure is not None
    assert rollout.failure.startswith("the environment took longer than step_timeout_s=0.05 in turn 1")
    assert (episodes.threads.num_abandoned, factory.closed) == (0, [1])


def test_episodes_share_a_loop_so_that_a_tasks_semaphore_serves_all_of_them():
    episodes = episodes_of(Factory(Threaded, seconds=0.001), step_timeout_s=30.0)
    problems = [problem(str(i)) for i in range(4)]
    groups = asyncio.run(episodes.run(problems, sampling=SAMPLING))
    assert [(r.end, r.failure, len(r.turns)) for (r,) in groups] == [("done", None, 3)] * 4
    assert len(Threaded.loops) == 1


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, asyncio.CancelledError])
def test_what_would_end_the_thread_or_the_episode_is_a_failed_rollout(error):
    class Ends(Threaded):
        async def step(self, reply: Reply) -> Observation:
            raise error

    rollout = asyncio.run(one(episodes_of(Factory(Ends), step_timeout_s=30.0), "end"))
    assert f"raised RuntimeError('{error.__name__} of an environment')" in str(rollout.failure)


def test_a_single_turn_stays_in_the_controllers_loop_and_a_class_made_from_it_does_not():
    loops = set()

    class Looks(SingleTurn):
        async def step(self, reply: Reply) -> Observation:
            loops.add(asyncio.get_running_loop())
            return Observation(messages=(Message(role="user", content="more"),) if not loops else ())

    async def main() -> None:
        here = asyncio.get_running_loop()
        await one(episodes_of(Looks.of, step_timeout_s=30.0), "one")
        assert loops
        assert here not in loops
        inline = episodes_of(SingleTurn.of)
        before = threads()
        await one(inline, "one")
        assert threads() <= before

    asyncio.run(main())


def test_the_thread_ends_with_the_episodes_that_used_it():
    before = threads()
    episodes = episodes_of(Factory(Threaded), step_timeout_s=30.0)
    asyncio.run(one(episodes, "one"))
    (made,) = threads() - before
    del episodes
    made.join(30)
    assert not made.is_alive()
