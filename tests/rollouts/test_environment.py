"""Environments: the thread they run in, their time limits, and trials before a run."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from typing import Any, ClassVar

import numpy as np
import pytest

from rl.rollouts.environment import Environments, SingleTurn
from rl.rollouts.episode import EpisodeLimits, Episodes
from rl.rollouts.samples import make_demonstration_samples_now
from rl.types import Message, Observation, Problem, Reply, Rollout, SamplingParams
from rl.utils.errors import RunError
from tests.support.conversations import Counting, Factory, ScriptedGenerator, TwinRenderer
from tests.support.fakes import RENDERER, FakePolicy
from tests.support.shared_client import Shared

SAMPLING = SamplingParams(max_tokens=16)
PROBLEM = Problem(id="ask/one", question="one", answer="", demonstration=("yes", "yes"))


async def played(environment: Callable[[Problem], Any], *, step_timeout_s: float = 30.0) -> Rollout:
    episodes = Episodes(
        generator=ScriptedGenerator(reply=lambda prompt, sampling, sample: "yes"),
        renderer=TwinRenderer(),
        environments=Environments(make=environment, step_timeout_s=step_timeout_s),
        max_tokens=200,
    )
    ((rollout,),) = await episodes.run([PROBLEM], sampling=SAMPLING)
    return rollout


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "environments"}


def test_single_turn_runs_inline_and_a_subclass_with_its_own_step_does_not():
    loops = set()

    class Looks(SingleTurn):
        async def step(self, reply: Reply) -> Observation:
            loops.add(asyncio.get_running_loop())
            return Observation()

    async def main() -> None:
        await played(Looks.of)
        assert loops
        assert asyncio.get_running_loop() not in loops
        before = threads()
        await played(SingleTurn.of)
        assert threads() <= before

    asyncio.run(main())
    assert not Looks.of(PROBLEM).single_turn
    opening = SingleTurn(problem=PROBLEM, system="Be brief.").opening()
    assert [(m.role, m.content) for m in opening] == [("system", "Be brief."), ("user", "one")]


@pytest.fixture
def blocks() -> Iterator[type[Counting]]:
    """Yield an environment whose steps block its thread until the end of the test."""
    free = threading.Event()

    class Blocks(Counting):
        runs_inline: ClassVar[bool] = False

        async def step(self, reply: Reply) -> Observation:
            assert free.wait(60)
            return await super().step(reply)

    yield Blocks
    free.set()


def test_blocking_step_fails_its_rollout_while_the_controller_goes_on(blocks):
    async def main() -> tuple[Rollout, int]:
        blocked = asyncio.create_task(played(Factory(blocks), step_timeout_s=0.05))
        num_turns = 0
        while not blocked.done():
            num_turns += 1
            await asyncio.sleep(0.001)
        return await blocked, num_turns

    blocked, num_turns = asyncio.run(main())
    assert blocked.end == "failed"
    assert blocked.failure == (
        "the environment took longer than step_timeout_s=0.05 in turn 1 of problem 'ask/one', "
        "reply 'yes'"
    )
    assert num_turns > 5


@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, asyncio.CancelledError])
def test_error_that_would_end_the_thread_or_the_episode_is_a_failed_rollout(error, inline):
    class Ends(Counting):
        runs_inline: ClassVar[bool] = inline

        async def step(self, reply: Reply) -> Observation:
            raise error

    rollout = asyncio.run(played(Factory(Ends)))
    assert f"raised RuntimeError('{error.__name__} of an environment')" in str(rollout.failure)


class CountingLoop(asyncio.SelectorEventLoop):
    """Event loop that counts its tasks and timers."""

    num_tasks = num_timers = 0

    def create_task(self, *args: Any, **kwargs: Any) -> Any:
        self.num_tasks += 1
        return super().create_task(*args, **kwargs)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        self.num_timers += 1
        return super().call_at(when, callback, *args, context=context)


class AnswersAtOnce(SingleTurn):
    """Environment of many turns that waits for nothing."""

    runs_inline: ClassVar[bool] = True

    async def step(self, reply: Reply) -> Observation:
        return Observation(messages=(Message(role="user", content="again"),))


@pytest.mark.parametrize("environment", [SingleTurn.of, AnswersAtOnce.of])
def test_environment_that_waits_for_nothing_costs_no_timer(environment):
    def counts(num: int) -> tuple[int, int]:
        with asyncio.Runner(loop_factory=CountingLoop) as runner:
            episodes = Episodes(
                generator=ScriptedGenerator(reply=lambda prompt, sampling, sample: "yes"),
                renderer=TwinRenderer(),
                environments=Environments(make=environment),
                limits=EpisodeLimits(max_turns=2),
                max_tokens=200,
            )
            runner.run(episodes.run([PROBLEM], sampling=replace(SAMPLING, num_samples=num)))
            loop = runner.get_loop()
            assert isinstance(loop, CountingLoop)
            return loop.num_tasks, loop.num_timers

    (few, _), (many, num_timers) = counts(1), counts(64)
    assert num_timers == 0
    if environment == SingleTurn.of:
        assert many == few


@pytest.mark.parametrize("waits_s", [0.0, 60.0])
def test_environment_that_waits_inline_has_a_time_limit(waits_s):
    class Waits(Counting):
        runs_inline: ClassVar[bool] = True

        async def step(self, reply: Reply) -> Observation:
            try:
                await asyncio.sleep(waits_s)
            except asyncio.CancelledError:
                interrupted.append(True)
                raise
            return await super().step(reply)

    interrupted: list[bool] = []
    rollout = asyncio.run(played(Factory(Waits), step_timeout_s=0.05))
    assert rollout.end == ("failed" if waits_s else "done")
    assert interrupted == [True] * bool(waits_s)
    if waits_s:
        assert "took longer than step_timeout_s=0.05" in str(rollout.failure)


# Trials before a run


class Faulty(Counting):
    """Environment of two turns, one of whose methods returns or raises what `does` does."""

    runs_inline: ClassVar[bool] = False

    def __init__(self, *, problem: Problem, method: str, does: Callable[[], Any]) -> None:
        super().__init__(problem=problem, turns=1)
        self.method, self.does = method, does
        if method == "init":
            does()

    def opening(self) -> Any:
        return self.does() if self.method == "opening" else super().opening()

    async def step(self, reply: Reply) -> Any:
        observation = await super().step(reply)
        return self.does() if self.method == "step" else observation


def raises(error: Exception) -> Callable[[], Any]:
    def does() -> None:
        raise error

    return does


def observed(**fields: Any) -> Callable[[], Observation]:
    return lambda: Observation(**fields)


FAILS = raises(KeyError("board"))


@pytest.mark.parametrize(
    ("method", "does", "message"),
    [
        (
            "init",
            FAILS,
            r"the environment of problem 'ask/one' cannot be made: KeyError\('board'\)",
        ),
        ("opening", FAILS, r"problem 'ask/one' \(Faulty\) does not open: .*KeyError\('board'\)"),
        ("opening", lambda: (), r"does not open: .*no messages"),
        (
            "step",
            FAILS,
            r"^the environment raised KeyError\('board'\) in turn 1 of problem 'ask/one'",
        ),
        (
            "step",
            raises(RunError("no sandbox")),
            r"^the demonstration of problem 'ask/one': no sandbox",
        ),
        (
            "step",
            lambda: None,
            r"`step` returned None, which is not an Obs.* in turn 1 of problem 'ask/one'",
        ),
        (
            "step",
            observed(messages=(Message(role="bot", content=""),)),  # type: ignore[arg-type]
            r"messages\[0\]=.*must be a Message",
        ),
        (
            "step",
            observed(messages=(Message(role="user", content=3),)),  # type: ignore[arg-type]
            r"messages\[0\]=.*must be a Message",
        ),
        ("step", observed(reward=None), r"reward=None: must be a finite number"),
        ("step", observed(reward="1.0"), r"reward='1.0': must be a finite number"),
        ("step", observed(reward=1e39), r"reward=1e\+39: must be within 1e\+15 of 0; divide it"),
        ("step", observed(metrics={"moves": 10**400}), r"moves=1000.*: must be a finite number"),
        ("step", observed(metrics={1: 1.0}), r"metrics has the key 1: a name must be a text"),
        (
            "step",
            observed(messages="go on"),
            r"ValueError\(.*messages='go on' is a str.*turn 1 of problem",
        ),
        ("opening", lambda: "one", r"does not open: .*opening\(\)='one' is a str"),
        (
            "opening",
            lambda: [{"role": "user", "content": "one"}],
            r"messages\[0\]=\{'role.*must be a Message",
        ),
        ("step", observed(metrics={"moves": float("nan")}), r"moves=nan: must be a finite number"),
    ],
)
def test_invalid_environment_is_refused_by_problem_turn_and_field(method, does, message):
    factory = Factory(Faulty, method=method, does=does)
    with pytest.raises(ValueError, match=message):
        make_demonstration_samples_now(
            [PROBLEM], Environments(make=factory), renderer=TwinRenderer()
        )
    assert factory.closed == [1] * (method != "init")


class Quiz:
    """Environment that works through the questions of its problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    def opening(self) -> Any:
        return (Message(role="user", content=text) for text in [self.problem.question])

    async def step(self, reply: Reply) -> Observation:
        questions, metrics = self.problem.info["questions"], {"left": np.float32(0.0)}
        if not questions:
            return Observation(reward=np.bool_(True), metrics=metrics)  # type: ignore[arg-type]
        next_one = Message(role="user", content=questions.pop())
        return Observation(messages=(m for m in [next_one]))  # type: ignore[arg-type]

    async def close(self) -> None:
        pass


@pytest.mark.parametrize("kind", [SingleTurn.of, Quiz])
def test_environment_with_a_state_is_not_shared_by_episodes(kind):
    one = kind(PROBLEM)

    async def open_two() -> None:
        async with Environments(make=lambda problem: one).opened([PROBLEM], num=2):
            pass

    with (
        nullcontext()
        if kind == SingleTurn.of
        else pytest.raises(ValueError, match="got the same environment")
    ):
        asyncio.run(open_two())


def test_episodes_of_a_problem_each_get_its_data_as_the_task_made_it():
    problem = replace(PROBLEM, info={"questions": ["c", "b", "a"]})
    episodes = Episodes(
        generator=ScriptedGenerator(reply=lambda prompt, sampling, sample: "yes"),
        renderer=TwinRenderer(),
        environments=Environments(make=Quiz),
        max_tokens=200,
    )
    for _ in range(2):
        ((*rollouts,),) = asyncio.run(
            episodes.run([problem], sampling=replace(SAMPLING, num_samples=4))
        )
        assert [r.failure for r in rollouts] == [None] * 4
        assert [[m.content for t in r.turns for m in t.messages] for r in rollouts] == [
            ["one", "a", "b", "c"]
        ] * 4
        last = rollouts[0].turns[-1].observation
        assert (type(last.reward), last.reward, last.metrics) == (float, 1.0, {"left": 0.0})
    assert problem.info == {"questions": ["c", "b", "a"]}


def test_blocking_environment_is_refused_before_a_run(blocks):
    says = r"longer than step_timeout_s=0\.05 in turn 1 of problem 'ask/one'"
    environments = Environments(make=Factory(blocks), step_timeout_s=0.05)
    with pytest.raises(ValueError, match=says):
        make_demonstration_samples_now([PROBLEM], environments, renderer=TwinRenderer())


def test_client_made_by_the_first_trial_serves_all_later_ones_and_the_run():
    task = Shared.Config(num_integers=2).build()
    problems = list(islice(task.warmup_problems(seed=0), 2))
    environments = Environments(make=task.environment)
    for _ in range(2):
        assert len(make_demonstration_samples_now(problems, environments, renderer=RENDERER)) == 2
    episodes = Episodes(
        generator=FakePolicy(reply=lambda prompt, sample: "[ANSWER] 1"),
        renderer=RENDERER,
        environments=environments,
        max_tokens=200,
    )
    for (rollout,) in asyncio.run(episodes.run(problems, sampling=SAMPLING)):
        assert (rollout.end, rollout.failure) == ("done", None)
        assert rollout.turns[0].observation.metrics == {"asked": 1.0}
    assert len(task.clients) == 1
