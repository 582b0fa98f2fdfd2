"""Environments of other people's code, tried before a run: errors name the problem, and nothing hangs."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, ClassVar

import pytest

from rl.errors import RunError
from rl.rollouts.demonstrations import demonstrated_now
from rl.rollouts.environment_thread import EnvironmentThreads
from rl.rollouts.episodes import Episodes
from rl.rollouts.settings import EpisodeLimits
from rl.rollouts.tried_environments import TriedEnvironments
from rl.types import Observation, Problem, Reply, SamplingParams
from tests.support.conversations import Counting, Factory, TwinRenderer
from tests.support.fakes import RENDERER as FAKE_RENDERER
from tests.support.fakes import FakePolicy
from tests.support.shared_client import Shared

RENDERER = TwinRenderer()
PROBLEM = Problem(id="ask/one", question="one", answer="", demonstration=("yes", "yes"))


def tried(make: Callable[[Problem], Any], *, step_timeout_s: float = 60.0) -> TriedEnvironments:
    threads = EnvironmentThreads(grace_s=0.05)
    return TriedEnvironments(make=make, threads=threads, step_timeout_s=step_timeout_s)


class Faulty(Counting):
    """Of two turns; one of its methods gives or raises something else."""

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

    async def close(self) -> None:
        await super().close()
        if self.method == "close":
            self.does()


def fails() -> None:
    raise KeyError("board")


@pytest.mark.parametrize(
    ("method", "does", "says"),
    [
        ("init", fails, r"the environment of problem 'ask/one' cannot be made: KeyError\('board'\)"),
        ("opening", fails, r"problem 'ask/one' \(Faulty\) does not open: .*KeyError\('board'\)"),
        ("opening", lambda: None, r"problem 'ask/one' .* does not open: .* is None, which is no sequence"),
        ("opening", lambda: "one", r"problem 'ask/one' .* does not open: .* is 'one', which is no sequence"),
        ("opening", lambda: (), r"problem 'ask/one' .* does not open: .* no messages"),
        ("opening", lambda: ("one",), r"problem 'ask/one' .* does not open: .*\[0\] is 'one', which is no M"),
        ("step", fails, r"^turn 1 of problem 'ask/one': the environment raised KeyError\('board'\)"),
        (
            "step",
            lambda: None,
            r"^turn 1 of problem 'ask/one': `step` returned None, which is no Observation",
        ),
        (
            "step",
            lambda: Observation(reward=None),  # type: ignore[arg-type]
            r"^turn 1 of problem 'ask/one': reward=None: must be a number",
        ),
        (
            "step",
            lambda: Observation(messages=("more",)),  # type: ignore[arg-type]
            r"^turn 1 of problem 'ask/one': messages\[0\] is 'more', which is no Message",
        ),
        ("close", fails, r"^closing problem 'ask/one': the environment raised KeyError\('board'\)"),
    ],
)
def test_what_is_wrong_with_an_environment_is_a_value_error_that_names_the_problem(method, does, says):
    factory = Factory(Faulty, method=method, does=does)
    with pytest.raises(ValueError, match=says):
        demonstrated_now([PROBLEM], tried(factory), renderer=RENDERER)
    assert factory.closed == [1] * (method != "init")


def test_an_error_that_would_stop_a_run_names_the_problem_too():
    def stops() -> None:
        raise RunError("no sandbox is left")

    for method in ("init", "opening", "step", "close"):
        environments = tried(Factory(Faulty, method=method, does=stops))
        with pytest.raises(ValueError, match=r"problem 'ask/one'.*: no sandbox is left"):
            demonstrated_now([PROBLEM], environments, renderer=RENDERER)


def test_an_error_is_not_hidden_by_one_at_the_close(caplog):
    class FailsTwice(Faulty):
        async def close(self) -> None:
            await super().close()
            raise OSError("no socket")

    with pytest.raises(ValueError, match="KeyError"):
        demonstrated_now([PROBLEM], tried(Factory(FailsTwice, method="step", does=fails)), renderer=RENDERER)
    assert "closing problem 'ask/one': the environment raised OSError('no socket')" in caplog.text


def test_one_that_is_slow_to_close_is_named():
    class Slow(Faulty):
        async def close(self) -> None:
            await asyncio.Event().wait()

    environments = tried(Factory(Slow, method="", does=fails), step_timeout_s=0.05)
    with pytest.raises(ValueError, match=r"closing problem 'ask/one': .* longer than step_timeout_s=0\.05"):
        demonstrated_now([PROBLEM], environments, renderer=RENDERER)


@pytest.fixture
def free() -> Iterator[threading.Event]:
    """Lets what blocks go on, so that no thread outlives its test."""
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.parametrize("method", ["init", "opening", "step", "close"])
def test_one_that_blocks_is_an_error_soon_and_its_thread_is_left_behind(method, free):
    factory = Factory(Faulty, method=method, does=lambda: free.wait(60))
    environments = tried(factory, step_timeout_s=0.05)
    started = time.monotonic()
    with pytest.raises(
        ValueError, match=r"problem 'ask/one'.* took longer than step_timeout_s=0\.05, as the"
    ):
        demonstrated_now([PROBLEM], environments, renderer=RENDERER)
    assert time.monotonic() - started < 30
    assert environments.threads.num_abandoned == 1


def test_a_client_made_by_the_first_trial_serves_all_later_ones_and_the_run():
    task = Shared.Config(num_integers=2).build()
    problems = list(islice(task.warmup_problems(seed=0), 2))
    environments = tried(task.environment)
    for _ in range(2):
        assert len(demonstrated_now(problems, environments, renderer=FAKE_RENDERER)) == 2
    episodes = Episodes(
        sampler=FakePolicy(reply=lambda prompt, sample: "[ANSWER] 1"),
        renderer=FAKE_RENDERER,
        environment=task.environment,
        limits=EpisodeLimits(),
        max_tokens=200,
        threads=environments.threads,
    )
    groups = asyncio.run(episodes.run(problems, sampling=SamplingParams(max_tokens=16)))
    for (rollout,) in groups:
        assert (rollout.end, rollout.failure) == ("done", None)
        assert rollout.turns[0].observation.metrics == {"asked": 1.0}
    assert len(task.clients) == 1
