"""The agents' actor: the endpoint that agents call, and the process that plays them.

It has no generator: the controller takes the endpoint's calls (`take_calls`), draws the replies,
and brings them back (`answer_calls`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import cloudpickle
from monarch.actor import Actor, concurrent_endpoint, endpoint

from rl.agents.config import EndpointConfig
from rl.agents.endpoint.queue import GenerateAnswer, QueuedGenerator, TakenCalls
from rl.agents.program import AgentProgram
from rl.agents.settings import EpisodeSettings
from rl.agents.types import PlayedEpisode, make_failed_play
from rl.config.configurable import Configurable
from rl.http.open_files import raise_open_files
from rl.observability.spans import span
from rl.rollouts.renderer import Renderer
from rl.types import Problem
from rl.utils.printing import describe_value
from rl.utils.processes import reduce_collections

if TYPE_CHECKING:
    from rl.agents.players.host import AgentHost  # see `setup`

logger = logging.getLogger(__name__)


class AgentEndpoint(Actor, Configurable):
    """Actor with the HTTP endpoint of a run's agents, in a process of its own."""

    @dataclass(kw_only=True, slots=True)
    class Config(EndpointConfig):
        """Settings of the endpoint."""

    def __init__(self, *, config: Config, program: AgentProgram, renderer: Renderer) -> None:
        self.config = config
        self._program = program
        self._renderer = renderer
        self._generator = QueuedGenerator()
        self._stack = contextlib.AsyncExitStack()
        self._host: AgentHost | None = None
        self._plays: dict[str, asyncio.Task[PlayedEpisode]] = {}
        """Plays under way by the key of their episode."""

    @endpoint
    @span("setup")
    async def setup(self) -> None:
        """Start the server, and the process that plays agents."""
        # Imported here: the web framework takes time, and a run without agents does not need it.
        from rl.agents.players.host import open_host

        raise_open_files()
        self._stack.enter_context(reduce_collections())
        opening = open_host(
            self.config,
            program=self._program,
            renderer=self._renderer,
            generator=self._generator,
        )
        self._host = await self._stack.enter_async_context(opening)
        logger.info("agents reach the model at %s", self._host.url)

    @concurrent_endpoint
    @span("play")
    async def play(
        self, problem: Problem, settings: EpisodeSettings, time_limit_s: float
    ) -> PlayedEpisode:
        """Play one agent to its end, or to that by `end_plays`.

        A play that fails, also by a result that cannot be sent, is an episode that has failed: an
        error of this call would end the run.
        """
        assert self._host is not None
        host_play = self._host.play(problem, settings=settings, time_limit_s=time_limit_s)
        playing = self._plays[settings.key] = asyncio.create_task(host_play)
        try:
            await asyncio.wait({playing})
        finally:
            playing.cancel()
            del self._plays[settings.key]
        # A CancelledError would count as a crash of the actor.
        if playing.cancelled():
            return make_failed_play("the agent was ended")
        try:
            played = playing.result()
            cloudpickle.dumps(played)
        except Exception as error:
            # One agent among many, whatever it has done.
            logger.error("the play of an agent failed: %r", error, exc_info=error)
            return make_failed_play(f"the play failed: {describe_value(error)}")
        return played

    @concurrent_endpoint
    async def end_plays(self, keys: Sequence[str]) -> None:
        """End the agents of episodes that nobody waits for any more."""
        for key in keys:
            if key in self._plays:
                self._plays[key].cancel()

    @concurrent_endpoint
    async def take_calls(self, wait_s: float) -> TakenCalls:
        """Return the calls that wait for a reply, after at most `wait_s` seconds none."""
        return await self._generator.take(wait_s=wait_s)

    @concurrent_endpoint
    async def answer_calls(self, answers: Sequence[GenerateAnswer]) -> None:
        self._generator.answer(answers)

    @endpoint
    @span("close")
    async def close(self) -> None:
        await self._stack.aclose()
