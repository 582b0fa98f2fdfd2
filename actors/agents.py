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

from monarch.actor import Actor, concurrent_endpoint, endpoint

from rl.agents.app import make_app
from rl.agents.endpoint import Endpoint
from rl.agents.episode import ClientRules, EpisodeSettings
from rl.agents.host import AgentHost, PlayedEpisode
from rl.agents.process import AgentProcess
from rl.agents.program import AgentProgram
from rl.agents.queue import GenerateAnswer, QueuedGenerator, TakenCalls
from rl.config.configurable import Configurable
from rl.config.tree import check_bounds
from rl.http.server import format_url, listen, make_server, raise_open_files
from rl.observability.spans import span
from rl.rollouts.renderer import Renderer
from rl.types import BranchRole, Problem

logger = logging.getLogger(__name__)

STOP_S = 5.0
"""Time for answers under way when the server ends."""


class AgentEndpoint(Actor, Configurable):
    """Actor with the HTTP endpoint of a run's agents, in a process of its own."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Where the endpoint listens, how many agents run, and what clients may decide."""

        max_running: int = 64
        """Most agents at the same time."""
        host: str = "127.0.0.1"
        """Address to listen on: loopback for agents that this run starts. Another one lets agents
        in from outside, by plain HTTP, each with the key of its episode."""
        port: int = 0
        """Port to listen on; 0 takes a free one."""
        trained_roles: tuple[BranchRole, ...] = ("main", "sub-agent")
        """Roles of the conversations that are trained on; others are only recorded."""
        models: tuple[str, ...] = ()
        """Model names that agents may ask for; empty: any, all of which are this run's model."""
        honours_sampling: bool = False
        """Sample as agents ask (temperature, top_p, top_k, seed) instead of only recording it.
        Refused for training, because logprobs must be those of the policy."""
        refuses_long_replies: bool = False
        """Refuse a request for more tokens than are left, instead of giving it what is left."""
        max_body_mib: int = 32
        """Largest request, in MiB."""
        import_timeout_s: float = 300.0
        """Longest time to import the agent's function."""

        def __post_init__(self) -> None:
            check_bounds(self, "max_running", "max_body_mib", at_least=1)
            check_bounds(self, "port", at_least=0, at_most=65_535)
            check_bounds(self, "import_timeout_s", above=0)

    def __init__(self, *, config: Config, program: AgentProgram, renderer: Renderer) -> None:
        self.config = config
        self._program = program
        self._renderer = renderer
        self._generator = QueuedGenerator()
        self._stack = contextlib.AsyncExitStack()
        self._host: AgentHost | None = None

    @endpoint
    @span("setup")
    async def setup(self) -> None:
        """Start the server, and the process that plays agents."""
        raise_open_files()
        config = self.config
        rules = ClientRules(
            honours_sampling=config.honours_sampling,
            refuses_long_replies=config.refuses_long_replies,
            models=config.models,
        )
        calls = Endpoint(generator=self._generator, renderer=self._renderer, rules=rules)
        agents = AgentProcess(
            self._program.function or None, import_timeout_s=config.import_timeout_s
        )
        await agents.start()
        self._stack.push_async_callback(agents.close)
        listener = self._stack.enter_context(listen(config.host, config.port))
        server = make_server(make_app(calls, max_body_bytes=config.max_body_mib << 20))
        serving = asyncio.create_task(server.serve(sockets=[listener]))

        async def stop() -> None:
            calls.close()
            server.should_exit = True
            await asyncio.wait({serving}, timeout=STOP_S)

        self._stack.push_async_callback(stop)
        url = format_url(listener)
        logger.info("agents reach the model at %s", url)
        self._host = AgentHost(
            endpoint=calls,
            agents=agents,
            program=self._program,
            url=url,
            trained=config.trained_roles,
        )

    @concurrent_endpoint
    @span("play")
    async def play(
        self, problem: Problem, settings: EpisodeSettings, time_limit_s: float
    ) -> PlayedEpisode:
        """Play one agent to its end."""
        assert self._host is not None
        return await self._host.play(problem, settings=settings, time_limit_s=time_limit_s)

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
