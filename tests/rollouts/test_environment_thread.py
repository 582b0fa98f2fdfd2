"""Environments that block, in real time: the episodes' limits hold and the controller's loop goes on."""

import asyncio
import threading
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


def test_what_would_end_the_thread_is_a_failed_rollout():
    class Exits(Threaded):
        async def step(self, reply: Reply) -> Observation:
            raise SystemExit(3)

    rollout = asyncio.run(one(episodes_of(Factory(Exits), step_timeout_s=30.0), "exit"))
    assert rollout.failure is not None
    assert "raised RuntimeError('SystemExit of an environment')" in rollout.failure


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
        before = threading.active_count()
        await one(episodes_of(SingleTurn.of), "one")
        assert threading.active_count() <= before

    asyncio.run(main())


def test_the_thread_ends_with_the_episodes_that_used_it():
    def threads() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "environments"}

    before = threads()
    episodes = episodes_of(Factory(Threaded), step_timeout_s=30.0)
    asyncio.run(one(episodes, "one"))
    (made,) = threads() - before
    del episodes
    made.join(30)
    assert not made.is_alive()
