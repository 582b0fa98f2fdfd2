"""Canonical form of conversations, in which they are compared.

Arguments of calls are JSON with sorted keys, numbers as JavaScript writes them, and no nulls. An
assistant's text has no white space around it. Ids, thoughts, parameters and the order of tools do
not count. Whether an agent repeats the stop text that has ended a reply does not count either: the
record notes such a reply in both forms.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl.agents.types import ChatRequest, ToolSpec
from rl.types import Message, ToolCall


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Digests:
    """Digests of the beginnings of a request's conversation: place i is of messages 0 to i."""

    full: list[bytes]
    """Of tools and messages."""
    messages: list[bytes]
    """Of the messages alone."""
    bare: list[bytes]
    """Of the messages without system messages."""
    opening: bytes
    """Of the tools and the system messages."""

    @classmethod
    def of_tokens(cls, token_ids: np.ndarray) -> Digests:
        """Return the digests of a prompt without messages, which no messages have."""
        digest = hashlib.blake2b(b"tokens" + token_ids.tobytes(), digest_size=16).digest()
        return cls(full=[digest], messages=[digest], bare=[digest], opening=digest)

    @classmethod
    def of(cls, request: ChatRequest) -> Digests:
        each = [digest_message(m) for m in request.messages]
        tools = _digest_tools(request.tools)
        of_system, bare = [], []
        for message, digest in zip(request.messages, each, strict=True):
            is_system = message.role == "system"
            of_system += [digest] * is_system
            bare.append(b"" if is_system else digest)
        return cls(
            full=chain(b"full" + tools, each),
            messages=chain(b"messages", each),
            bare=chain(b"bare", bare),
            opening=chain(b"opening" + tools, of_system or [b""])[-1],
        )


def digest_message(message: Message) -> bytes:
    is_reply = message.role == "assistant"
    content = message.content.strip() if is_reply else message.content
    return _digest([message.role, content, [_describe_call(call) for call in message.calls]])


def _describe_call(call: ToolCall) -> list[Any]:
    """Return a call as it is after a client has read it and written it again."""
    # Clients with typed arguments leave out, or add, those that are null.
    given = {name: value for name, value in call.arguments.items() if value is not None}
    return [call.name, _write_numbers(given)]


def _write_numbers(value: Any) -> Any:
    """Return a value with the numbers that JavaScript has: all are doubles, and 1.0 is 1."""
    if isinstance(value, Mapping):
        return {name: _write_numbers(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_write_numbers(each) for each in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    try:
        number = float(value)
    except OverflowError:
        return value  # No double is as large.
    return int(number) if number.is_integer() else number


def _digest_tools(tools: Iterable[ToolSpec]) -> bytes:
    """Return a digest that does not depend on the order of the tools."""
    return b"".join(sorted(_digest([t.name, t.description, dict(t.parameters)]) for t in tools))


def _digest(value: Any) -> bytes:
    # Halves of surrogate pairs, which JSON may contain, have no encoding of their own.
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, default=_to_plain)
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()


def digest_tokens(token_ids: np.ndarray) -> bytes:
    return hashlib.blake2b(token_ids.astype(np.int32).tobytes(), digest_size=16).digest()


def _to_plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is no JSON")


def chain(start: bytes, digests: Iterable[bytes]) -> list[bytes]:
    """Return the digest of each beginning of a list; an empty entry adds nothing."""
    chained = []
    for digest in digests:
        if digest:
            start = hashlib.blake2b(start + digest, digest_size=16).digest()
        chained.append(start)
    return chained
