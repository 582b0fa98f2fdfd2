"""Requests and replies of the agent endpoint, whatever the dialect that a client speaks.

    OpenAI chat  \\
    OpenAI responses -> ChatRequest -> record, generator -> ChatReply -> the same dialect
    Anthropic    /
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from rl.types import Branch, Completion, EndReason, Message, ToolCall, Turn
from rl.utils.sharing import ReadOnlyDict

ReplyEnd = Literal["stop", "tool_calls", "length"]
"""Reason why a reply ended, as clients are told: its own end or a stop text, a call of a tool, or
the limit of tokens."""
ReplyExtra = Literal["logprobs", "token_ids", "token_names", "usage", "reasoning"]
"""logprobs: of each token; token_ids: of prompt and completion; token_names: `token_id:7` instead
of the texts of tokens; usage: at the end of a stream, elsewhere it is always told; reasoning: the
thoughts of the reply."""
NOTHING: Mapping[str, Any] = ReadOnlyDict()
NO_IDS = np.empty(0, dtype=np.int32)


class RequestError(Exception):
    """A request that is not answered with a reply, as a client is told of it."""

    def __init__(
        self,
        message: str,
        *,
        status: int,
        field: str = "",
        code: str = "",
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        """HTTP status: 4xx if the client can do something about it, else 5xx."""
        self.field = field
        """Path of the field that is wrong, such as `messages[2].content`; empty if none is."""
        self.code = code
        """Word for programs, such as "context_length_exceeded"."""
        self.retry_after_s = retry_after_s
        """Seconds after which the client should try again; None: it should not."""


class BadRequestError(RequestError):
    """A request with a field that is wrong or not supported."""

    def __init__(self, message: str, *, field: str = "", status: int = 400, code: str = "") -> None:
        super().__init__(message, status=status, field=field, code=code)


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolForm:
    """How a client knows a tool that is not a plain function."""

    name: str
    """Name within its namespace."""
    namespace: str = ""
    """Group of tools that the client's calls name."""
    is_text: bool = False
    """The client takes the tool's one argument, a text, in place of an object."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolSpec:
    """A tool that a client offers to the model."""

    name: str
    """Name in calls: 1 to 64 letters, digits, `_` and `-`."""
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: NOTHING)
    """JSON schema of the arguments, of type object."""
    form: ToolForm | None = None
    """What a client that does not call it a function is told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRequest:
    """A request for one reply to a conversation."""

    messages: tuple[Message, ...]
    """The whole conversation. Texts of parts are joined, ids of providers and thoughts are left
    out, and consecutive parts of one assistant turn are one message."""
    token_ids: tuple[int, ...] | None = None
    """The whole prompt, of a client that renders it itself; then there are no messages."""
    prompt_text: str | None = None
    """The whole prompt as text, which is encoded as it is; then there are neither."""
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
    """Names of the fields that were accepted and have no effect, sorted."""
    requires_call: bool = False
    """True if the client asked that the reply call a tool (`tool_choice` "required" or "any"). The
    model is not constrained, so that misses can be counted."""
    allows_calls: bool = True
    """False if the client asked for a reply without calls (`tool_choice` "none"). The tools are
    announced all the same, since another announcement would be another beginning of the prompt;
    calls in the reply are told as text."""
    wants: frozenset[ReplyExtra] = frozenset()
    """Extras of the reply."""
    top_logprobs: int = 0
    """Alternatives per token that the client asked for. Only the sampled token is known."""

    @property
    def has_tools(self) -> bool:
        """True if calls in the reply are read as such."""
        return bool(self.tools) and self.allows_calls


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyCall:
    """A complete call of a tool in a reply."""

    id: str
    """Id by which the client answers, the same whenever the reply is given again."""
    call: ToolCall


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReplyStart:
    """The part of a reply that is known before its first token."""

    id: str
    created: int
    model: str
    prompt_ids: np.ndarray
    cached_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenPiece:
    """Tokens of a completion, in the order in which they were sampled."""

    token_ids: Sequence[int]
    logprobs: Sequence[float] = ()
    """Nats, one for each token."""
    texts: Sequence[str] = ()
    """Text of each token; empty if texts are unknown."""


NO_TOKENS = TokenPiece(token_ids=())


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
    prompt_ids: np.ndarray
    """[T] int32, every token that the model has read."""
    completion: Completion
    stop_text: str | None = None
    """Stop text that ended the reply."""
    cached_tokens: int = 0
    """Tokens of the prompt that an earlier request of the conversation has had."""
    token_texts: tuple[str, ...] = ()
    """Text of each token of the completion; empty unless the client wants logprobs."""

    @property
    def start(self) -> ReplyStart:
        return ReplyStart(
            id=self.id,
            created=self.created,
            model=self.model,
            prompt_ids=self.prompt_ids,
            cached_tokens=self.cached_tokens,
        )

    @property
    def tokens(self) -> TokenPiece:
        return TokenPiece(
            token_ids=self.completion.token_ids.tolist(),
            logprobs=self.completion.logprobs.tolist(),
            texts=self.token_texts,
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlayedEpisode:
    """What an agent has done."""

    turns: tuple[Turn, ...]
    branches: tuple[Branch, ...]
    end: EndReason
    failure: str | None
    state: Mapping[str, Any]
    """What reward functions read of a program: exit_status, output, value, files, posted, asked and
    wall_s."""
    metrics: Mapping[str, float]


def make_failed_play(reason: str) -> PlayedEpisode:
    """Return the episode of an agent of which nothing is known but why it failed."""
    return PlayedEpisode(turns=(), branches=(), end="failed", failure=reason, state={}, metrics={})
