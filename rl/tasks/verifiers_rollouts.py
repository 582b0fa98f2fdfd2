"""Rollouts of verifiers as agents: each plays an episode at relay's endpoint.

A rollout runs with its own harnesses, tools, stops and rewards; the model of the trained seat is
the URL of its episode, where every token is recorded.

    harness -> server of verifiers (stops, limits, its trace) -> endpoint -> relay's generator

All of it runs in the event loop of one thread, because rewards and tools are foreign code.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

from verifiers.v1 import EvalClientConfig, ModelContext, Trace
from verifiers.v1.clients import resolve_client

from rl.agents.config import EndpointConfig
from rl.agents.players.in_loop import AgentFailedError, LoopAgents
from rl.agents.players.in_thread import open_thread_player
from rl.agents.players.local import open_local_player
from rl.agents.rollouts import AgentPlayer
from rl.agents.settings import EpisodeSettings
from rl.agents.types import PlayedEpisode
from rl.http.open_files import raise_open_files
from rl.protocols import TokenGenerator
from rl.rollouts.renderer import Renderer
from rl.tasks.verifiers_private import lend_client
from rl.types import Problem
from rl.utils.errors import RunError
from rl.utils.proxies import allow_loopback
from rl.utils.sharing import copy_data

logger = logging.getLogger(__name__)

for _name in ("aiohttp.access", "httpx", "httpx2", "verifiers.v1"):
    # These loggers write a line for every request and rollout, some with the key of the episode,
    # unless their level is set before.
    if logging.getLogger(_name).level == logging.NOTSET:
        logging.getLogger(_name).setLevel(logging.WARNING)

POLICY = "policy"
"""Name of the trained model in requests."""
NO_KEY = "RELAY_HAS_NO_KEY"
"""Environment variable of the API key, which is not set: the URL of an episode names it."""


def open_rollout_player(
    env: Any,
    *,
    seat: str,
    tasks: Mapping[str, Any],
    config: EndpointConfig,
    renderer: Renderer,
) -> AbstractAsyncContextManager[AgentPlayer]:
    """Start, in a thread, the servers that the rollouts of a `verifiers.v1.Env` share, and the
    endpoint.

    Args:
        seat: the agent that is trained.
        tasks: a `verifiers.v1.Task` for the id of each problem.

    Raises RunError if the environment cannot be started.
    """
    opening = _open_rollouts(env, seat=seat, tasks=tasks, config=config, renderer=renderer)
    return open_thread_player(opening, name="environments")


@asynccontextmanager
async def _open_rollouts(
    env: Any,
    *,
    seat: str,
    tasks: Mapping[str, Any],
    config: EndpointConfig,
    renderer: Renderer,
) -> AsyncIterator[AgentPlayer]:
    # A reply in the making holds four sockets of this process.
    raise_open_files()
    allow_loopback()
    async with AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(env.serving())
        except Exception as error:  # raised by the environment's own code
            raise RunError(f"the environment cannot be started: {error!r}") from error
        rollouts = Rollouts(env, seat=seat, tasks=tasks)
        stack.push_async_callback(rollouts.close)
        opening = open_local_player(config, renderer=renderer, agents=LoopAgents(rollouts.play))
        yield RolloutPlayer(await stack.enter_async_context(opening))


class Rollouts:
    """Rollouts of an environment; `play` is the agent of an episode."""

    def __init__(self, env: Any, *, seat: str, tasks: Mapping[str, Any]) -> None:
        self._env = env
        self._seat = seat
        self._tasks = tasks
        # With connections that stay open, each request would look at all of them.
        headers = {"connection": "close"}
        self._client = resolve_client(
            EvalClientConfig(base_url="", api_key_var=NO_KEY, headers=headers)
        )

    async def play(self, problem: Problem, *, url: str, key: str) -> dict[str, float]:
        """Play one rollout; return its metrics and rewards by their names.

        Raises AgentFailedError if the rollout failed, or has no rewards.
        """
        client = EvalClientConfig(base_url=f"{url}/v1", api_key_var=NO_KEY)
        traces: list[Trace] = []

        def register(trace: Trace) -> None:
            if trace.agent.name != self._seat:
                return
            if traces:
                # Each run has rewards of its own, and an episode has one.
                raise AgentFailedError(
                    f"seat {self._seat!r} plays several runs in one episode; relay trains one"
                )
            traces.append(trace)

        # Episodes of a task would share what its hooks do to its data.
        task = copy_data(self._tasks[problem.id])
        with lend_client(self._env, self._client, config=client):
            context = ModelContext(model=POLICY, client=client)
            episode = await self._env.run_episode(task, context, on_trace=register)
        if not episode.ok:
            raise AgentFailedError(_describe_errors([*episode.errors, *_list_errors(traces)]))
        if not traces:
            raise AgentFailedError(f"seat {self._seat!r} was not played")
        return read_metrics(traces[0])

    async def close(self) -> None:
        await self._client.close()


class RolloutPlayer:
    """An `rl.agents.rollouts.AgentPlayer` that adds the metrics of a rollout to its episode."""

    def __init__(self, player: AgentPlayer) -> None:
        self._player = player

    async def play(
        self,
        problem: Problem,
        *,
        settings: EpisodeSettings,
        time_limit_s: float,
        generator: TokenGenerator,
    ) -> PlayedEpisode:
        played = await self._player.play(
            problem, settings=settings, time_limit_s=time_limit_s, generator=generator
        )
        return replace(played, metrics={**played.metrics, **(played.state["value"] or {})})


def read_metrics(trace: Trace) -> dict[str, float]:
    """Return the metrics and rewards of a trace, `verifiers/reward` is their weighted sum.

    Raises AgentFailedError if rewards are missing.
    """
    missing = sorted(name for name, reward in trace.rewards.items() if reward is None)
    if missing:
        raise AgentFailedError(
            f"it was ended before its rewards were computed: {', '.join(missing)}"
        )
    if not trace.rewards:
        raise AgentFailedError("it has no rewards, so nothing can be learned from it")

    metrics = {}
    for name, value in trace.metrics.items():
        if value is not None:
            metrics[f"verifiers/{name}"] = float(value)
    # After the metrics: a reward of the same name is what the model is trained on.
    for name, reward in trace.rewards.items():
        metrics[f"verifiers/{name}"] = float(reward.score)
    metrics["verifiers/reward"] = float(trace.reward)
    return metrics


def _list_errors(traces: Iterable[Trace]) -> list[Any]:
    errors = []
    for trace in traces:
        errors += trace.errors
    return errors


def _describe_errors(errors: Sequence[Any]) -> str:
    # An error of a trace is often one of the episode too; a dict names it once, in order.
    reasons = dict.fromkeys(f"{error.type}: {error.message}" for error in errors)
    return "; ".join(reasons) or "it gives no reason"
