"""What the clients have to see, and what their episodes have to record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ANSWER = "The sum is 5."
NEXT_ANSWER = "The sum is 9."
Branches = tuple[tuple[int, str, str], ...]
"""Turns, role and cause of each branch."""
CALL_AND_ANSWER: Branches = ((2, "main", ""),)
ONE_REPLY: Branches = ((1, "main", ""),)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A case of a client script."""

    seen: Mapping[str, Any]
    """What the client has to print; `tokens` and `fields` are compared with what the endpoint
    knows."""
    branches: Branches = ONE_REPLY
    faults: tuple[int, ...] = ()
    """Statuses of the endpoint's first answers."""
    delay_s: float = 0.0
    """Time of each reply."""
    is_ended: bool = False
    """True if the episode has ended before the client begins."""
    at_least: Mapping[str, int] = field(default_factory=dict)
    """Counts of the episode that have to be reached."""
    max_context: int = 65_536
    """Most tokens of a conversation, of which each is a byte."""


def expect(branches: Branches = CALL_AND_ANSWER, **seen: Any) -> Case:
    return Case(seen=seen, branches=branches)


def refuse(**seen: Any) -> Case:
    """Return the case of a request that is refused, so that nothing is recorded."""
    return Case(seen=seen, branches=())


ANSWERED = expect(answer=ANSWER)
ANSWERED_TWICE = expect(((4, "main", ""),), answers=[ANSWER, NEXT_ANSWER])
AGAIN: Branches = ((1, "superseded", ""), (1, "main", "again"))
"""The same question twice; the second conversation counts."""
RETRIES = {
    "retry after 500": Case(seen={"answer": ANSWER}, faults=(500,)),
    "retry after 429": Case(seen={"answer": ANSWER}, faults=(429, 429)),
    "retry while slow": Case(
        seen={"answer": ANSWER}, delay_s=2.0, at_least={"retries": 1, "disconnects": 1}
    ),
}
ERRORS = {
    "ended": Case(seen={"error": "ConflictError"}, branches=(), is_ended=True),
    "wrong key": refuse(error="AuthenticationError"),
    "models": refuse(models=["policy"]),
}

OPENAI: Mapping[str, Case] = {
    "chat whole": expect(ONE_REPLY, answer=ANSWER, end="stop"),
    "chat stream": expect(ONE_REPLY, answer=ANSWER, end="stop", has_usage=True),
    "chat tools": expect(end="tool_calls", answer=ANSWER),
    "chat tools stream": expect(saw_arguments=True, answer=ANSWER),
    "chat parse tools": expect(ONE_REPLY, arguments={"a": 2, "b": 3}),
    "chat parse format": refuse(error="BadRequestError", field="response_format"),
    "chat async": ANSWERED,
    "chat tokens": expect(AGAIN, has_logprobs=True, tokens=...),
    "responses whole": expect(ONE_REPLY, answer=ANSWER, status="completed"),
    "responses stream": expect(ONE_REPLY, answer=ANSWER, last="response.completed", in_order=True),
    "responses tools": ANSWERED,
    "responses tools stream": expect(saw_arguments=True, answer=ANSWER),
    "responses async": expect(AGAIN, answers=[ANSWER, ANSWER]),
    "responses parse format": refuse(error="BadRequestError", field="text.format"),
    **RETRIES,
    "cancel": Case(
        seen={"error": "TimeoutError"}, branches=(), delay_s=60.0, at_least={"disconnects": 1}
    ),
    "too long": refuse(error="BadRequestError", code="context_length_exceeded"),
    **ERRORS,
    "unknown path": refuse(error="NotFoundError"),
    "fields": refuse(fields=...),
}
ANTHROPIC: Mapping[str, Case] = {
    "whole": expect(ONE_REPLY, answer=ANSWER, end="end_turn"),
    "stream": expect(
        ONE_REPLY, answer=ANSWER, order=["message_start", "message_stop"], has_usage=True
    ),
    "tools": expect(end="tool_use", answer=ANSWER),
    "tools stream": expect(end="tool_use", answer=ANSWER, has_usage=True),
    "tool runner": ANSWERED,
    "tool runner stream": expect(answers=["", ANSWER]),
    "bearer": expect(ONE_REPLY, answer=ANSWER),
    "count tokens": expect(ONE_REPLY, is_equal=True),
    **RETRIES,
    "too long": refuse(error="BadRequestError", words=True),
    **ERRORS,
    "fields": refuse(fields=...),
}
OPENAI_AGENTS: Mapping[str, Case] = {
    "tools": ANSWERED,
    "handoff": expect(((1, "main", ""), (2, "main", "system")), answer=ANSWER, last="adder"),
    "stream": expect(answer=ANSWER, kinds=["tool_called", "tool_output", "message_output_created"]),
    "agent as tool": expect(((2, "sub-agent", "agent"), (2, "main", "")), answer=ANSWER),
    "session": ANSWERED_TWICE,
    "required": ANSWERED,
    "chat": ANSWERED,
    "chat stream": expect(answer=ANSWER, has_events=True),
    "output format": refuse(error="BadRequestError", field="text.format"),
}
PYDANTIC_AI: Mapping[str, Case] = {
    f"{dialect} {name}": case
    for dialect in ("responses", "chat", "messages")
    for name, case in {
        "tools": ANSWERED,
        "stream": ANSWERED,
        "history": ANSWERED_TWICE,
        "typed": expect(value=5),
    }.items()
}
REWRITTEN: Branches = ((1, "main", ""), (1, "main", "rewritten"))
"""smolagents tells the model of a call in words of its own (`Calling tools: ...`), so that no turn
continues the tokens of the turn before."""
SMOLAGENTS: Mapping[str, Case] = {
    "ToolCallingAgent": expect(REWRITTEN, answer="5"),
    "ToolCallingAgent stream": expect(REWRITTEN, answer="5"),
    "CodeAgent": expect(REWRITTEN, answer=5),
    "CodeAgent stream": expect(REWRITTEN, answer=5),
}
LANGGRAPH: Mapping[str, Case] = {
    "chat": ANSWERED_TWICE,
    "chat stream": ANSWERED,
    "responses": ANSWERED_TWICE,
    "responses stream": ANSWERED,
    "create_react_agent": ANSWERED,
}
LITELLM: Mapping[str, Case] = {
    "chat": ANSWERED,
    "chat stream": ANSWERED,
    "messages": ANSWERED,
    "messages stream": ANSWERED,
    "responses": expect(ONE_REPLY, answer=ANSWER),
    "hosted_vllm": expect(ONE_REPLY, answer=ANSWER),
    "too long": refuse(error="ContextWindowExceededError"),
    "token ids": expect(ONE_REPLY, has_logprobs=True, tokens=...),
}
OPENENV: Mapping[str, Case] = {
    "probe": expect(ONE_REPLY, ok=True, level="tokens"),
    "capture": expect(answer=ANSWER, problems=[], continues=True, tokens=...),
}
CODED = Case(seen={"file": "5", "says": True}, branches=CALL_AND_ANSWER, max_context=1 << 20)
"""A coding agent runs a command and answers; it announces tools at length."""
