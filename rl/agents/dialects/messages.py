"""Anthropic messages, and the counting of their tokens.

A reply is a list of blocks in the order in which the model wrote them. Thoughts are told only to a
client that turned thinking on, as Anthropic does: others expect a text in the first block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl.agents.dialects.checking import check_fields, check_refused
from rl.agents.dialects.fields import FIELDS
from rl.agents.dialects.reading import (
    Conversation,
    check_arguments,
    count_harmless,
    join_parts,
    read_call,
    read_choice,
    read_count,
    read_flag,
    read_stops,
    read_text,
    read_tool,
    refuse_named_choice,
    refuse_tool_type,
    require_list,
    require_object,
)
from rl.agents.dialects.reply_reader import ParsedReply, ReplyEvent, join_events
from rl.agents.dialects.writing import frame_event, select_parts, tell_end, write_arguments
from rl.agents.types import (
    NO_IDS,
    NO_TOKENS,
    BadRequestError,
    ChatReply,
    ChatRequest,
    ReplyCall,
    ReplyExtra,
    ReplyStart,
    RequestError,
    TokenPiece,
    ToolSpec,
)
from rl.types import Message

ROLES = ("user", "assistant", "system")
CHOICES = ("auto", "any", "none", "tool")
THINKING = ("enabled", "disabled", "adaptive", "between_tools")
THOUGHT_BLOCKS = ("thinking", "redacted_thinking")
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""Type of an error by its status; invalid_request_error for other 4xx, api_error for 5xx."""
END_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
NO_BLOCK = ""
BILLING = "x-anthropic-billing-header:"
"""First line of Claude Code's system message, for the service of Anthropic."""
KEEP_ALIVE = frame_event({"type": "ping"})


# Requests


def read_request(body: Mapping[str, Any]) -> ChatRequest:
    """Return the request of a body; raise BadRequestError for a field that is wrong."""
    request = _read_body(body)
    # What counting does without.
    if request.max_tokens is None:
        raise BadRequestError("max_tokens is required", field="max_tokens")
    # The API continues such a text, and the record would take it for the model's.
    last = len(body["messages"]) - 1
    if body["messages"][last].get("role") == "assistant":
        raise BadRequestError(
            f"messages[{last}].role='assistant' at the end is not supported: nobody begins a reply "
            "for the model",
            field=f"messages[{last}].role",
        )
    return request


def read_count_request(body: Mapping[str, Any]) -> ChatRequest:
    """Return the request of a body whose tokens are to be counted."""
    return _read_body(body)


def make_count(num_tokens: int) -> dict[str, Any]:
    """Return the answer to a request for a count."""
    return {"input_tokens": num_tokens}


def _read_body(body: Mapping[str, Any]) -> ChatRequest:
    body = require_object(body, "body")
    sorted_fields = check_fields(body, "messages")
    nested: set[str] = set()
    conversation = Conversation()
    if body.get("system"):
        text = _join_texts(body["system"], "system", nested, cache="system[].cache_control")
        if text.startswith(BILLING):
            # It says nothing to a model, and each request would be another beginning.
            text = text.partition("\n")[2]
            nested.add("system[].x-anthropic-billing-header")
        if text:
            conversation.add(Message(role="system", content=text))
    given = require_list(body.get("messages"), "messages")
    if not given:
        Conversation().finish("messages")
    for place, message in enumerate(given):
        where = f"messages[{place}]"
        _read_message(require_object(message, where), where, conversation, nested)
    tools = _read_tools(body.get("tools"), nested)
    requires_call, allows_calls = _read_choice(body.get("tool_choice"), nested)
    return ChatRequest(
        messages=conversation.finish("messages"),
        tools=tools,
        model=read_text(body.get("model"), "model"),
        is_streamed=read_flag(body.get("stream"), "stream"),
        max_tokens=read_count(body.get("max_tokens"), "max_tokens"),
        stop=read_stops(body.get("stop_sequences"), "stop_sequences"),
        asked=sorted_fields.asked,
        harmless=count_harmless(sorted_fields.harmless, nested),
        requires_call=requires_call,
        allows_calls=allows_calls,
        wants=_read_wants(body.get("thinking")),
    )


def _read_wants(thinking: Any) -> frozenset[ReplyExtra]:
    if thinking is None:
        return frozenset()
    kind = require_object(thinking, "thinking").get("type")
    read_choice(kind, "thinking.type", THINKING)
    return frozenset() if kind == "disabled" else frozenset({"reasoning"})


def _read_choice(value: Any, nested: set[str]) -> tuple[bool, bool]:
    """Return whether a call is required, and whether calls are allowed."""
    if value is None:
        return False, True
    choice = require_object(value, "tool_choice")
    kind = read_choice(choice.get("type"), "tool_choice.type", CHOICES)
    # Sampling is not constrained, so that a certain tool cannot be promised.
    if kind == "tool":
        refuse_named_choice(choice.get("name"), "tool_choice.name", "messages")
    if choice.get("disable_parallel_tool_use") is not None:
        nested.add("tool_choice.disable_parallel_tool_use")
    return kind == "any", kind != "none"


def _read_tools(value: Any, nested: set[str]) -> tuple[ToolSpec, ...]:
    if value is None:
        return ()
    tools: dict[str, ToolSpec] = {}
    for place, given in enumerate(require_list(value, "tools")):
        where = f"tools[{place}]"
        outer = require_object(given, where)
        if outer.get("type") not in (None, "custom"):
            refuse_tool_type(outer["type"], where, "messages")
        tool = read_tool(outer, where, schema_key="input_schema", earlier=tools.keys())
        tools[tool.name] = tool
        for name in ("strict", "defer_loading", "cache_control"):
            if outer.get(name) is not None:
                nested.add(f"tools[].{name}")
    return tuple(tools.values())


def _read_message(
    message: Mapping[str, Any], where: str, conversation: Conversation, nested: set[str]
) -> None:
    role = read_choice(message.get("role"), f"{where}.role", ROLES)
    content, field = message.get("content"), f"{where}.content"
    if role == "system":
        text = _join_texts(content, field, nested)
        # Clients change settings between turns by empty system messages.
        if text:
            conversation.add(Message(role="system", content=text))
    elif role == "user":
        _read_user(content, field, conversation, nested)
    elif isinstance(content, list):
        conversation.add_text("")  # A turn of thoughts alone is a turn.
        for place, block in enumerate(content):
            where = f"{field}[{place}]"
            _read_reply_block(require_object(block, where), where, conversation, nested)
    else:
        conversation.add_text(read_text(content, field))


def _read_user(content: Any, field: str, conversation: Conversation, nested: set[str]) -> None:
    """Add the results of tools, then the text."""
    texts: list[Any] = []
    if not isinstance(content, list):
        conversation.add(Message(role="user", content=read_text(content, field)))
        return
    num_results = 0
    for place, given in enumerate(content):
        where = f"{field}[{place}]"
        block = require_object(given, where)
        if block.get("type") == "tool_result":
            num_results += 1
            _note_block(block, nested)
            call_id = read_text(block.get("tool_use_id"), f"{where}.tool_use_id")
            text = _join_texts(block.get("content"), f"{where}.content", nested)
            conversation.add_result(text, call_id=call_id)
        else:
            texts.append(_read_text_block(block, where, nested))
    # Results alone are no message of the user.
    if texts or not num_results:
        conversation.add(Message(role="user", content="\n".join(texts)))


def _read_reply_block(
    block: Mapping[str, Any], where: str, conversation: Conversation, nested: set[str]
) -> None:
    kind = block.get("type")
    if kind == "tool_use":
        _note_block(block, nested)
        arguments = check_arguments(block.get("input"), f"{where}.input")
        call = read_call(block.get("name"), arguments, f"{where}.name")
        conversation.add_call(call, call_id=block.get("id"))
    elif kind not in THOUGHT_BLOCKS:
        conversation.add_text(_read_text_block(block, where, nested))


def _read_text_block(block: Mapping[str, Any], where: str, nested: set[str]) -> str:
    _note_block(block, nested)
    if block.get("type") != "text":
        row = FIELDS["messages"]["messages[].content[].type"]
        kind = block.get("type")
        check_refused("" if kind is None else kind, row, field=f"{where}.type")
    return read_text(block.get("text"), f"{where}.text")


def _note_block(
    block: Mapping[str, Any],
    nested: set[str],
    cache: str = "messages[].content[].cache_control",
) -> None:
    if block.get("cache_control") is not None:
        nested.add(cache)
    if block.get("is_error") is not None:
        nested.add("messages[].content[].is_error")


def _join_texts(
    value: Any,
    field: str,
    nested: set[str],
    cache: str = "messages[].content[].cache_control",
) -> str:
    if isinstance(value, list):
        for block in value:
            if isinstance(block, dict):
                _note_block(block, nested, cache)
    return join_parts(
        value,
        field,
        types={"text": "text"},
        separator="\n",
        refusal=FIELDS["messages"]["messages[].content[].type"].note,
    )


# Replies


def make_body(reply: ChatReply, request: ChatRequest, parsed: ParsedReply) -> dict[str, Any]:
    """Return the body of a whole reply."""
    blocks = []
    # Texts between which a thought is left out are one text, as in a stream.
    for part in join_events(select_parts(parsed.parts, request)):
        if isinstance(part, ReplyCall):
            blocks.append({**_open_call(part), "input": dict(part.call.arguments)})
        elif part.kind == "content":
            blocks.append({"type": "text", "text": part.text})
        else:
            blocks.append({"type": "thinking", "thinking": part.text, "signature": ""})
    # Clients look at the first block, and one that drops thoughts has a turn to send back.
    if not (parsed.content or parsed.calls):
        blocks.append({"type": "text", "text": ""})
    body = _describe_message(reply.start, blocks)
    end = _describe_end(reply, has_calls=bool(parsed.calls))
    return {**body, **end, "usage": _describe_usage(reply.start, len(reply.completion.token_ids))}


def make_error(error: RequestError) -> tuple[int, dict[str, Any]]:
    """Return status and body of an error."""
    default = "invalid_request_error" if error.status < 500 else "api_error"
    kind = ERROR_TYPES.get(error.status, default)
    told: dict[str, Any] = {"type": kind, "message": error.message}
    if error.field == "thread":
        # The client `anthropic` sends its tool runner's turns whole after this error.
        told["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return error.status, {"type": "error", "error": told}


class MessagesStream:
    """Events of one reply: `start`, `add` for each piece, then `finish` or `fail`."""

    def __init__(self, request: ChatRequest, *, start: ReplyStart) -> None:
        self._request = request
        self._start = start
        self._num_blocks = 0
        self._open_type = NO_BLOCK
        """Type of the block that is open."""
        self._has_calls = False
        self._has_turn = False

    def start(self) -> bytes:
        """Return the beginning of the message, with the tokens of the prompt."""
        message = _describe_message(self._start, [])
        message["usage"] = _describe_usage(self._start, 0)
        return frame_event({"type": "message_start", "message": message})

    def add(self, events: Sequence[ReplyEvent], *, tokens: TokenPiece = NO_TOKENS) -> bytes:
        """Return the events of some parts; tokens are told by chat only."""
        frames = []
        for part in select_parts(events, self._request):
            if isinstance(part, ReplyCall):
                self._has_calls = self._has_turn = True
                arguments = write_arguments(part.call)
                block = {**_open_call(part), "input": {}}
                frames += [*self._open_block(block), self._write_delta(
                    {"type": "input_json_delta", "partial_json": arguments}
                ), *self._close_block()]  # fmt: skip
            elif part.kind == "content":
                self._has_turn = True
                if self._open_type != "text":
                    frames += self._open_block({"type": "text", "text": ""})
                frames.append(self._write_delta({"type": "text_delta", "text": part.text}))
            else:
                if self._open_type != "thinking":
                    block = {"type": "thinking", "thinking": "", "signature": ""}
                    frames += self._open_block(block)
                delta = {"type": "thinking_delta", "thinking": part.text}
                frames.append(self._write_delta(delta))
        return b"".join(frames)

    def finish(self, reply: ChatReply) -> bytes:
        """Return the end of the message, with its reason and the tokens."""
        frames = self._close_block()
        # As in the whole body, a text stands for a reply that has nothing to send back.
        if not self._has_turn:
            frames += self._open_block({"type": "text", "text": ""})
            frames += self._close_block()
        usage = _describe_usage(self._start, len(reply.completion.token_ids))
        end = _describe_end(reply, has_calls=self._has_calls)
        frames.append(frame_event({"type": "message_delta", "delta": end, "usage": usage}))
        frames.append(frame_event({"type": "message_stop"}))
        return b"".join(frames)

    def fail(self, error: RequestError) -> bytes:
        """Return the end of a stream whose reply has failed."""
        return frame_event(make_error(error)[1])

    def _open_block(self, block: dict[str, Any]) -> list[bytes]:
        frames = self._close_block()
        self._open_type = block["type"]
        event = {"type": "content_block_start", "index": self._num_blocks, "content_block": block}
        return [*frames, frame_event(event)]

    def _write_delta(self, delta: dict[str, Any]) -> bytes:
        event = {"type": "content_block_delta", "index": self._num_blocks, "delta": delta}
        return frame_event(event)

    def _close_block(self) -> list[bytes]:
        if self._open_type == NO_BLOCK:
            return []
        frames = []
        # Some clients wait for a signature at the end of a thought.
        if self._open_type == "thinking":
            frames.append(self._write_delta({"type": "signature_delta", "signature": ""}))
        frames.append(frame_event({"type": "content_block_stop", "index": self._num_blocks}))
        self._open_type = NO_BLOCK
        self._num_blocks += 1
        return frames


def stream_error(error: RequestError, request: ChatRequest) -> bytes:
    """Return the stream of a reply that has failed before its first token."""
    start = ReplyStart(id="", created=0, model=request.model, prompt_ids=NO_IDS)
    return MessagesStream(request, start=start).fail(error)


def stream_body(reply: ChatReply, request: ChatRequest, parsed: ParsedReply) -> bytes:
    """Return a whole reply as the stream of it."""
    stream = MessagesStream(request, start=reply.start)
    return stream.start() + stream.add(parsed.parts) + stream.finish(reply)


def _open_call(part: ReplyCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": part.id, "name": part.call.name}


def _describe_message(start: ReplyStart, blocks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "id": f"msg_{start.id}",
        "type": "message",
        "role": "assistant",
        "model": start.model,
        "content": list(blocks),
        "stop_reason": None,
        "stop_sequence": None,
    }


def _describe_end(reply: ChatReply, *, has_calls: bool) -> dict[str, Any]:
    end = tell_end(reply, has_calls=has_calls)
    if end == "stop" and reply.stop_text is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": reply.stop_text}
    return {"stop_reason": END_REASONS[end], "stop_sequence": None}


def _describe_usage(start: ReplyStart, num_new: int) -> dict[str, Any]:
    # Clients add the three numbers of the prompt: `input_tokens` are those that were not cached.
    return {
        "input_tokens": len(start.prompt_ids) - start.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": start.cached_tokens,
        "output_tokens": num_new,
    }
