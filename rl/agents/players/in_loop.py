"""Agents that are async functions in this event loop: of a notebook, or of a library.

A function here can do what this process can. Code that is not trusted, that blocks, or that may
end the process belongs in `rl.agents.players.process`.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Awaitable
from typing import Any, Protocol

from rl.agents.players.function import write_value
from rl.agents.players.plays import AgentResult, AgentSpec, PlayEnd
from rl.types import Problem
from rl.utils.clock import now_s

logger = logging.getLogger(__name__)

END_S = 20.0
"""Time in which a cancelled function must end."""


class AgentFunction(Protocol):
    """Agent of one episode; what it returns is its value, if that is JSON."""

    def __call__(self, problem: Problem, *, url: str, key: str) -> Awaitable[Any]:
        """Work on a problem, with the model at the episode's URL.

        Clients of OpenAI take `f"{url}/v1"`, those of Anthropic `url`; both take the key.
        """
        ...


class AgentFailedError(Exception):
    """Failure of an agent that its message explains; told without a traceback."""


class LoopAgents:
    """Plays an async function in this event loop; calls of `play` overlap.

    Example:
        async def solve(problem, *, url, key):
            client = AsyncOpenAI(base_url=f"{url}/v1", api_key=key)
            ...

        async with open_local_player(config, agents=LoopAgents(solve), renderer=renderer) as player:
            episodes = AgentEpisodes(generator=generator, player=player, max_tokens=4096)
    """

    def __init__(self, function: AgentFunction) -> None:
        self._function = function
        self._running: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def start(self) -> None:
        """Do nothing: the function is there."""

    async def play(self, spec: AgentSpec) -> AgentResult:
        """Return what became of the function's call.

        Cancelling the call, and the spec's time limit, cancel the function, and wait up to `END_S`
        for its end. The spec's other limits, its files and its variables are those of processes.

        Raises ValueError for a spec with a command.
        """
        if spec.command is not None:
            raise ValueError(f"command={spec.command}: agents in an event loop are functions")
        begin_s = now_s()
        task = asyncio.create_task(self._call(spec))
        self._running.add(task)
        try:
            # Not `asyncio.timeout`: the function may raise a TimeoutError of its own.
            await asyncio.wait({task}, timeout=spec.time_limit_s)
            is_late = not task.done()
        finally:
            # Also if the play is cancelled, so that nothing goes on after its episode.
            await _end([task])
            self._running.discard(task)
        reason, output, value = self._read(task, is_late=is_late)
        return AgentResult(
            reason=reason,
            status=int(reason != "ok"),
            output=output,
            value=value,
            wall_s=now_s() - begin_s,
            cpu_s=0.0,  # Part of this process's.
        )

    async def close(self) -> None:
        """Cancel all calls, whose plays return the reason "ended". Idempotent."""
        self._closed = True
        await _end(self._running)

    async def _call(self, spec: AgentSpec) -> Any:
        url, key = spec.env["RELAY_EPISODE_URL"], spec.env["OPENAI_API_KEY"]
        try:
            return await self._function(spec.argument, url=url, key=key)
        except (SystemExit, KeyboardInterrupt) as error:
            # Raised in a task, either would end the event loop of all.
            raise AgentFailedError(f"{type(error).__name__} of the function") from error

    def _read(self, task: asyncio.Task[Any], *, is_late: bool) -> tuple[PlayEnd, str, Any]:
        """Return reason, output and value of a call."""
        if is_late:
            return "time limit", "", None
        if task.cancelled():
            if self._closed:
                return "ended", "", None
            return "error", "the function cancelled itself", None
        error = task.exception()
        if isinstance(error, AgentFailedError):
            return "error", str(error), None
        if error is not None:
            return "error", "".join(traceback.format_exception(error)), None
        value = task.result()
        try:
            write_value(value)
        except (TypeError, ValueError, RecursionError) as reason:
            return "ok", f"relay: the value that the agent returned is not kept ({reason})", None
        return "ok", "", value


async def _end(tasks: set[asyncio.Task[Any]] | list[asyncio.Task[Any]]) -> None:
    """Cancel tasks, and wait for their end."""
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    if running:
        _, left = await asyncio.wait(running, timeout=END_S)
        for task in left:
            logger.warning("an agent goes on %g s after it was cancelled: %r", END_S, task)
