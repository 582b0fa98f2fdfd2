"""Player of agents in this process, for scripts and tests without actors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np

from rl.agents.config import EndpointConfig
from rl.agents.players.host import AgentHost, Agents, open_host
from rl.agents.program import AgentProgram
from rl.agents.settings import EpisodeSettings
from rl.agents.types import PlayedEpisode
from rl.protocols import TokenGenerator
from rl.rollouts.renderer import Renderer
from rl.types import Completion, Problem, SamplingParams


class GeneratorByKey:
    """A `TokenGenerator` that passes the calls of each episode to a generator of its own."""

    def __init__(self) -> None:
        self.by_key: dict[str | None, TokenGenerator] = {}

    async def generate(
        self, prompts: Sequence[np.ndarray], *, sampling: SamplingParams, session: str | None = None
    ) -> list[list[Completion]]:
        generator = self.by_key[session]
        return await generator.generate(prompts, sampling=sampling, session=session)


class LocalPlayer:
    """An `rl.agents.rollouts.AgentPlayer` whose endpoint runs in this event loop."""

    def __init__(self, host: AgentHost, generators: GeneratorByKey, *, max_running: int) -> None:
        self.host = host
        self._generators = generators
        self._slots = asyncio.Semaphore(max_running)

    async def play(
        self,
        problem: Problem,
        *,
        settings: EpisodeSettings,
        time_limit_s: float,
        generator: TokenGenerator,
    ) -> PlayedEpisode:
        self._generators.by_key[settings.key] = generator
        try:
            async with self._slots:
                return await self.host.play(problem, settings=settings, time_limit_s=time_limit_s)
        finally:
            del self._generators.by_key[settings.key]


@asynccontextmanager
async def open_local_player(
    config: EndpointConfig,
    *,
    program: AgentProgram | None = None,
    renderer: Renderer,
    agents: Agents | None = None,
) -> AsyncIterator[LocalPlayer]:
    """Start endpoint and agents, which are a program or functions; raises as `open_host`.

    Example:
        async with open_local_player(config, program=program, renderer=renderer) as player:
            episodes = AgentEpisodes(generator=generator, player=player, max_tokens=4096)
            groups = await episodes.run(problems, sampling=sampling)
    """
    generators = GeneratorByKey()
    opening = open_host(
        config,
        program=program or AgentProgram(),
        renderer=renderer,
        generator=generators,
        agents=agents,
    )
    async with opening as host:
        yield LocalPlayer(host, generators, max_running=config.max_running)
