"""Actor meshes that die on command, in virtual time."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import numpy as np

from actors.cluster.group import ActorGroup
from actors.config import Timeouts
from actors.launch.compat import SupervisionError
from actors.vllm.requests import EngineFailedError, GeneratorError
from rl.types import BoxSum, Completion
from rl.utils.processes import ProcessId
from rl.weights.store import Shard, Snapshot
from tests.support.fakes import completion_of


def shard_of(version: int | None, *sums: BoxSum) -> Shard:
    """Return the push of a trainer rank without weights."""
    assert version is not None
    return Shard(version=version, rank=0, parts=(), place=None, sums=sums)


class MortalProcess:
    """A `ProcessId` of this process until it dies."""

    pid = os.getpid()
    is_dead = False
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, ProcessId) and not self.is_dead)


class Mortal:
    """Mesh of one actor; its pushes are of `version`."""

    version: int | None = None
    merge_lost: float | None = None

    def __init__(self, name: str) -> None:
        self.name = name
        self.process = MortalProcess()
        self.died = asyncio.Event()
        self.sizes = {"procs": 1}

    def group(self, **options: Any) -> ActorGroup:
        """Return the group of this actor."""
        processes: Any = {0: self.process}
        return ActorGroup(
            name=self.name, mesh=self, timeouts=Timeouts(), processes=processes, **options
        )

    def size(self) -> int:
        return 1

    def slice(self, **place: int) -> Mortal:
        return self

    def die(self) -> None:
        self.died.set()
        self.process.is_dead = True

    def __getattr__(self, endpoint: str) -> Endpoint:
        if endpoint.startswith("_"):
            raise AttributeError(endpoint)
        return Endpoint(self, endpoint)

    async def answer(self, endpoint: str, *args: Any, **kwargs: Any) -> Any:
        """Answer with the method `_<endpoint>`, or None without one, while alive."""
        method = getattr(self, f"_{endpoint}", None)
        if method is None and not self.died.is_set():
            return None
        return await self._while_alive(method(*args, **kwargs) if method else asyncio.sleep(0))

    async def _while_alive(self, work: Coroutine[Any, Any, Any]) -> Any:
        working, died = asyncio.ensure_future(work), asyncio.ensure_future(self.died.wait())
        try:
            if not self.died.is_set():
                await asyncio.wait({working, died}, return_when=asyncio.FIRST_COMPLETED)
            if working.done() and not working.cancelled():
                return working.result()
            raise SupervisionError("{'procs': 0/1} has ended: Killed(sig=9)")
        finally:
            working.cancel()
            died.cancel()

    async def _compute_logprobs(self, samples: Any, **options: Any) -> list[np.ndarray]:
        return [np.zeros(3, dtype=np.float32)]

    async def _push_model_state_dict(self, **model: Any) -> Shard:
        return replace(shard_of(self.version), merge_lost=self.merge_lost)


class Endpoint:
    """Endpoint of a mortal mesh."""

    def __init__(self, actor: Mortal, name: str) -> None:
        self._actor = actor
        self._name = name

    async def call(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {"procs=0": await self._actor.answer(self._name, *args, **kwargs)}


class MortalGenerator(Mortal):
    """Generator whose pulls and completions take time, and which tracks its policy version."""

    def __init__(self, name: str, *, pull_s: float = 1.0, generate_s: float = 2.0) -> None:
        super().__init__(name)
        self.pull_s = pull_s
        self.generate_s = generate_s
        self.engine_failed = False
        self.silent_about = ""
        """Endpoint that does not answer within its limit."""
        self.asked: list[str] = []

    async def answer(self, endpoint: str, *args: Any, **kwargs: Any) -> Any:
        self.asked.append(endpoint)
        if endpoint == self.silent_about:
            await asyncio.Event().wait()
        return await super().answer(endpoint, *args, **kwargs)

    async def _pull_model_state_dict(self, snapshot: Snapshot, **options: Any) -> tuple[()]:
        await asyncio.sleep(self.pull_s)
        self.version = snapshot.version
        return ()

    async def _generate(self, prompts: list[np.ndarray], **options: Any) -> list[list[Completion]]:
        if self.version is None:
            raise GeneratorError("the generator has no weights: a version must be pulled first")
        await asyncio.sleep(self.generate_s)
        if self.engine_failed:
            raise EngineFailedError("the engine of generator rank 0 failed: RuntimeError: broken")
        # Each prompt is its own completion.
        return [[completion_of(prompt, version=self.version, logprob=0.0)] for prompt in prompts]
