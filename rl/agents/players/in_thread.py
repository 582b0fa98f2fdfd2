"""Player whose endpoint and agents run in the event loop of a thread, for code that may block.

the caller's loop      play(problem) -----------------------------------> episode
                                |              generate(tokens)              ^
the thread's loop               +-> agent -> endpoint --+  +--> reply ... ---+
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import numpy as np

from rl.agents.rollouts import AgentPlayer
from rl.agents.settings import EpisodeSettings
from rl.agents.types import PlayedEpisode
from rl.protocols import TokenGenerator
from rl.types import Completion, Problem, SamplingParams
from rl.utils.threads import LoopThread

logger = logging.getLogger(__name__)

START_S = 600.0
"""Time in which a player must open, with the servers that its agents need."""
CLOSE_S = 30.0
"""Time in which it must close."""


class LoopGenerator:
    """A `TokenGenerator` whose calls run in its own event loop, whatever loop they come from."""

    def __init__(self, generator: TokenGenerator, *, loop: asyncio.AbstractEventLoop) -> None:
        self._generator = generator
        self._loop = loop

    async def generate(
        self, prompts: Sequence[np.ndarray], *, sampling: SamplingParams, session: str | None = None
    ) -> list[list[Completion]]:
        call = self._generator.generate(prompts, sampling=sampling, session=session)
        # Cancelling the future cancels the call.
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self._loop))


class ThreadPlayer:
    """An `rl.agents.rollouts.AgentPlayer` that passes episodes to a player in a thread."""

    def __init__(self, player: AgentPlayer, *, thread: LoopThread) -> None:
        self._player = player
        self._thread = thread

    async def play(
        self,
        problem: Problem,
        *,
        settings: EpisodeSettings,
        time_limit_s: float,
        generator: TokenGenerator,
    ) -> PlayedEpisode:
        play = self._player.play(
            problem,
            settings=settings,
            time_limit_s=time_limit_s,
            generator=LoopGenerator(generator, loop=asyncio.get_running_loop()),
        )
        return await self._thread.start(play)


@asynccontextmanager
async def open_thread_player(
    opening: AbstractAsyncContextManager[AgentPlayer], *, name: str = "agents"
) -> AsyncIterator[ThreadPlayer]:
    """Open a player in a thread of this name, and close it there with the block.

    Raises what the player's opening raises, TimeoutError if that takes longer than `START_S`.
    """
    thread, held = LoopThread(name), _HeldContext(opening)
    limit = asyncio.timeout(START_S)
    try:
        try:
            async with limit:
                player = await thread.start(held.enter())
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise TimeoutError(f"the {name} did not start within {START_S:g} s") from error
        yield ThreadPlayer(player, thread=thread)
    finally:
        closing = thread.start(held.leave())
        # Longer than `leave` itself: agents may block the thread.
        done, _ = await asyncio.wait({closing}, timeout=2 * CLOSE_S)
        if not done:
            logger.warning("the thread %r did not close within %g s", name, 2 * CLOSE_S)


class _HeldContext:
    """Context that one task enters and leaves, as cancel scopes demand."""

    def __init__(self, opening: AbstractAsyncContextManager[AgentPlayer]) -> None:
        self._opening = opening
        self._leaving = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def enter(self) -> AgentPlayer:
        entered: asyncio.Future[AgentPlayer] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold(entered))
        try:
            either: list[asyncio.Future[Any]] = [entered, self._task]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._task.cancel()
            raise
        if not entered.done():
            failed, self._task = self._task, None
            failed.result()
        return entered.result()

    async def leave(self) -> None:
        """Leave the context if it was entered; an error is only logged."""
        if self._task is None:
            return
        self._leaving.set()
        # Cancelled only when it is late: servers that are stopped half way leave processes behind.
        await asyncio.wait({self._task}, timeout=CLOSE_S)
        if not self._task.done():
            logger.warning("a player did not close within %g s", CLOSE_S)
            self._task.cancel()
        elif not self._task.cancelled() and (error := self._task.exception()) is not None:
            logger.warning("a player ended badly: %r", error, exc_info=error)

    async def _hold(self, entered: asyncio.Future[AgentPlayer]) -> None:
        async with self._opening as player:
            entered.set_result(player)
            await self._leaving.wait()
