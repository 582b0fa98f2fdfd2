"""The endpoint on loopback with the scripted model, and what its episodes have recorded."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from rl.agents.endpoint.app import make_app
from rl.agents.endpoint.episode import AgentEpisode
from rl.agents.endpoint.episodes import Endpoint
from rl.agents.settings import EpisodeSettings
from rl.http.server import format_url, listen, make_server
from rl.rollouts.renderer import Renderer
from rl.types import Completion, SamplingParams
from tests.support.agent_endpoint import FaultyApp, make_qwen_renderer
from tools.agents_contract.cases import Case
from tools.agents_contract.scripted import reply_to

MAX_REPLY = 1024
MAX_BODY = 4 << 20


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sampled:
    """A reply of the scripted model."""

    prompt_ids: np.ndarray
    completion: Completion


@dataclass(kw_only=True, eq=False)
class ScriptedModel:
    """A `TokenGenerator` that keeps what it has sampled, by the key of the episode."""

    renderer: Renderer = field(default_factory=make_qwen_renderer)
    sampled: dict[str, list[Sampled]] = field(default_factory=lambda: defaultdict(list))
    delays_s: dict[str, float] = field(default_factory=dict)
    """Time that a reply to an episode takes."""

    async def generate(
        self, prompts: Sequence[np.ndarray], *, sampling: SamplingParams, session: str | None = None
    ) -> list[list[Completion]]:
        (prompt_ids,) = prompts
        key = session or ""
        await asyncio.sleep(self.delays_s.get(key, 0.0))
        text = self.renderer.tokenizer.decode(prompt_ids.tolist(), skip_special_tokens=False)
        completion = self._complete(reply_to(text), sampling)
        self.sampled[key].append(Sampled(prompt_ids=prompt_ids, completion=completion))
        return [[completion]]

    def _complete(self, reply: str, sampling: SamplingParams) -> Completion:
        ids, reason = [*self.renderer.encode(reply).tolist(), self.renderer.end_token_id], "stop"
        for stop in sampling.stop_texts:
            before, found, _ = reply.partition(stop)
            if found:
                # As an engine does: the stop text is the end of what was sampled.
                ids = self.renderer.encode(before + found).tolist()
        if len(ids) > sampling.max_tokens:
            ids, reason = ids[: sampling.max_tokens], "length"
        return Completion(
            token_ids=np.array(ids, dtype=np.int32),
            logprobs=np.linspace(-1, -0.5, len(ids), dtype=np.float32),
            policy_versions=np.zeros(len(ids), dtype=np.int32),
            finish_reason="stop" if reason == "stop" else "length",
        )


@dataclass(kw_only=True, eq=False)
class ContractServer:
    """A running endpoint."""

    url: str
    endpoint: Endpoint
    model: ScriptedModel
    app: FaultyApp

    def open(self, case: Case) -> AgentEpisode:
        """Open an episode for a case."""
        settings = EpisodeSettings(
            sampling=SamplingParams(max_tokens=MAX_REPLY, seed=1),
            max_context=case.max_context,
            max_requests=32,
            max_tokens=10 * case.max_context,
        )
        episode = self.endpoint.open(settings)
        self.app.faults[settings.key] = [*case.faults]
        self.model.delays_s[settings.key] = case.delay_s
        if case.is_ended:
            self.endpoint.end(episode)
        return episode


@contextlib.asynccontextmanager
async def serve_contract() -> AsyncIterator[ContractServer]:
    """Serve the endpoint on a free loopback port."""
    model = ScriptedModel()
    endpoint = Endpoint(generator=model, renderer=model.renderer)
    app = FaultyApp(make_app(endpoint, max_body_bytes=MAX_BODY))
    with listen("127.0.0.1", 0) as listener:
        server = make_server(app)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield ContractServer(url=format_url(listener), endpoint=endpoint, model=model, app=app)
        finally:
            endpoint.close()
            server.should_exit = True
            await serving
