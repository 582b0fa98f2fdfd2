"""Tinker backends over actors on a small base model, in the event loop of a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from actors.config import Timeouts
from actors.generator import VLLMGenerator
from actors.tinker import ActorBackend
from actors.trainer import PolicyTrainer
from rl.distributed.mesh import ParallelismConfig
from rl.tinker.backend import TinkerBackend
from rl.weights.store import WeightStore
from tests.tinker.parts import CONTEXT, TRAINING, base_config

T = TypeVar("T")

START_TIMEOUT_S = 240.0
CALL_TIMEOUT_S = 90.0


class Loop:
    """Event loop in a thread that runs coroutines with a deadline."""

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


def actor_config(
    assets: Path, *, num_procs: int = 1, parallelism: ParallelismConfig | None = None
) -> ActorBackend.Config:
    return ActorBackend.Config(
        base=base_config(assets),
        trainer=PolicyTrainer.Config(
            num_procs=num_procs, parallelism=parallelism or ParallelismConfig(), training=TRAINING
        ),
        generator=VLLMGenerator.Config(dtype="float32", max_model_len=CONTEXT, cpu_kv_cache_gib=0.05),
        weights=WeightStore.Config(keep_versions=6),
        timeouts=Timeouts(close_s=10),
    )


@contextmanager
def running(*backends: TinkerBackend) -> Iterator[Loop]:
    loop = Loop()
    try:
        for backend in backends:
            loop.run(backend.start(), timeout_s=START_TIMEOUT_S)
        yield loop
    finally:
        for backend in backends:
            loop.run(backend.close())
        loop.close()
