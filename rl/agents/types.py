"""Requests and replies of the agent endpoint, whatever the dialect that a client speaks.

    OpenAI chat  \\
    OpenAI responses -> ChatRequest -> record, generator -> ChatReply -> the same dialect
    Anthropic    /
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rl.types import Completion, Message, ToolCall
from rl.utils.sharing import ReadOnlyDict

ReplyEnd = Literal["stop", "tool_calls", "length"]
"""Reason why a reply ended, as clients are told: its own end or a stop text, a call of a tool, or
the limit of tokens."""
NOTHING: Mapping[str, Any] = ReadOnlyDict()


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolSpec:
    """A tool that a client offers to the model."""

    name: str
    """Name in calls: 1 to 64 letters, digits, `_` and `-`."""
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: NOTHING)
    """JSON schema of the arguments, of type object."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRequest:
    """A request for one reply to a conversation."""

    messages: tuple[Message, ...]
    """The whole conversation. Texts of parts are joined, ids of providers and thoughts are left
    out, and consecutive parts of one assistant turn are one message."""
    tools: tuple[ToolSpec, ...] = ()
    model: str = ""
    """Model that the client asked for."""
    is_streamed: bool = False
    max_tokens: int | None = None
    """Most new tokens that the client asked for; None: it did not say."""
    stop: tuple[str, ...] = ()
    """Texts that end the reply and are no part of what the client is told."""
    asked: Mapping[str, Any] = field(default_factory=lambda: NOTHING)
    """Sampling that the client asked for, such as `temperature`, by field."""
    harmless: tuple[str, ...] = ()
    """Names of the fields that were accepted and have no effect."""
    wants: frozenset[str] = frozenset()
    """Extras of the reply: "logprobs", "token_ids", "usage" (in a stream)."""
    top_logprobs: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyCall:
    """A complete call of a tool in a reply."""

    id: str
    """Id by which the client answers, the same whenever the reply is given again."""
    call: ToolCall


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChatReply:
    """A complete reply with the tokens that it was read from."""

    id: str
    """Unguessable name without a prefix of any dialect."""
    created: int
    """Time in whole seconds since 1970."""
    model: str
    text: str
    """The completion decoded (`rl.types.Turn.text`), without a stop text at its end."""
    end: ReplyEnd
    prompt_ids: tuple[int, ...]
    """Every token that the model has read."""
    completion: Completion
    stop_text: str | None = None
    """Stop text that ended the reply."""
    cached_tokens: int = 0
    """Tokens of the prompt that an earlier request of the conversation has had."""
    token_texts: tuple[str, ...] = ()
    """Text of each token of the completion; empty unless the client wants logprobs."""
