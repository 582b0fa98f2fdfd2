"""Host of agents: plays an agent against the endpoint, and returns what became of both."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

from rl.agents.config import EndpointConfig
from rl.agents.endpoint.app import make_app
from rl.agents.endpoint.episode import AgentEpisode
from rl.agents.endpoint.episodes import Endpoint
from rl.agents.players.loading import EARLY_CLIENT, WITHOUT_KEY
from rl.agents.players.plays import AgentResult, AgentSpec
from rl.agents.players.process import AgentProcess, AgentProcessLostError
from rl.agents.program import AgentProgram
from rl.agents.settings import EpisodeSettings
from rl.agents.types import PlayedEpisode, make_failed_play
from rl.http.server import format_url, listen, make_server
from rl.protocols import TokenGenerator
from rl.rollouts.renderer import Renderer
from rl.types import BranchRole, Problem
from rl.utils.printing import truncate
from rl.utils.proxies import LOOPBACK_NAMES, is_loopback

logger = logging.getLogger(__name__)

SHOWN_OUTPUT = 500
"""Characters of an agent's last output in the reason of a failure."""
MAX_METRICS = 64
"""Most names of posted numbers that become metrics of a run, beside the reward."""
STOP_S = 5.0
"""Time for answers under way when the server ends."""
KEPT_ASKED = 1_000
"""Characters of an asked value that reward functions read: there may be many values."""
KEPT_OUTPUT = 16_384
"""Characters of an agent's last output that reward functions read."""


class Agents(Protocol):
    """Something that plays agents: `rl.agents.players.process.AgentProcess`, or
    `rl.agents.players.in_loop.LoopAgents`.
    """

    async def start(self) -> None: ...

    async def play(self, spec: AgentSpec) -> AgentResult: ...

    async def close(self) -> None:
        """End all agents. Idempotent."""
        ...


@dataclass(kw_only=True, eq=False)
class AgentHost:
    """Endpoint and agents of one machine."""

    endpoint: Endpoint
    agents: Agents
    program: AgentProgram
    url: str
    """URL of the endpoint's server, as agents reach it."""
    trained: Collection[BranchRole] = field(default=("main", "sub-agent"))
    _metric_names: set[str] = field(default_factory=set)
    """Names of posted numbers that are metrics."""
    _has_warned: bool = False
    """The log has told of a name that is none."""

    async def play(
        self, problem: Problem, *, settings: EpisodeSettings, time_limit_s: float
    ) -> PlayedEpisode:
        """Play one episode; an agent that fails gives an episode with its failure."""
        key = settings.key
        try:
            spec = self.program.make_spec(
                problem, url=f"{self.url}/episodes/{key}", key=key, time_limit_s=time_limit_s
            )
        except ValueError as error:
            # Of this problem: the settings are checked before a run starts.
            return make_failed_play(f"the agent cannot be given the problem: {error}")
        episode = self.endpoint.open(settings)
        try:
            result = await self._play(spec)
        finally:
            self.endpoint.end(episode)
        return self._describe(episode, result)

    async def _play(self, spec: AgentSpec) -> AgentResult:
        """Return what became of an agent; one that has ended its own guard has failed."""
        try:
            return await self.agents.play(spec)
        except AgentProcessLostError as error:
            logger.warning("an agent's guard was lost: %s", error)
            return AgentResult(
                reason="lost",
                status=-signal.SIGKILL,
                output=f"relay: {error}",
                wall_s=0.0,
                cpu_s=0.0,
            )

    def _describe(self, episode: AgentEpisode, result: AgentResult) -> PlayedEpisode:
        found = episode.list_conversations(trained=self.trained)
        end = episode.reached or ("time" if result.reason == "time limit" else "done")
        failure = self._find_failure(episode, result, has_turns=bool(found.turns))
        output = result.output[-KEPT_OUTPUT:].replace(episode.settings.key, "<key>")
        state: dict[str, Any] = {
            "exit_status": result.status,
            "output": output,
            "value": result.value,
            "files": dict(result.files),
            "posted": dict(episode.posted),
            "asked": {name: [*map(_shorten, values)] for name, values in episode.asked.items()},
            "wall_s": result.wall_s,
        }
        metrics = {f"agent/{name}": float(count) for name, count in episode.counts.items()}
        metrics |= {"agent/wall_s": result.wall_s, "agent/cpu_s": result.cpu_s}
        for name, value in episode.posted.items():
            if self._is_metric(name):
                metrics[f"agent/posted/{name}"] = value
        return PlayedEpisode(
            turns=found.turns,
            branches=found.branches,
            end="failed" if failure else end,
            failure=failure,
            state=state,
            metrics=metrics,
        )

    def _is_metric(self, posted: str) -> bool:
        """Return whether a posted number is one of the run's metrics, and not only in the state.

        Agents choose the names, and every name has a place in the memory of a dashboard for ever.
        """
        # The reward does not depend on what was posted before.
        if posted == "reward" or posted in self._metric_names:
            return True
        if len(self._metric_names) < MAX_METRICS:
            self._metric_names.add(posted)
            return True
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "agents have posted numbers of more than %d names: %r and other new ones are no "
                "metrics, only in rollout.state",
                MAX_METRICS,
                posted,
            )
        return False

    def _find_failure(
        self, episode: AgentEpisode, result: AgentResult, *, has_turns: bool
    ) -> str | None:
        """Return why an episode cannot be trained on."""
        reason = None
        if result.reason == "error":
            # An agent whose limit of replies is reached often ends with the error it was told.
            if not (self.program.may_exit_with_error or episode.reached):
                reason = f"the agent failed: {result.describe()}"
        elif result.reason == "time limit" and episode.reached:
            reason = None  # It waits for a reply that it does not get any more.
        elif result.reason != "ok":
            reason = f"the agent was {result.describe()}"
        elif result.num_left and not self.program.may_leave_processes:
            reason = "the agent left processes behind, which were ended"
        if reason is None and not has_turns:
            reason = "the agent has asked the model nothing"
        if not has_turns and self.program.function and WITHOUT_KEY in result.output:
            reason = f"{reason}: {EARLY_CLIENT}"
        if reason is None:
            return None
        last = truncate(
            result.output.strip().replace(episode.settings.key, "<key>")[-SHOWN_OUTPUT:],
            most=SHOWN_OUTPUT,
        )
        return f"{reason}; its last output: {last!r}" if last else f"{reason}; it wrote nothing"


def _shorten(asked: Any) -> Any:
    """Return a value that a client asked for; of a long one an excerpt of its text."""
    text = asked if isinstance(asked, str) else json.dumps(asked, ensure_ascii=False)
    return asked if len(text) <= KEPT_ASKED else truncate(text, most=KEPT_ASKED)


@asynccontextmanager
async def open_host(
    config: EndpointConfig,
    *,
    program: AgentProgram,
    renderer: Renderer,
    generator: TokenGenerator,
    agents: Agents | None = None,
) -> AsyncIterator[AgentHost]:
    """Start the endpoint's server in this event loop, and the process of the agents.

    Args:
        agents: what plays the agents, started and closed by the host; None: a process.

    Raises ValueError if the address is unavailable, RunError if the agent's function cannot be
    loaded.
    """
    endpoint = Endpoint(generator=generator, renderer=renderer, rules=config.rules)
    if agents is None:
        function = program.function or None
        agents = AgentProcess(
            function, import_timeout_s=config.import_timeout_s, keep_env=program.keep_env
        )
    async with AsyncExitStack() as stack:
        stack.push_async_callback(agents.close)
        await agents.start()
        listener = stack.enter_context(listen(config.host, config.port))
        hosts = None
        if is_loopback(config.host):
            # A tunnel or a gateway may lead here by another name.
            named = [] if config.url is None else [urlsplit(config.url).hostname or ""]
            hosts = [*LOOPBACK_NAMES, *named]
        app = make_app(endpoint, max_body_bytes=config.max_body_mib << 20, hosts=hosts)
        server = make_server(app)
        serving = asyncio.create_task(server.serve(sockets=[listener]))

        async def stop() -> None:
            endpoint.close()
            server.should_exit = True
            await asyncio.wait({serving}, timeout=STOP_S)

        stack.push_async_callback(stop)
        yield AgentHost(
            endpoint=endpoint,
            agents=agents,
            program=program,
            url=(config.url or format_url(listener)).rstrip("/"),
            trained=config.trained_roles,
        )
