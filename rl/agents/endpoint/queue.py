"""A generator whose calls wait until another process takes and answers them.

The endpoint's process has no generator of its own: the controller takes its calls, draws the
replies as it does for all rollouts, and brings them back.

    endpoint      generate -> calls, cancellations -> take ....... answer -> completions
    controller                                        take -> draw -> answer
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rl.types import Completion, SamplingParams
from rl.utils.errors import RunError

GATHER_S = 0.001
"""Time from the first call until it is taken, with those that have come since: a message costs two
processes a millisecond."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GenerateCall:
    """A call of `generate` that waits for its answer."""

    id: int
    prompts: list[np.ndarray]
    """[T] int32 each."""
    sampling: SamplingParams
    session: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class TakenCalls:
    """Calls to answer, and earlier calls whose caller has gone."""

    calls: tuple[GenerateCall, ...] = ()
    cancelled: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GenerateAnswer:
    """The completions of a call, or the reason why there are none."""

    id: int
    completions: list[list[Completion]] | None
    error: str = ""


class QueuedGenerator:
    """A `TokenGenerator` whose calls are answered elsewhere."""

    def __init__(self) -> None:
        # Numbers of no earlier process: answers to its calls may still be under way.
        self._ids = itertools.count(secrets.randbits(62))
        self._waiting: list[GenerateCall] = []
        self._cancelled: list[int] = []
        self._answers: dict[int, asyncio.Future[list[list[Completion]]]] = {}
        self._changed = asyncio.Event()

    async def generate(
        self, prompts: Sequence[np.ndarray], *, sampling: SamplingParams, session: str | None = None
    ) -> list[list[Completion]]:
        call = GenerateCall(
            id=next(self._ids), prompts=list(prompts), sampling=sampling, session=session
        )
        answer = asyncio.get_running_loop().create_future()
        self._answers[call.id] = answer
        self._waiting.append(call)
        self._changed.set()
        try:
            return await answer
        finally:
            del self._answers[call.id]
            # The end of a caller that waits for the future cancels the future too.
            if answer.cancelled() or not answer.done():
                self._drop(call)

    async def take(self, *, wait_s: float) -> TakenCalls:
        """Return new calls and cancellations, after at most `wait_s` seconds none."""
        try:
            async with asyncio.timeout(wait_s):
                await self._changed.wait()
        except TimeoutError:
            return TakenCalls()
        await asyncio.sleep(GATHER_S)
        taken = TakenCalls(calls=tuple(self._waiting), cancelled=tuple(self._cancelled))
        self._waiting, self._cancelled = [], []
        self._changed.clear()
        return taken

    def answer(self, answers: Sequence[GenerateAnswer]) -> None:
        """Give the answers of calls; those of callers that have gone are dropped."""
        for answer in answers:
            waiting = self._answers.get(answer.id)
            if waiting is None or waiting.done():
                continue
            if answer.completions is None:
                waiting.set_exception(RunError(answer.error))
            else:
                waiting.set_result(answer.completions)

    def _drop(self, call: GenerateCall) -> None:
        """Forget a call that nobody waits for."""
        if call in self._waiting:
            self._waiting.remove(call)
        else:
            self._cancelled.append(call.id)
            self._changed.set()
