"""OpenAI responses without state: each request brings the whole conversation as its input.

A reply is a list of items in the order in which the model wrote them: reasoning, messages, function
calls. A history with these items reads back to one message, with or without its reasoning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl.agents.dialects.fields import FIELDS, check_fields, check_refused
from rl.agents.dialects.reading import (
    Conversation,
    check_arguments,
    count_harmless,
    join_parts,
    read_arguments,
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
from rl.agents.dialects.reply_reader import ParsedReply, ReplyEvent
from rl.agents.dialects.writing import (
    COMMENT,
    describe_openai_error,
    frame_event,
    select_parts,
    tell_end,
    write_arguments,
)
from rl.agents.types import (
    NO_IDS,
    NO_TOKENS,
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

ROLES = ("system", "developer", "user", "assistant")
TEXT_PARTS = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "refusal": "refusal",
    "summary_text": "text",
}
"""Name of the text in each type of part."""
CHOICES = ("none", "auto", "required")


# Requests


def read_request(body: Mapping[str, Any]) -> ChatRequest:
    """Return the request of a body; raise BadRequestError for a field that is wrong."""
    body = require_object(body, "body")
    sorted_fields = check_fields(body, "responses")
    nested: set[str] = set()
    conversation = Conversation()
    instructions = read_text(body.get("instructions"), "instructions")
    if instructions:
        conversation.add(Message(role="system", content=instructions))
    given = body.get("input")
    if isinstance(given, str):
        conversation.add(Message(role="user", content=read_text(given, "input")))
    else:
        items = require_list(given, "input")
        for place, item in enumerate(items):
            _read_item(require_object(item, f"input[{place}]"), f"input[{place}]", conversation)
        # Instructions alone ask for nothing.
        if not items:
            Conversation().finish("input")
    tools = _read_tools(body.get("tools"), nested)
    requires_call, allows_calls = _read_choice(body.get("tool_choice"))
    wants: frozenset[ReplyExtra] = frozenset({"reasoning"})
    told = body.get("include_reasoning")
    if told is not None and not read_flag(told, "include_reasoning"):
        wants = frozenset()
    return ChatRequest(
        messages=conversation.finish("input"),
        tools=tools,
        model=read_text(body.get("model"), "model"),
        is_streamed=read_flag(body.get("stream"), "stream"),
        max_tokens=read_count(body.get("max_output_tokens"), "max_output_tokens"),
        stop=read_stops(body.get("stop"), "stop"),
        asked=sorted_fields.asked,
        harmless=count_harmless(sorted_fields.harmless, nested),
        requires_call=requires_call,
        allows_calls=allows_calls,
        wants=wants,
    )


def _read_item(item: Mapping[str, Any], where: str, conversation: Conversation) -> None:
    # The type of a message is often left out.
    kind = item.get("type")
    if kind is None and "role" in item:
        kind = "message"
    if kind == "message":
        _read_message(item, where, conversation)
    elif kind == "function_call":
        arguments, field = item.get("arguments"), f"{where}.arguments"
        # Some clients keep arguments as the object that they are.
        read = check_arguments if isinstance(arguments, dict) else read_arguments
        call = read_call(item.get("name"), read(arguments, field), f"{where}.name")
        conversation.add_call(call)
    elif kind == "function_call_output":
        read_text(item.get("call_id"), f"{where}.call_id")
        text = _join_text(item.get("output"), f"{where}.output", separator="\n")
        conversation.add(Message(role="tool", content=text))
    # Reasoning is left out: it neither begins nor ends a turn.
    elif kind != "reasoning":
        row = FIELDS["responses"]["input[].type"]
        check_refused("" if kind is None else kind, row, field=f"{where}.type")


def _read_message(item: Mapping[str, Any], where: str, conversation: Conversation) -> None:
    role = read_choice(item.get("role"), f"{where}.role", ROLES)
    is_reply = role == "assistant"
    field = f"{where}.content"
    content = _join_text(item.get("content"), field, separator="" if is_reply else "\n")
    if is_reply:
        conversation.add_text(content)
    elif role == "user":
        conversation.add(Message(role="user", content=content))
    else:
        conversation.add(Message(role="system", content=content))


def _join_text(value: Any, field: str, *, separator: str) -> str:
    return join_parts(
        value,
        field,
        types=TEXT_PARTS,
        separator=separator,
        refusal=FIELDS["responses"]["input[].content[].type"].note,
        left_out=("reasoning_text",),
    )


def _read_tools(value: Any, nested: set[str]) -> tuple[ToolSpec, ...]:
    if value is None:
        return ()
    tools: dict[str, ToolSpec] = {}
    for place, given in enumerate(require_list(value, "tools")):
        where = f"tools[{place}]"
        outer = require_object(given, where)
        if outer.get("type") != "function":
            refuse_tool_type(outer.get("type"), where, "responses")
        tool = read_tool(outer, where, schema_key="parameters", earlier=tools.keys())
        tools[tool.name] = tool
        for name in ("strict", "defer_loading", "cache_control"):
            if outer.get(name) is not None:
                nested.add(f"tools[].{name}")
    return tuple(tools.values())


def _read_choice(value: Any) -> tuple[bool, bool]:
    """Return whether a call is required, and whether calls are allowed."""
    if isinstance(value, dict):
        if value.get("type") != "allowed_tools":
            refuse_named_choice(
                value.get("name", value.get("type")), "tool_choice.name", "responses"
            )
        # A subset of the tools is a hint to the model, which is not constrained.
        value = read_choice(value.get("mode"), "tool_choice.mode", CHOICES)
    elif value is not None:
        read_choice(value, "tool_choice", CHOICES)
    return value == "required", value != "none"


# Replies


def make_body(reply: ChatReply, request: ChatRequest, parsed: ParsedReply) -> dict[str, Any]:
    """Return the body of a whole reply."""
    builder = _ItemBuilder(reply.id)
    for part in select_parts(parsed.parts, request):
        builder.add(part)
    builder.finish()
    return _describe_response(
        reply.start, request, output=builder.output, reply=reply, has_calls=builder.has_calls
    )


def make_error(error: RequestError) -> tuple[int, dict[str, Any]]:
    """Return status and body of an error."""
    return error.status, {"error": _describe_error(error)}


class ResponsesStream:
    """Events of one reply: `start`, `add` for each piece, then `finish` or `fail`."""

    keep_alive = COMMENT

    def __init__(self, request: ChatRequest, *, start: ReplyStart) -> None:
        self._request = request
        self._start = start
        self._builder = _ItemBuilder(start.id)
        self._num_events = 0

    def start(self) -> bytes:
        """Return the events that announce the reply."""
        response = _describe_response(self._start, self._request, output=[])
        return self._write(
            {"type": "response.created", "response": response},
            {"type": "response.in_progress", "response": response},
        )

    def add(self, events: Sequence[ReplyEvent], *, tokens: TokenPiece = NO_TOKENS) -> bytes:
        """Return the events of some parts; tokens are told by chat only."""
        frames = []
        for part in select_parts(events, self._request):
            frames.append(self._write(*self._builder.add(part)))
        return b"".join(frames)

    def finish(self, reply: ChatReply) -> bytes:
        """Return the end of the last item and the whole response."""
        frames = self._write(*self._builder.finish())
        response = _describe_response(
            self._start,
            self._request,
            output=self._builder.output,
            reply=reply,
            has_calls=self._builder.has_calls,
        )
        return frames + self._write(
            {"type": f"response.{response['status']}", "response": response}
        )

    def fail(self, error: RequestError) -> bytes:
        """Return the end of a stream whose reply has failed.

        The event has the error twice: at its top, as the API describes it, and as the object by
        which the client `openai` knows that it must raise.
        """
        told = _describe_error(error)
        return self._write(
            {
                "type": "error",
                "code": told["code"] or told["type"],
                "message": told["message"],
                "param": told["param"],
                "error": told,
            }
        )

    def _write(self, *events: dict[str, Any]) -> bytes:
        frames = []
        for event in events:
            frames.append(frame_event({**event, "sequence_number": self._num_events}))
            self._num_events += 1
        return b"".join(frames)


def stream_error(error: RequestError, request: ChatRequest) -> bytes:
    """Return the stream of a reply that has failed before its first token."""
    start = ReplyStart(id="", created=0, model=request.model, prompt_ids=NO_IDS)
    return ResponsesStream(request, start=start).fail(error)


def stream_body(reply: ChatReply, request: ChatRequest, parsed: ParsedReply) -> bytes:
    """Return a whole reply as the stream of it."""
    stream = ResponsesStream(request, start=reply.start)
    return stream.start() + stream.add(parsed.parts) + stream.finish(reply)


class _ItemBuilder:
    """Items of a reply, with the events that tell of them."""

    def __init__(self, reply_id: str) -> None:
        self.reply_id = reply_id
        self.output: list[dict[str, Any]] = []
        """Complete items."""
        self.has_calls = False
        self._open: dict[str, Any] | None = None
        """Item whose text goes on."""
        self._texts: list[str] = []
        self._has_message = False

    def add(self, part: ReplyEvent) -> list[dict[str, Any]]:
        """Return the events of a part."""
        if isinstance(part, ReplyCall):
            return self.finish_item() + self._add_call(part)
        kind = "message" if part.kind == "content" else "reasoning"
        events = []
        # A text goes on for as long as its kind does.
        if self._open is None or self._open["type"] != kind:
            events = self.finish_item() + self._open_item(kind)
        assert self._open is not None
        self._texts.append(part.text)
        delta = {
            "type": f"response.{self._part_type}.delta",
            **self._place_text(),
            "delta": part.text,
        }
        if kind == "message":
            delta["logprobs"] = []
        return [*events, delta]

    def finish(self) -> list[dict[str, Any]]:
        """Return the events of the end.

        A reply without content and calls gets an empty message: a client that sends back neither
        would lose the turn.
        """
        events = self.finish_item()
        if not self.has_calls and not self._has_message:
            events += self._open_item("message") + self.finish_item()
        return events

    def finish_item(self) -> list[dict[str, Any]]:
        """Return the events that end the open item."""
        if self._open is None:
            return []
        text, part = "".join(self._texts), self._make_part("".join(self._texts))
        done: dict[str, Any] = {
            "type": f"response.{self._part_type}.done",
            **self._place_text(),
            "text": text,
        }
        # Fields that the client's types require.
        if self._open["type"] == "message":
            done["logprobs"] = []
        ended = {"type": "response.content_part.done", **self._place_text(), "part": part}
        item = {**self._open, "status": "completed", "content": [part]}
        self._open, self._texts = None, []
        return [done, ended, self._end_item(item)]

    @property
    def _part_type(self) -> str:
        assert self._open is not None
        return "output_text" if self._open["type"] == "message" else "reasoning_text"

    def _make_part(self, text: str) -> dict[str, Any]:
        part: dict[str, Any] = {"type": self._part_type, "text": text}
        return part | ({"annotations": [], "logprobs": []} if "output" in part["type"] else {})

    def _place_text(self) -> dict[str, Any]:
        assert self._open is not None
        return {
            "item_id": self._open["id"],
            "output_index": len(self.output),
            "content_index": 0,
        }

    def _open_item(self, kind: str) -> list[dict[str, Any]]:
        prefix = "msg" if kind == "message" else "rs"
        item: dict[str, Any] = {"id": f"{prefix}_{self.reply_id}_{len(self.output)}", "type": kind}
        if kind == "message":
            self._has_message = True
            item["role"] = "assistant"
        else:
            item["summary"] = []
        self._open = item
        added = {**item, "status": "in_progress", "content": []}
        part = {
            "type": "response.content_part.added",
            **self._place_text(),
            "part": self._make_part(""),
        }
        return [self._announce(added), part]

    def _add_call(self, part: ReplyCall) -> list[dict[str, Any]]:
        self.has_calls = True
        arguments = write_arguments(part.call)
        item = {
            "id": f"fc_{self.reply_id}_{len(self.output)}",
            "type": "function_call",
            "call_id": part.id,
            "name": part.call.name,
        }
        place = {"item_id": item["id"], "output_index": len(self.output)}
        kind = "response.function_call_arguments"
        # A call is known once it is complete, so that its arguments are one piece.
        return [
            self._announce({**item, "arguments": "", "status": "in_progress"}),
            {"type": f"{kind}.delta", **place, "delta": arguments},
            {"type": f"{kind}.done", **place, "name": part.call.name, "arguments": arguments},
            self._end_item({**item, "arguments": arguments, "status": "completed"}),
        ]

    def _announce(self, item: dict[str, Any]) -> dict[str, Any]:
        index = len(self.output)
        return {"type": "response.output_item.added", "output_index": index, "item": item}

    def _end_item(self, item: dict[str, Any]) -> dict[str, Any]:
        index = len(self.output)
        self.output.append(item)
        return {"type": "response.output_item.done", "output_index": index, "item": item}


def _describe_response(
    start: ReplyStart,
    request: ChatRequest,
    *,
    output: Sequence[Mapping[str, Any]],
    reply: ChatReply | None = None,
    has_calls: bool = False,
) -> dict[str, Any]:
    """Return a response, in progress without a reply."""
    status, details = "in_progress", None
    if reply is not None:
        is_cut = tell_end(reply, has_calls=has_calls) == "length"
        status = "incomplete" if is_cut else "completed"
        details = {"reason": "max_output_tokens"} if is_cut else None
    # The client's types require tools and their choice; other settings are those of the run.
    choice = "required" if request.requires_call else "auto"
    tools = []
    for tool in request.tools:
        tools.append({
            "type": "function",
            "name": tool.name,
            "description": tool.description,
            "parameters": dict(tool.parameters),
            "strict": False,
        })  # fmt: skip
    return {
        "id": f"resp_{start.id}",
        "object": "response",
        "created_at": start.created,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": details,
        "instructions": None,
        "max_output_tokens": request.max_tokens,
        "metadata": {},
        "model": start.model,
        "output": list(output),
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": request.asked.get("temperature"),
        "text": {"format": {"type": "text"}},
        "tool_choice": choice if request.allows_calls else "none",
        "tools": tools,
        "top_p": request.asked.get("top_p"),
        "truncation": "disabled",
        "usage": None if reply is None else _describe_usage(reply),
        "user": None,
    }


def _describe_usage(reply: ChatReply) -> dict[str, Any]:
    num_prompt, num_new = len(reply.prompt_ids), len(reply.completion.token_ids)
    return {
        "input_tokens": num_prompt,
        "input_tokens_details": {
            "cached_tokens": reply.cached_tokens,
            "cache_write_tokens": 0,
        },
        "output_tokens": num_new,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_prompt + num_new,
    }


def _describe_error(error: RequestError) -> dict[str, Any]:
    return describe_openai_error(
        error.message, status=error.status, field=error.field, code=error.code
    )
