"""Backends of the Tinker API on a small base model, in an event loop of a thread as a notebook has it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from actors.calls import Timeouts
from actors.generator import VLLMGenerator
from actors.tinker_backend import ActorBackend
from actors.tinker_trainer import TinkerTrainer
from rl.distributed.mesh import ParallelismConfig
from rl.tinker.backend import Backend
from rl.tinker.local.backend import LocalBackend
from rl.tinker.messages import AdamParams, ForwardBackwardOutput, LossCall, SampleOutput
from rl.weights.store import WeightStore
from tests.tinker.local.data_parts import random_data
from tests.tinker.local.local_parts import TRAINING, base_config, request, settings

T = TypeVar("T")

START_TIMEOUT_S = 240.0
CALL_TIMEOUT_S = 90.0
CONTEXT = 64
CROSS_ENTROPY, PPO = LossCall(name="cross_entropy"), LossCall(name="ppo")


class Loop:
    """An event loop in a thread; what runs in it has a deadline."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="backend", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T], *, timeout_s: float = CALL_TIMEOUT_S) -> T:
        async def within() -> T:
            return await asyncio.wait_for(coroutine, timeout_s)

        return asyncio.run_coroutine_threadsafe(within(), self._loop).result()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CALL_TIMEOUT_S)
        self._loop.close()


def local_backend(assets: Path) -> LocalBackend:
    backend: LocalBackend = LocalBackend.Config(bases=(base_config(assets),), training=TRAINING).build()
    return backend


def actor_config(
    assets: Path, *, num_procs: int = 1, parallelism: ParallelismConfig | None = None
) -> ActorBackend.Config:
    return ActorBackend.Config(
        base=base_config(assets),
        trainer=TinkerTrainer.Config(
            num_procs=num_procs, parallelism=parallelism or ParallelismConfig(), training=TRAINING
        ),
        generator=VLLMGenerator.Config(dtype="float32", max_model_len=CONTEXT, cpu_kv_cache_gib=0.05),
        weights=WeightStore.Config(keep_versions=6),
        timeouts=Timeouts(close_s=10),
    )


@contextmanager
def running(*backends: Backend) -> Iterator[Loop]:
    loop = Loop()
    try:
        for backend in backends:
            loop.run(backend.start(), timeout_s=START_TIMEOUT_S)
        yield loop
    finally:
        for backend in backends:
            loop.run(backend.close())
        loop.close()


async def train(backend: Backend, model_id: str, *, seed: int = 1, steps: int = 2) -> list[Any]:
    """Steps of cross entropy and ppo by turns; the outputs."""
    outputs: list[ForwardBackwardOutput] = []
    for step in range(steps):
        data = random_data(5, seed=seed + step, policy=step % 2 == 1)
        call = PPO if step % 2 else CROSS_ENTROPY
        outputs.append(await backend.forward_backward(model_id, data, call, backward=True))
        await backend.optim_step(model_id, AdamParams(learning_rate=1e-2))
    return outputs


async def created(backend: Backend, model_id: str, *, rank: int = 4, steps: int = 2) -> list[Any]:
    """A model after a few steps; rank 0 trains all parameters."""
    await backend.create_model(model_id, settings(rank))
    return await train(backend, model_id, steps=steps)


async def sampled(backend: Backend, sampler_id: str, **how: Any) -> SampleOutput:
    """Greedy unless it is said otherwise."""
    settings: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "stop": ()}
    return await backend.sample(sampler_id, request([3, 1, 4, 1, 5], **(settings | how)))


def tokens_of(output: SampleOutput) -> list[list[int]]:
    return [sequence.tokens.tolist() for sequence in output.sequences]


def assert_same_outputs(found: list[Any], expected: list[Any]) -> None:
    """Logprobs and metrics of `forward_backward`."""
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.metrics.keys() == theirs.metrics.keys()
        np.testing.assert_allclose(mine.metrics["loss:sum"], theirs.metrics["loss:sum"], rtol=1e-5, atol=1e-5)
        for one, other in zip(mine.logprobs, theirs.logprobs, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5, rtol=0)
