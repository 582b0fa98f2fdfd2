"""Which player a run's agents have; the client of the agents' actor, in virtual time."""

import asyncio
import inspect
import json
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from actors.agents import AgentEndpoint
from actors.cluster import agents
from actors.cluster.agents import AgentClient, open_player
from actors.cluster.group import ActorGroup
from actors.cluster.recovery import RestartsUsedUpError, Supervisor
from actors.config import RecoveryConfig
from actors.launch.calls import ActorCallError, ActorLostError, ActorTimeoutError
from rl.agents.endpoint.queue import QueuedGenerator
from rl.agents.program import AgentProgram
from rl.agents.settings import EpisodeSettings
from rl.agents.types import make_failed_play
from rl.types import Problem
from rl.utils.errors import RunError
from tests.support.agent_endpoint import make_settings
from tests.support.mortal import Mortal
from tests.support.virtual_time import now_s, run_in_virtual_time

RENDERER: Any = "renderer"


class Played:
    """Task that brings its own player."""

    def __init__(self):
        self.ends = []

    @asynccontextmanager
    async def open_player(self, *, renderer):
        yield [renderer]
        self.ends.append(renderer)


def open_once(task: Any) -> Any:
    async def scenario():
        async with open_player(None, None, task=task, renderer=RENDERER) as player:
            assert not getattr(task, "ends", [])
            return player

    return asyncio.run(scenario())


def test_task_may_bring_its_own_player():
    task = Played()
    assert open_once(task) == [RENDERER]
    assert task.ends == [RENDERER]


def test_task_without_agents_has_no_player():
    assert open_once(object()) is None


# The client of the actor

PROBLEM = Problem(id="a", question="1 + 1 = ?", answer="2")
SETTINGS = make_settings()


class Host:
    """Host whose agents ask the model once, if at all, and then wait for their end."""

    def __init__(self, generator: QueuedGenerator | None = None) -> None:
        self.generator = generator
        self.begun = asyncio.Event()
        self.num_ended = 0
        self.replies: list[Any] = []

    async def play(self, problem: Any, *, settings: Any, time_limit_s: float) -> Any:
        self.begun.set()
        try:
            if self.generator is not None:
                self.replies.append(await ask(self.generator, settings.key))
            await asyncio.Event().wait()
        finally:
            self.num_ended += 1


async def ask(generator: QueuedGenerator, key: str) -> Any:
    """Return the reply, or the error that an agent is told."""
    try:
        return await generator.generate([], sampling=SETTINGS.sampling, session=key)
    except RunError as error:
        return str(error)


def make_actor() -> Any:
    config = AgentEndpoint.Config()
    return AgentEndpoint(config=config, program=AgentProgram(), renderer=RENDERER)


class AgentActor(Mortal):
    """The agents' actor, in this process."""

    def __init__(self, *, asks: bool = False) -> None:
        super().__init__("agents")
        self.actor = make_actor()
        self.host = self.actor._host = Host(self.actor._generator if asks else None)
        for name in ("play", "end_plays", "take_calls", "answer_calls"):
            endpoint: Any = getattr(AgentEndpoint, name)
            method = inspect.unwrap(endpoint._method)
            setattr(self, f"_{name}", method.__get__(self.actor))


class Generator:
    """Generator whose calls end with an error, if there is one."""

    def __init__(self, error: Exception | None = None, *, takes_s: float = 0.0) -> None:
        self.error = error
        self.takes_s = takes_s

    async def generate(self, prompts: Any, **options: Any) -> Any:
        await asyncio.sleep(self.takes_s)
        if self.error is not None:
            raise self.error
        return []


def play(
    client: AgentClient, generator: Any = None, *, settings: EpisodeSettings = SETTINGS
) -> asyncio.Task[Any]:
    return asyncio.create_task(
        client.play(
            PROBLEM, settings=settings, time_limit_s=60.0, generator=generator or Generator()
        )
    )


def test_cancelled_play_ends_its_agent():
    async def scenario():
        actor = AgentActor()
        client = AgentClient(actor.group(), max_running=4)
        async with client.answer_calls():
            playing = play(client)
            await actor.host.begun.wait()
            playing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await playing
            await asyncio.sleep(0.1)
            assert actor.host.num_ended == 1
            assert not actor.actor._plays

    run_in_virtual_time(scenario())


@pytest.mark.parametrize(
    ("result", "failure"),
    [
        (OSError("no space left"), "the play failed: OSError('no space left')"),
        (replace(make_failed_play("x"), state={"a": [1]}), "x"),
        (replace(make_failed_play("x"), state={"a": (i for i in "a")}), "the play failed: "),
        (
            replace(make_failed_play("x"), state={"a": json.loads("[" * 900 + "]" * 900)}),
            "the play failed: ",
        ),
    ],
)
def test_play_that_fails_or_cannot_be_sent_is_a_failed_episode(result, failure):
    async def scenario():
        actor = AgentActor()

        async def end(problem, *, settings, time_limit_s):
            if isinstance(result, Exception):
                raise result
            return result

        actor.host.play = end  # type: ignore[method-assign]
        client = AgentClient(actor.group(), max_running=1)
        async with client.answer_calls():
            played = await play(client)
        assert played.end == "failed"
        assert played.failure.startswith(failure)

    run_in_virtual_time(scenario())


def test_wait_for_other_agents_takes_nothing_of_the_time_limit():
    async def scenario():
        actor = AgentActor()
        limits = []

        async def stay(problem, *, settings, time_limit_s):
            limits.append((now_s(), time_limit_s))
            await asyncio.sleep(50)

        actor.host.play = stay  # type: ignore[method-assign]
        client = AgentClient(actor.group(), max_running=1)
        async with client.answer_calls():
            await asyncio.gather(*(play(client, settings=make_settings()) for _ in range(2)))
        assert limits == [(0, 60), (50, 60)]

    run_in_virtual_time(scenario())


def test_request_of_an_episode_that_has_ended_is_told_so():
    async def scenario():
        actor = AgentActor()
        async with AgentClient(actor.group(), max_running=4).answer_calls():
            async with asyncio.timeout(1):
                assert await ask(actor.actor._generator, "sk-gone") == "the episode has ended"

    run_in_virtual_time(scenario())


class Restarts:
    """Starts of the agents' actor after losses, which take a second each."""

    def __init__(self) -> None:
        self.actors = [AgentActor()]
        supervisor = Supervisor(RecoveryConfig(pause_s=0.0), now_s=now_s)
        self.group = self.actors[0].group(start=self.start, supervisor=supervisor)

    async def start(self) -> ActorGroup:
        await asyncio.sleep(1)
        self.actors.append(AgentActor())
        return self.actors[-1].group()


def test_play_fails_after_the_second_loss_of_the_actor():
    async def scenario():
        restarts = Restarts()
        client = AgentClient(restarts.group, max_running=4)
        playing = play(client)
        for number in range(2):
            while len(restarts.actors) <= number:
                await asyncio.sleep(0.1)
            await restarts.actors[number].host.begun.wait()
            restarts.actors[number].die()
        played = await playing
        assert played.end == "failed"
        assert played.failure.startswith(
            "the agents' actor was lost 2 times while this agent ran: agents.play failed: rank 0"
        )
        # The actor is there again for other agents.
        assert len(restarts.actors) == 3
        await client._group.wait_until_up()

    run_in_virtual_time(scenario())


def test_endpoint_that_does_not_answer_is_restarted():
    async def scenario():
        restarts = Restarts()
        client = AgentClient(restarts.group, max_running=4)
        first = restarts.actors[0]
        first._take_calls = lambda wait_s: asyncio.sleep(10**6)  # type: ignore[attr-defined]
        async with client.answer_calls():
            playing = play(client)
            # The limit of the call (timeouts.close_s) beside its own wait, and the restart.
            await asyncio.sleep(agents.WAIT_S + 20 + 2)
            assert len(restarts.actors) == 2
            # The restart has killed the process.
            first.die()
            await restarts.actors[1].host.begun.wait()
            assert not playing.done()
            playing.cancel()

    run_in_virtual_time(scenario())


@pytest.mark.parametrize(
    "error",
    [
        RestartsUsedUpError("generator_0 is lost again, after 3 restarts"),
        ActorLostError("rank 0 of 1 is dead", role="generator_0"),
        ActorTimeoutError("generator_0.generate gave no answer within 1800 s"),
    ],
)
def test_loss_of_all_generators_ends_the_run(error):
    async def scenario():
        client = AgentClient(AgentActor(asks=True).group(), max_running=4)
        async with client.answer_calls():
            with pytest.raises(type(error), match=str(error)):
                await play(client, Generator(error))

    run_in_virtual_time(scenario())


def test_loss_of_all_generators_after_an_episode_ends_nothing():
    async def scenario():
        actor = AgentActor(asks=True)
        # The actor does not cancel its call.
        actor._end_plays = lambda keys: asyncio.sleep(0)  # type: ignore[attr-defined]
        client = AgentClient(actor.group(), max_running=4)
        async with client.answer_calls():
            playing = play(client, Generator(RunError("no weights"), takes_s=5.0))
            await asyncio.sleep(1)
            assert client._running
            playing.cancel()
            await asyncio.sleep(10)
            assert not client._running
            assert not client._failed.done()

    run_in_virtual_time(scenario())


def test_error_of_one_request_is_told_to_its_agent():
    async def scenario():
        actor = AgentActor(asks=True)
        client = AgentClient(actor.group(), max_running=4)
        async with client.answer_calls():
            playing = play(client, Generator(ActorCallError("generate failed: ValueError")))
            while not actor.host.replies:
                await asyncio.sleep(0.01)
            assert actor.host.replies == ["generate failed: ValueError"]
            assert not playing.done()
            playing.cancel()

    run_in_virtual_time(scenario())
