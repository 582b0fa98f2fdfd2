"""Parts of replies that several dialects have: server-sent events, arguments, logprobs, errors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from rl.agents.dialects.reply_reader import ReplyEvent, TextDelta
from rl.agents.types import (
    ChatReply,
    ChatRequest,
    ReplyEnd,
    TokenPiece,
)
from rl.types import ToolCall

LOWEST_LOGPROB = -9999.0
"""Logprob instead of a smaller one or of none, as vLLM tells it: JSON has no infinities."""
COMMENT = b": keep-alive\n\n"
"""Sign of life as a comment, which every client of a stream skips."""
DONE = b"data: [DONE]\n\n"
"""End of a stream of chunks."""
LINE_ENDS = ("\x85", "\u2028", "\u2029")
"""Characters at which some clients split lines, and that JSON may hold as they are."""
OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}
"""Type of an error by its status; invalid_request_error for other 4xx, server_error for 5xx."""


def write_json(value: Any) -> str:
    """Return a value as one line of JSON, whatever a client takes for the end of a line."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for end in LINE_ENDS:
        text = text.replace(end, f"\\u{ord(end):04x}")
    return text


def frame_data(value: Mapping[str, Any]) -> bytes:
    """Return a server-sent event without a name."""
    return f"data: {write_json(value)}\n\n".encode()


def frame_event(value: Mapping[str, Any]) -> bytes:
    """Return a server-sent event with the name of its type."""
    return f"event: {value['type']}\ndata: {write_json(value)}\n\n".encode()


def write_arguments(call: ToolCall) -> str:
    """Return the arguments of a call as JSON text."""
    return json.dumps(dict(call.arguments), ensure_ascii=False, allow_nan=False)


def tell_end(reply: ChatReply, *, has_calls: bool) -> ReplyEnd:
    """Return the end of a reply: a complete call counts only if nothing was cut off."""
    if reply.end == "length":
        return "length"
    return "tool_calls" if has_calls else "stop"


def select_parts(parts: Iterable[ReplyEvent], request: ChatRequest) -> list[ReplyEvent]:
    """Return the parts that the client wants: with or without thoughts."""
    selected = []
    for part in parts:
        is_thought = isinstance(part, TextDelta) and part.kind == "reasoning"
        if not is_thought or "reasoning" in request.wants:
            selected.append(part)
    return selected


def list_logprobs(tokens: TokenPiece, request: ChatRequest) -> list[dict[str, Any]]:
    """Return OpenAI's entries, one for each token."""
    entries = []
    for place, (token_id, logprob) in enumerate(
        zip(tokens.token_ids, tokens.logprobs, strict=True)
    ):
        # A token's text may be a part of a character: then its bytes are those of U+FFFD.
        name, data = f"token_id:{token_id}", None
        if tokens.texts:
            data = list(tokens.texts[place].encode("utf-8", errors="replace"))
            if "token_names" not in request.wants:
                name = tokens.texts[place]
        # NaN is not above it either.
        value = logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB
        entry: dict[str, Any] = {"token": name, "logprob": value, "bytes": data}
        # Of the alternatives only the sampled token is known.
        top = [dict(entry)] if request.top_logprobs else []
        entries.append(entry | {"top_logprobs": top})
    return entries


def describe_openai_usage(reply: ChatReply) -> dict[str, Any]:
    """Return the tokens of a reply, as chat completions count them."""
    num_prompt, num_new = len(reply.prompt_ids), len(reply.completion.token_ids)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
        "prompt_tokens_details": {"cached_tokens": reply.cached_tokens},
    }


def describe_openai_error(message: str, *, status: int, field: str, code: str) -> dict[str, Any]:
    """Return the error object of both OpenAI dialects."""
    kind = OPENAI_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"message": message, "type": kind, "param": field or None, "code": code or None}
