"""Agents that are async functions, in this event loop and in that of a thread."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import threading
from dataclasses import replace

import httpx
import pytest

from rl.agents.config import EndpointConfig
from rl.agents.players import host, in_loop, in_thread
from rl.agents.players.in_loop import AgentFailedError, LoopAgents
from rl.agents.players.in_thread import open_thread_player
from rl.agents.players.loading import EARLY_CLIENT, WITHOUT_KEY
from rl.agents.players.local import open_local_player
from rl.agents.players.plays import AgentSpec
from rl.agents.program import AgentProgram
from rl.agents.rollouts import AgentEpisodes
from rl.rollouts.episode import EpisodeLimits
from rl.types import Problem, SamplingParams
from tests.support.agent_endpoint import ScriptedGenerator, make_qwen_renderer

PROBLEM = Problem(id="a", question="1 + 1 = ?", answer="2")
SPEC = AgentProgram().make_spec(PROBLEM, url="http://x/episodes/k", key="k", time_limit_s=10)


@pytest.fixture(scope="module", autouse=True)
def renderer_is_made():
    """Import transformers before a test's time counts."""
    make_qwen_renderer()


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 20))


def play(function, **changes):
    return run(LoopAgents(function).play(replace(SPEC, **changes)))


def test_function_gets_the_problem_and_its_model():
    async def solve(problem, *, url, key):
        return [problem.question, problem.answer, url, key]

    result = play(solve)
    assert (result.reason, result.status, result.output) == ("ok", 0, "")
    # The answer is hidden, unless the program shows it.
    assert result.value == ["1 + 1 = ?", "", "http://x/episodes/k", "k"]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({1, 2}, "Object of type set is not JSON serializable"),
        (json.loads("[" * 65 + "]" * 65), "it is nested deeper than 64 levels"),
    ],
)
def test_value_that_is_no_json_or_too_deep_is_not_kept(value, reason):
    async def solve(problem, *, url, key):
        return value

    result = play(solve)
    assert (result.reason, result.value) == ("ok", None)
    assert f"not kept ({reason})" in result.output


@pytest.mark.parametrize(
    ("error", "output"),
    [
        (AgentFailedError("no rewards"), "no rewards"),
        (SystemExit(3), "SystemExit of the function"),
        (KeyboardInterrupt(), "KeyboardInterrupt of the function"),
        (asyncio.CancelledError(), "the function cancelled itself"),
    ],
)
def test_failure_is_told_in_its_own_words(error, output):
    async def solve(problem, *, url, key):
        raise error

    result = play(solve)
    assert (result.reason, result.status, result.output) == ("error", 1, output)


def test_other_errors_are_told_with_their_traceback():
    async def solve(problem, *, url, key):
        raise KeyError("nothing")

    output = play(solve).output
    assert output.startswith("Traceback")
    assert output.endswith("KeyError: 'nothing'\n")


def test_command_is_refused():
    with pytest.raises(ValueError, match=r"command=\('ls',\): agents in an event loop are func"):
        run(LoopAgents(ask).play(AgentSpec(command=("ls",))))


class Endless:
    """Agent that waits for ever, and counts its beginnings and ends."""

    def __init__(self):
        self.begun = self.ended = 0
        self.has_begun = asyncio.Event()

    async def __call__(self, problem, *, url, key):
        self.begun += 1
        self.has_begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            self.ended += 1


def test_time_limit_ends_the_function():
    endless = Endless()
    result = play(endless, time_limit_s=0.01)
    assert (result.reason, endless.ended) == ("time limit", 1)


def test_cancelling_the_play_ends_the_function():
    async def scenario():
        endless = Endless()
        playing = asyncio.create_task(LoopAgents(endless).play(SPEC))
        await endless.has_begun.wait()
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        assert endless.ended == 1

    run(scenario())


def test_close_ends_all_functions():
    async def scenario():
        endless = Endless()
        agents = LoopAgents(endless)
        playing = [asyncio.create_task(agents.play(SPEC)) for _ in range(3)]
        await endless.has_begun.wait()
        await agents.close()
        assert [(await p).reason for p in playing] == ["ended"] * 3
        assert endless.ended == endless.begun

    run(scenario())


def test_function_that_ignores_its_end_is_reported(monkeypatch, caplog):
    monkeypatch.setattr(in_loop, "END_S", 0.01)

    async def scenario():
        go_on = asyncio.Event()

        async def stubborn(problem, *, url, key):
            while not go_on.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await go_on.wait()

        result = await LoopAgents(stubborn).play(replace(SPEC, time_limit_s=0.01))
        go_on.set()
        return result

    assert run(scenario()).reason == "time limit"
    assert "an agent goes on 0.01 s after it was cancelled" in caplog.text


# With the endpoint


async def ask(problem, *, url, key):
    """Agent that asks the model its question, and posts 0.5 as its reward."""
    async with httpx.AsyncClient(trust_env=False, headers={"x-api-key": key}) as http:
        messages = [{"role": "user", "content": problem.question}]
        body = {"model": "m" * 1001, "messages": messages, "stop_token_ids": [1, 2]}
        answer = await http.post(f"{url}/v1/chat/completions", json=body)
        await http.post(f"{url}/v1/reward", json={"reward": 0.5})
    return answer.json()["choices"][0]["message"]["content"]


def open_player(function, **settings):
    config = EndpointConfig(**settings)
    return open_local_player(config, renderer=make_qwen_renderer(), agents=LoopAgents(function))


def make_episodes(player, generator, **limits):
    return AgentEpisodes(
        generator=generator, player=player, max_tokens=512, limits=EpisodeLimits(**limits)
    )


SAMPLING = SamplingParams(max_tokens=32, num_samples=2)


def test_function_of_a_notebook_becomes_rollouts():
    async def scenario():
        async with open_player(ask) as player:
            episodes = make_episodes(player, ScriptedGenerator(reply=lambda text: "2"))
            return await episodes.run([PROBLEM], sampling=SAMPLING)

    (group,) = run(scenario())
    for rollout in group:
        assert (rollout.text, rollout.end, rollout.failure) == ("2", "done", None)
        assert (rollout.state["value"], rollout.state["posted"]) == ("2", {"reward": 0.5})
        excerpt = f"{'m' * 500} ... (1 characters more) ... {'m' * 500}"
        assert rollout.state["asked"] == {"model": [excerpt], "stop_token_ids": [[1, 2]]}


def test_only_the_first_names_of_posted_numbers_are_metrics_of_a_run(monkeypatch, caplog):
    monkeypatch.setattr(host, "MAX_METRICS", 3)
    numbers = itertools.count()

    async def post(problem, *, url, key):
        number = next(numbers)
        async with httpx.AsyncClient(trust_env=False, headers={"x-api-key": key}) as http:
            for name in ("steps", f"own {number}", "reward"):
                await http.post(f"{url}/v1/reward", json={name: 0.5})

    async def scenario():
        async with open_player(post) as player:
            episodes = make_episodes(player, ScriptedGenerator(reply=lambda text: "2"))
            return await episodes.run([PROBLEM], sampling=replace(SAMPLING, num_samples=5))

    (group,) = run(scenario())
    names = set()
    for rollout in group:
        assert len(rollout.state["posted"]) == 3
        metrics = rollout.turns[-1].observation.metrics
        posted = {name for name in metrics if name.startswith("agent/posted/")}
        assert posted >= {"agent/posted/steps", "agent/posted/reward"}
        names |= posted
    assert len(names) == 4
    assert caplog.text.count("numbers of more than 3 names") == 1


def test_host_gives_its_process_the_variables_that_the_program_keeps(monkeypatch):
    settings = {}

    def make(function, **given):
        settings.update(given)
        return LoopAgents(ask)

    monkeypatch.setattr(host, "AgentProcess", make)
    program = AgentProgram(keep_env=("MY_KEY",))

    async def scenario():
        async with open_local_player(
            EndpointConfig(), program=program, renderer=make_qwen_renderer()
        ):
            pass

    run(scenario())
    assert settings["keep_env"] == ("MY_KEY",)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"question": "1\0"}, "the question has a NUL character, which no argument can have"),
        ({"info": {"shown": {(1, 2): 3}}}, "info cannot be written as JSON: keys must be str"),
    ],
)
def test_problem_that_no_agent_can_be_given_is_a_failed_rollout(changes, reason):
    program = AgentProgram(command=("echo", "{question}"), shown_info=("shown",))
    opening = open_local_player(
        EndpointConfig(), program=program, renderer=make_qwen_renderer(), agents=LoopAgents(ask)
    )

    async def scenario():
        async with opening as player:
            episodes = make_episodes(player, ScriptedGenerator(reply=lambda text: "2"))
            return await episodes.run([replace(PROBLEM, **changes)], sampling=SAMPLING)

    (group,) = run(scenario())
    for rollout in group:
        assert rollout.end == "failed"
        assert rollout.failure.startswith(f"the agent cannot be given the problem: {reason}")


def test_client_without_a_key_is_explained():
    async def solve(problem, *, url, key):
        raise TypeError(f"{WITHOUT_KEY}. Expected one of api_key, auth_token")

    opening = open_local_player(
        EndpointConfig(),
        program=AgentProgram(function="agent.py:solve"),
        renderer=make_qwen_renderer(),
        agents=LoopAgents(solve),
    )

    async def scenario():
        async with opening as player:
            episodes = make_episodes(player, ScriptedGenerator(reply=lambda text: "2"))
            return await episodes.run([PROBLEM], sampling=replace(SAMPLING, num_samples=1))

    ((rollout,),) = run(scenario())
    assert rollout.failure.startswith(f"the agent failed: exit status 1: {EARLY_CLIENT}; its last")


def test_endpoint_is_reached_by_the_name_that_its_url_has():
    async def ask_by_name(problem, *, url, key):
        here, by_name = url.replace("head-node", "127.0.0.1"), {"host": "head-node"}
        async with httpx.AsyncClient(trust_env=False, headers={"x-api-key": key}) as http:
            body = {"model": "m", "messages": [{"role": "user", "content": "?"}]}
            path = f"{here}/v1/chat/completions"
            answers = [await http.post(path, json=body, headers=by_name)]
            answers.append(await http.post(path, json=body, headers={"host": "other"}))
        return [answer.status_code for answer in answers]

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    async def scenario():
        url = f"http://head-node:{port}"
        async with open_player(ask_by_name, listen=f"127.0.0.1:{port}", url=url) as player:
            episodes = make_episodes(player, ScriptedGenerator(reply=lambda text: "2"))
            return await episodes.run([PROBLEM], sampling=replace(SAMPLING, num_samples=1))

    ((rollout,),) = run(scenario())
    assert rollout.state["value"] == [200, 421]


def test_as_many_agents_run_at_once_as_configured():
    running, most = 0, 0

    async def count(problem, *, url, key):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1

    async def scenario():
        async with open_player(count, max_running=3) as player:
            episodes = make_episodes(player, ScriptedGenerator(reply=lambda text: "2"))
            await episodes.run([PROBLEM] * 4, sampling=SAMPLING)

    run(scenario())
    assert most == 3


# In a thread


class ThreadedGenerator(ScriptedGenerator):
    """Generator that notes the threads of its calls."""

    async def generate(self, prompts, **options):
        self.threads = {*getattr(self, "threads", ()), threading.current_thread().name}
        return await super().generate(prompts, **options)


def test_agents_in_a_thread_get_replies_of_the_callers_loop():
    threads = set()

    async def noting(problem, *, url, key):
        threads.add(threading.current_thread().name)
        return await ask(problem, url=url, key=key)

    async def scenario():
        generator = ThreadedGenerator(reply=lambda text: "2")
        async with open_thread_player(open_player(noting), name="environments") as player:
            episodes = make_episodes(player, generator)
            (group,) = await episodes.run([PROBLEM], sampling=SAMPLING)
        return group, generator

    group, generator = run(scenario())
    assert [(rollout.text, rollout.failure) for rollout in group] == [("2", None)] * 2
    assert threads == {"environments"}
    assert generator.threads == {threading.current_thread().name}


def test_cancellation_reaches_agent_and_generator():
    ends = []

    async def noting(problem, *, url, key):
        try:
            return await ask(problem, url=url, key=key)
        finally:
            ends.append(url)

    async def scenario():
        generator = ScriptedGenerator(reply=lambda text: "2", go_on=asyncio.Event())
        async with open_thread_player(open_player(noting)) as player:
            episodes = make_episodes(player, generator)
            playing = asyncio.create_task(episodes.run([PROBLEM], sampling=SAMPLING))
            while len(generator.calls) < 2:
                await asyncio.sleep(0.005)
            playing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await playing
            while generator.cancelled < 2:
                await asyncio.sleep(0.005)
        assert len(ends) == 2

    run(scenario())


def test_time_limit_holds_in_a_thread():
    async def scenario():
        generator = ScriptedGenerator(reply=lambda text: "2", go_on=asyncio.Event())
        async with open_thread_player(open_player(ask)) as player:
            episodes = make_episodes(player, generator, timeout_s=0.2)
            return await episodes.run([PROBLEM], sampling=replace(SAMPLING, num_samples=1))

    ((rollout,),) = run(scenario())
    assert rollout.failure.startswith("the agent was stopped at its time limit")


class Opening:
    """Context that notes which thread and task enters and leaves."""

    def __init__(self, *, error=None, gate=None):
        self.error, self.gate, self.places = error, gate, []
        self.left_with = ()

    async def __aenter__(self):
        self.places.append((threading.current_thread().name, asyncio.current_task()))
        if self.gate:
            await asyncio.Event().wait()
        if self.error == "enter":
            raise RuntimeError("the server is not there")

    async def __aexit__(self, *error):
        self.left_with = error
        self.places.append((threading.current_thread().name, asyncio.current_task()))
        if self.error == "leave":
            raise RuntimeError("the server was not there")


def open_once(opening, **options):
    async def scenario():
        async with open_thread_player(opening, **options):
            pass

    run(scenario())


def test_player_opens_and_closes_in_one_task_of_the_thread():
    opening = Opening()
    open_once(opening, name="environments")
    (entered, left) = opening.places
    assert entered == left
    assert entered[0] == "environments"
    assert list(opening.left_with) == [None, None, None]


def test_error_of_the_opening_is_raised_and_one_of_the_closing_logged(caplog):
    with pytest.raises(RuntimeError, match="the server is not there"):
        open_once(Opening(error="enter"))
    assert not caplog.records
    open_once(Opening(error="leave"))
    assert "a player ended badly: RuntimeError('the server was not there')" in caplog.text


def test_start_has_a_time_limit(monkeypatch):
    monkeypatch.setattr(in_thread, "START_S", 0.05)
    with pytest.raises(TimeoutError, match=r"the servers did not start within 0\.05 s"):
        open_once(Opening(gate=True), name="servers")
