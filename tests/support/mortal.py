"""Actor groups that die on command, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np

from actors.calls import ActorLostError, ActorTimeoutError
from actors.config import Timeouts
from actors.vllm.requests import EngineFailedError, GeneratorError
from rl.types import BoxSum, Completion
from rl.weights.store import Shard, Snapshot
from tests.support.fakes import completion_of

T = TypeVar("T")


def shard_of(version: int | None, *sums: BoxSum) -> Shard:
    """Return the push of a trainer rank without weights."""
    assert version is not None
    return Shard(version=version, rank=0, parts=(), place=None, sums=sums)


class Mortal:
    """Group of one rank with the liveness checks of an `ActorGroup`; its pushes are of
    `version`.
    """

    timeouts = Timeouts()
    version: int | None = None

    def __init__(self, name: str) -> None:
        self.name = name
        self.died = asyncio.Event()

    def call(
        self, endpoint: str, *args: Any, extra_s: float = 0.0, **kwargs: Any
    ) -> Coroutine[Any, Any, list[Any]]:
        """Answer with the method `_<endpoint>`, or None without one, while alive."""
        return self.while_alive(self._answer(endpoint, *args, **kwargs), endpoint)

    async def _answer(self, endpoint: str, *args: Any, **kwargs: Any) -> list[Any]:
        answer = getattr(self, f"_{endpoint}", None)
        return [None if answer is None else await answer(*args, **kwargs)]

    async def _compute_logprobs(self, samples: Any) -> list[np.ndarray]:
        return [np.zeros(3, dtype=np.float32)]

    async def _push_model_state_dict(self, **model: Any) -> Shard:
        return shard_of(self.version)

    def die(self) -> None:
        self.died.set()

    def dead(self) -> list[int]:
        return [0] if self.died.is_set() else []

    async def seen_dead(self, within_s: float) -> list[int]:
        with suppress(TimeoutError):
            await asyncio.wait_for(self.died.wait(), within_s)
        return self.dead()

    async def while_alive(self, answer: Awaitable[T], what: str, *, grace_s: float = 0.0) -> T:
        lost = ActorLostError(
            f"{self.name}.{what} failed: rank 0 of 1 is dead", role=self.name, ranks=[0]
        )
        waiting = asyncio.ensure_future(answer)
        if self.died.is_set():
            waiting.cancel()
            raise lost
        died = asyncio.ensure_future(self.died.wait())
        try:
            await asyncio.wait({waiting, died}, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                return waiting.result()
            raise lost
        finally:
            waiting.cancel()
            died.cancel()


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

    def call(
        self, endpoint: str, *args: Any, extra_s: float = 0.0, **kwargs: Any
    ) -> Coroutine[Any, Any, list[Any]]:
        self.asked.append(endpoint)
        if endpoint == self.silent_about:
            return self._no_answer(endpoint)
        return super().call(endpoint, *args, extra_s=extra_s, **kwargs)

    async def _no_answer(self, endpoint: str) -> list[Any]:
        await asyncio.sleep(20)
        raise ActorTimeoutError(f"{self.name}.{endpoint} gave no answer within 20 s")

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
