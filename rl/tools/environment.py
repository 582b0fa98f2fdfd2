"""An environment in which a model calls tools until it answers."""

from __future__ import annotations

from collections.abc import Sequence

from rl.config.tree import check_bounds
from rl.tools.tool import (
    BadCall,
    Tool,
    ToolError,
    ToolTimeoutError,
    announce,
    check_tools,
    find_tool,
    parse_calls,
)
from rl.types import Message, Observation, Problem, Reply, ToolCall
from rl.utils.clock import now_s
from rl.utils.threads import gather_or_cancel


class ToolEnvironment:
    """An environment that asks the question, then answers tool calls until a reply contains none.

    The calls of one reply run concurrently; each is answered by a message of role "tool", in order,
    also with the mistake if the call is wrong. If a reply has more calls than are left, the first
    ones are made, and one message says that the others are not. A reply with calls when none are
    left ends the episode.

    Metrics of a reply, which add up over an episode: `tools/calls`; `tools/errors`, calls that
    failed, timeouts included; `tools/timeouts`; `tools/s`, seconds until all calls of the reply
    were answered.

    Args:
        tools: shared by all episodes.
        system: text before the announcement of the tools.
        max_calls: most calls of one episode, wrong ones included.
        max_result_chars: length beyond which an answer loses its middle, replaced by a note.
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
        check_tools(tools)
        self.problem = problem
        self.tools = tuple(tools)
        self.system = system
        self.max_calls = max_calls
        self.max_result_chars = max_result_chars
        check_bounds(self, "max_calls", at_least=1)
        check_bounds(self, "max_result_chars", at_least=100)
        self._num_left = max_calls

    def opening(self) -> Sequence[Message]:
        return (
            Message(role="system", content=announce(self.tools, self.system)),
            Message(role="user", content=self.problem.question),
        )

    async def step(self, reply: Reply) -> Observation:
        calls = parse_calls(reply.text)
        made, refused = calls[: self._num_left], calls[self._num_left :]
        self._num_left -= len(made)
        started = now_s()
        answers = await gather_or_cancel(map(self._answer, made))
        duration_s = now_s() - started

        texts = []
        num_errors, num_timeouts = len(refused), 0
        for answer in answers:
            texts.append(str(answer))
            num_errors += isinstance(answer, ToolError)
            num_timeouts += isinstance(answer, ToolTimeoutError)
        metrics = {
            "tools/calls": float(len(calls)),
            "tools/errors": float(num_errors),
            "tools/timeouts": float(num_timeouts),
            "tools/s": duration_s if made else 0.0,
        }
        # Without a call that was made there is nothing to answer, and no message ends the episode.
        if made and refused:
            texts.append(
                f"Error: {len(refused)} more calls were not made: max_calls={self.max_calls} is "
                "reached"
            )
        messages = tuple(Message(role="tool", content=self._fit(text)) for text in texts)
        return Observation(messages=messages, metrics=metrics)

    async def close(self) -> None:
        pass

    async def _answer(self, call: ToolCall | BadCall) -> str | ToolError:
        """Return the answer to one call, or the error that the model is shown."""
        try:
            if isinstance(call, BadCall):
                raise ToolError(call.error)
            return await find_tool(call, self.tools).call(call.arguments)
        except ToolError as error:
            return error

    def _fit(self, text: str) -> str:
        # Half of a surrogate pair, which code may print, cannot be encoded by a tokenizer.
        text = text.encode(errors="replace").decode()
        if len(text) <= self.max_result_chars:
            return text
        half = self.max_result_chars // 2
        return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
