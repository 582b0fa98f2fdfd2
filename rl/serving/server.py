"""One run's model, loaded and sampled in this process, behind an HTTP server."""

from __future__ import annotations

import asyncio
import json
import shlex
import socket
from collections.abc import Sequence
from contextlib import suppress

from rl.agents.endpoint.stateless import ChatModel, StatelessAnswerer
from rl.http.keys import Keys
from rl.http.open_files import raise_open_files
from rl.http.server import format_url, make_server
from rl.http.signals import stop_on_signals
from rl.local import LocalBackend
from rl.models.converter import ModelConverter
from rl.observability.console import print_line
from rl.rollouts.renderer import make_renderer
from rl.serving.app import make_app
from rl.serving.run_weights import RunSettings, RunWeights
from rl.starting_point import StartingPoint
from rl.training.config import TrainingConfig
from rl.training.engine import TrainingEngine
from rl.utils.proxies import LOOPBACK_NAMES
from rl.utils.threads import WorkerThread, wait_until_event


def load_backend(
    start: StartingPoint,
    settings: RunSettings,
    *,
    converters: Sequence[ModelConverter.Config] = (),
    device: str | None = None,
) -> LocalBackend:
    """Load a model folder in the dtype of the run's generator.

    Args:
        converters: those of a run whose checkpoint replaces the folder's weights.
        device: None takes the GPU if there is one.
    """
    # Nothing is trained: weights in full precision would only take memory.
    training = TrainingConfig(dtype=settings.dtype, param_dtype=settings.dtype)
    return LocalBackend(
        TrainingEngine.Config(training=training, converters=tuple(converters)),
        spec=start.spec,
        hf_assets_path=str(start.folder),
        device=device,
        gathers=True,
    )


def make_answerer(
    backend: LocalBackend, start: StartingPoint, settings: RunSettings, *, thread: WorkerThread
) -> StatelessAnswerer:
    """Return what answers for a run's model; raise ValueError if its renderer cannot be made."""
    tokenizer, stop_token_ids = start.tokenizer()
    model = ChatModel(
        renderer=make_renderer(
            settings.renderer, tokenizer=tokenizer, stop_token_ids=stop_token_ids
        ),
        thread=thread,
        max_context=min(settings.max_model_len, start.spec.model.rope.max_positions),
        announces_tools=settings.announces_tools,
        thinks=settings.renderer.thinking,
    )
    return StatelessAnswerer(model=model, generator=backend, names=(settings.name,))


async def serve_run(
    backend: LocalBackend,
    weights: RunWeights,
    answerer: StatelessAnswerer,
    *,
    listener: socket.socket,
    keys: Keys,
    host: str,
) -> None:
    """Load the weights, and answer requests until a signal arrives.

    Raises ValueError if a checkpoint cannot be loaded.
    """

    async def load() -> None:
        if weights.step is not None:
            await backend.load_checkpoint(str(weights.folder), model_only=True)
        await backend.pull(await backend.push())

    with stop_on_signals() as stop:
        async with backend:
            await wait_until_event(stop, load())
            if stop.is_set():
                return
            raise_open_files()  # Before the application reads how many connections there may be.
            hosts = None if keys.configured else (*LOOPBACK_NAMES, host.lower())
            server = make_server(make_app(answerer, keys=keys, hosts=hosts))
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            print_line(describe(format_url(listener), weights, answerer.names[0], keys=keys))
            stopping = asyncio.create_task(stop.wait())
            await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
            server.should_exit = True
            with suppress(asyncio.CancelledError):
                await serving


def describe(url: str, weights: RunWeights, name: str, *, keys: Keys) -> str:
    """Return what is served where, and a command that asks it something."""
    what = "the last weights" if weights.step is None else f"step {weights.step}"
    body = {"model": name, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 64}
    header = ' -H "Authorization: Bearer $KEY"' if keys.configured else ""
    return "\n".join(
        [
            f"serving {name} ({what}) at {url}",
            f"for OpenAI's clients: {url}/v1; for Anthropic's: {url}",
            f"curl {url}/v1/chat/completions{header} -d {shlex.quote(json.dumps(body))}",
        ]
    )
