"""An endpoint on loopback whose replies are scripted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import httpx
import numpy as np

from rl.agents.endpoint.app import make_app, read_key
from rl.agents.endpoint.episode import AgentEpisode
from rl.agents.endpoint.episodes import Endpoint
from rl.agents.settings import ClientRules, EpisodeSettings
from rl.http.server import format_url, listen, make_server
from rl.rollouts.renderer import Renderer, RendererConfig, make_renderer
from rl.types import Completion, SamplingParams
from tests.support.chat_templates import byte_tokenizer


@cache
def make_qwen_renderer() -> Renderer:
    """Return a renderer of bytes with Qwen3's chat template."""
    return make_byte_renderer(Path(mkdtemp(prefix="relay-qwen3-")), "qwen3")


def make_byte_renderer(folder: Path, name: str) -> Renderer:
    """Return a renderer of bytes with a chat template of `byte_tokenizer`."""
    tokenizer = byte_tokenizer(folder, name)
    return make_renderer(
        RendererConfig(keep_replies=True),
        tokenizer=tokenizer,
        stop_token_ids=(tokenizer.eos_token_id,),
    )


@dataclass(kw_only=True)
class ScriptedGenerator:
    """Generator that replies with the result of a function of the prompt's text."""

    reply: Callable[[str], str]
    renderer: Renderer = field(default_factory=make_qwen_renderer)
    calls: list[tuple[str, SamplingParams]] = field(default_factory=list)
    """Prompt and sampling of each call."""
    cancelled: int = 0
    go_on: asyncio.Event | None = None
    """Event that replies wait for."""

    async def generate(
        self, prompts: Sequence[np.ndarray], *, sampling: SamplingParams, session: str | None = None
    ) -> list[list[Completion]]:
        (prompt,) = prompts
        text = self.renderer._decode(prompt.tolist())
        self.calls.append((text, sampling))
        try:
            if self.go_on is not None:
                await self.go_on.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return [[self.complete(self.reply(text), sampling)]]

    def complete(self, reply: str, sampling: SamplingParams) -> Completion:
        ids = [*self.renderer.encode(reply).tolist(), self.renderer.end_token_id]
        is_cut_off = len(ids) > sampling.max_tokens
        ids = ids[: sampling.max_tokens]
        return Completion(
            token_ids=np.array(ids, dtype=np.int32),
            logprobs=np.linspace(-1, -0.5, len(ids), dtype=np.float32),
            policy_versions=np.full(len(ids), 3, dtype=np.int32),
            finish_reason="length" if is_cut_off else "stop",
        )


class FaultyApp:
    """An application that answers the first requests of some episodes with an error."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.faults: dict[str, list[int]] = {}
        """Statuses of the next answers, by the key of the episode."""

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        faults = self.faults.get(read_key(scope)) if scope["type"] == "http" else None
        if not faults:
            await self._app(scope, receive, send)
            return
        # The clients of OpenAI and Anthropic wait half a second if nothing is said.
        headers = [(b"content-type", b"application/json"), (b"retry-after-ms", b"10")]
        status = faults.pop(0)
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b'{"error": {"message": "a fault"}}'})


@dataclass(kw_only=True)
class Served:
    """A running endpoint with one open episode."""

    url: str
    endpoint: Endpoint
    episode: AgentEpisode
    generator: ScriptedGenerator
    http: httpx.AsyncClient

    @property
    def key(self) -> str:
        return self.episode.settings.key

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        """Post a body with the episode's key."""
        headers = {"authorization": f"Bearer {self.key}"} | {
            name.replace("_", "-"): value for name, value in headers.items()
        }
        content = {"json": body} if not isinstance(body, bytes) else {"content": body}
        return await self.http.post(f"{self.url}{path}", headers=headers, **content)

    async def chat(
        self, *messages: Any, headers: dict[str, str] | None = None, **fields: Any
    ) -> Any:
        """Return the body of a chat completion."""
        body = {"model": "any", "messages": list(messages)} | fields
        answer = await self.post("/v1/chat/completions", body, **(headers or {}))
        answer.raise_for_status()
        return answer.json()


def make_settings(**changes: Any) -> EpisodeSettings:
    sampling = SamplingParams(max_tokens=changes.pop("max_reply", 64), seed=changes.pop("seed", 5))
    values = {"max_context": 2048, "max_requests": 16, "max_tokens": 10_000} | changes
    return EpisodeSettings(sampling=sampling, **values)


@contextlib.asynccontextmanager
async def serve(
    reply: Callable[[str], str] = lambda text: "Hello.",
    *,
    rules: ClientRules | None = None,
    max_body_bytes: int = 1 << 20,
    faults: Sequence[int] = (),
    renderer: Renderer | None = None,
    **settings: Any,
) -> AsyncIterator[Served]:
    """Serve an endpoint on a free loopback port; its first answers are the statuses `faults`."""
    generator = ScriptedGenerator(reply=reply, renderer=renderer or make_qwen_renderer())
    endpoint = Endpoint(
        generator=generator, renderer=generator.renderer, rules=rules or ClientRules()
    )
    episode = endpoint.open(make_settings(**settings))
    with listen("127.0.0.1", 0) as listener:
        app = FaultyApp(make_app(endpoint, max_body_bytes=max_body_bytes))
        app.faults[episode.settings.key] = [*faults]
        server = make_server(app)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        async with httpx.AsyncClient(timeout=20, trust_env=False) as http:
            yield Served(
                url=format_url(listener),
                endpoint=endpoint,
                episode=episode,
                generator=generator,
                http=http,
            )
        endpoint.close()
        server.should_exit = True
        await serving


def run_served(scenario: Callable[[Served], Awaitable[Any]], *args: Any, **options: Any) -> Any:
    """Return the result of a scenario at an endpoint with the options of `serve`."""

    async def serve_it() -> Any:
        async with serve(*args, **options) as served:
            return await asyncio.wait_for(scenario(served), 30)

    return asyncio.run(serve_it())


async def wait_until(condition: Callable[[], Any]) -> None:
    """Wait until a condition is true."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)
