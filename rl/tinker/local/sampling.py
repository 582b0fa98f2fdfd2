"""Whose turn it is among requests to samplers: the oldest one's, and of all that can be answered with it.

One model serves; it takes other weights between groups of requests. The group that is next is always that of
the request that has waited longest, so none waits for more than the groups that were there before it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rl.tinker.local.requests import Ask
from rl.tinker.messages import SampleOutput
from rl.worker_thread import WorkerThread

Answer = Callable[[Sequence[Ask]], list[SampleOutput]]


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupLimits:
    """Of requests that are answered together; a single one may be beyond them."""

    max_sequences: int
    max_prompt_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Waiting:
    ask: Ask
    answered: asyncio.Future[SampleOutput]


def next_group(waiting: Sequence[Ask], limits: GroupLimits) -> list[Ask]:
    """The oldest, and of the later ones, in order, those that go with it and fit beside it."""
    first, *later = waiting
    group = [first]
    sequences, tokens = first.request.num_samples, len(first.request.prompt)
    for ask in later:
        with_sequences = sequences + ask.request.num_samples
        with_tokens = tokens + len(ask.request.prompt)
        fits = with_sequences <= limits.max_sequences and with_tokens <= limits.max_prompt_tokens
        if fits and ask.goes_with(first):
            group.append(ask)
            sequences, tokens = with_sequences, with_tokens
    return group


class SampleQueue:
    """Used from one event loop; the answers are made in a thread, one group after another."""

    def __init__(self, *, answer: Answer, thread: WorkerThread, limits: GroupLimits, gather_s: float) -> None:
        """`gather_s`: how long the first request after none waited is held, for others to join it."""
        self._answer = answer
        self._thread = thread
        self._limits = limits
        self._gather_s = gather_s
        self._waiting: list[Waiting] = []
        """Oldest first."""
        self._serving: asyncio.Task[None] | None = None
        self._is_closed = False

    async def sample(self, ask: Ask) -> SampleOutput:
        """The answer; where the wait for it is cancelled, so is the work on it."""
        if self._is_closed:
            raise RuntimeError("the local backend is closed")
        waiting = Waiting(ask=ask, answered=asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve())
        try:
            return await waiting.answered
        finally:
            ask.cancelled.set()
            with contextlib.suppress(ValueError):  # its turn has come
                self._waiting.remove(waiting)

    def close(self) -> None:
        """Requests that wait fail, and those being answered at their next token."""
        self._is_closed = True
        self._fail(self._waiting, RuntimeError("the local backend was closed"))
        self._waiting = []

    async def _serve(self) -> None:
        await asyncio.sleep(self._gather_s)
        while self._waiting:
            asks = next_group([waiting.ask for waiting in self._waiting], self._limits)
            chosen = set(map(id, asks))
            group = [waiting for waiting in self._waiting if id(waiting.ask) in chosen]
            self._waiting = [waiting for waiting in self._waiting if id(waiting.ask) not in chosen]
            try:
                outputs = await self._thread.run(self._answer, asks)
            except Exception as error:  # noqa: BLE001  (of whoever waits)
                self._fail(group, error)
                continue
            if self._is_closed:  # they may have been cut
                self._fail(group, RuntimeError("the local backend was closed"))
                return
            for waiting, output in zip(group, outputs, strict=True):
                if not waiting.answered.done():
                    waiting.answered.set_result(output)

    @staticmethod
    def _fail(group: Sequence[Waiting], error: Exception) -> None:
        for waiting in group:
            if not waiting.answered.done():
                waiting.answered.set_exception(error)
