"""An environment in which a model calls tools until it answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from rl.clock import now_s
from rl.tools.calls import BadCall, ToolCall, announce, check_call, parse_calls
from rl.tools.tool import Tool, ToolError, ToolTimeoutError, check_tools
from rl.types import Message, Observation, Problem, Reply


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    """What became of one call."""

    text: str
    error: bool = False
    timeout: bool = False


class ToolEnvironment:
    """The question; then an answer to every tool call, until a reply has none: that ends the episode.

    The calls of one reply run at the same time; each is answered by a message of role "tool", in order. What
    the model gets wrong (malformed JSON, an unknown tool, arguments that do not fit), and a tool's error, is
    told in such a message too. Every call counts, also a wrong one. Of a reply with more calls than are left,
    the first ones are made, and one message says that the others are not; a reply with calls when none are
    left ends the episode.

    Metrics of a reply, which add up over an episode: `tools/calls`; `tools/errors`, those not answered as
    asked, timeouts among them; `tools/timeouts`; `tools/s`, seconds until all calls of the reply were
    answered.

    Args:
        tools: shared by all episodes; checked here.
        system: said before the tools are announced.
        max_calls: of one episode.
        max_result_chars: longer answers lose their middle, which is said in its place.

    Raises:
        ValueError: names the field, or the tool and what is wrong with it.
    """

    def __init__(
        self,
        *,
        problem: Problem,
        tools: Sequence[Tool],
        system: str = "",
        max_calls: int = 8,
        max_result_chars: int = 4000,
    ) -> None:
        if not tools:
            raise ValueError("tools is empty; an environment without tools is SingleTurn")
        if max_calls < 1:
            raise ValueError(f"max_calls={max_calls} is below 1")
        if max_result_chars < 100:
            raise ValueError(f"max_result_chars={max_result_chars} is below 100")
        check_tools(tools)
        self.problem = problem
        self.tools = tuple(tools)
        self.system = system
        self.max_calls = max_calls
        self.max_result_chars = max_result_chars
        self._num_left = max_calls
        self._running: set[asyncio.Task[_Answer]] = set()

    def opening(self) -> Sequence[Message]:
        return (
            Message(role="system", content=announce(self.tools, self.system)),
            Message(role="user", content=self.problem.question),
        )

    async def step(self, reply: Reply) -> Observation:
        calls = parse_calls(reply.text)
        if not calls or not self._num_left:
            return Observation(metrics=_metrics([], num_refused=len(calls), seconds=0.0))
        made, refused = calls[: self._num_left], calls[self._num_left :]
        self._num_left -= len(made)
        started = now_s()
        answers = await self._answer_all(made)
        metrics = _metrics(answers, num_refused=len(refused), seconds=now_s() - started)
        told = [answer.text for answer in answers]
        if refused:
            told.append(
                f"Error: {len(refused)} more calls were not made: max_calls={self.max_calls} is reached"
            )
        messages = tuple(Message(role="tool", content=self._fit(text)) for text in told)
        return Observation(messages=messages, metrics=metrics)

    async def close(self) -> None:
        """End the calls that are under way."""
        await _end(self._running)

    async def _answer_all(self, calls: Sequence[ToolCall | BadCall]) -> list[_Answer]:
        tasks = [asyncio.create_task(self._answer(call)) for call in calls]
        self._running.update(tasks)
        try:
            return await asyncio.gather(*tasks)
        finally:
            await _end(tasks)
            self._running.difference_update(tasks)

    async def _answer(self, call: ToolCall | BadCall) -> _Answer:
        found = check_call(call, self.tools) if isinstance(call, ToolCall) else call
        if isinstance(found, BadCall):
            return _Answer(text=found.error, error=True)
        assert isinstance(call, ToolCall)
        try:
            return _Answer(text=await found.call(call.arguments))
        except ToolError as error:
            return _Answer(text=str(error), error=True, timeout=isinstance(error, ToolTimeoutError))

    def _fit(self, text: str) -> str:
        text = text.encode(errors="replace").decode()
        if len(text) <= self.max_result_chars:
            return text
        half = self.max_result_chars // 2
        return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"


async def _end(tasks: Sequence[asyncio.Task[_Answer]] | set[asyncio.Task[_Answer]]) -> None:
    """Cancel, and wait until each has given back what it held."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _metrics(answers: Sequence[_Answer], *, num_refused: int, seconds: float) -> dict[str, float]:
    return {
        "tools/calls": float(len(answers) + num_refused),
        "tools/errors": float(sum(answer.error for answer in answers) + num_refused),
        "tools/timeouts": float(sum(answer.timeout for answer in answers)),
        "tools/s": seconds,
    }
