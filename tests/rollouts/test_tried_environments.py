"""Environments of other people's code, tried before a run: errors name the problem, and nothing hangs."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest

from rl.errors import RunError
from rl.rollouts.demonstrations import demonstrated_now
from rl.rollouts.environment_thread import EnvironmentThreads
from rl.rollouts.episodes import Episodes
from rl.rollouts.settings import EpisodeLimits
from rl.rollouts.tried_environments import TriedEnvironments
from rl.types import Message, Observation, Problem, Reply, SamplingParams
from tests.support.conversations import Counting, Factory, ScriptedSampler, TwinRenderer

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
        ("step", lambda: None, r"^turn 1 of problem 'ask/one': .* returned None, which is no Observation"),
        (
            "step",
            lambda: Observation(reward=None),  # type: ignore[arg-type]
            r"^turn 1 of problem 'ask/one': .*reward=None: must be a number",
        ),
        (
            "step",
            lambda: Observation(messages=("more",)),  # type: ignore[arg-type]
            r"^turn 1 of problem 'ask/one': .*messages\[0\] is 'more', which is no Message",
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


class Client:
    """What tasks share: like those of aiohttp and httpx it belongs to the event loop that it was made in."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[asyncio.Future[str]] = asyncio.Queue()
        self.serving = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        while True:
            (await self.asked.get()).set_result("more")

    async def ask(self) -> str:
        answer = asyncio.get_running_loop().create_future()
        await self.asked.put(answer)
        return await answer


class Asking(Counting):
    """Its first step makes the client of all."""

    runs_inline: ClassVar[bool] = False
    clients: ClassVar[list[Client]] = []

    async def step(self, reply: Reply) -> Observation:
        if not self.clients:
            self.clients.append(Client())
        told = await asyncio.wait_for(self.clients[0].ask(), 30)
        self.num_steps += 1
        return Observation(messages=(Message(role="user", content=told),) if self.num_steps == 1 else ())


def test_a_client_made_by_the_first_trial_serves_all_later_ones_and_the_run(monkeypatch):
    monkeypatch.setattr(Asking, "clients", [])
    environments = tried(lambda problem: Asking(problem=problem))
    for _ in range(2):
        demonstrated_now([PROBLEM, PROBLEM], environments, renderer=RENDERER)
    episodes = Episodes(
        sampler=ScriptedSampler(reply=lambda prompt, sampling, sample: "yes"),
        renderer=RENDERER,
        environment=environments.make,
        limits=EpisodeLimits(),
        max_tokens=200,
        threads=environments.threads,
    )
    ((rollout,),) = asyncio.run(episodes.run([PROBLEM], sampling=SamplingParams(max_tokens=16)))
    assert (rollout.end, rollout.failure, len(rollout.turns)) == ("done", None, 2)
    assert len(Asking.clients) == 1
