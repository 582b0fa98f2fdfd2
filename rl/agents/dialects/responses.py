"""OpenAI responses without state: each request brings the whole conversation as its input.

A reply is a list of items in the order in which the model wrote them: reasoning, messages, calls of
tools. A history with these items reads back to one message, with or without its reasoning.

Codex groups tools in namespaces, and has tools that take one text: to the model they are functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rl.agents.dialects.checking import check_fields, check_refused
from rl.agents.dialects.fields import FIELDS, HOSTED_TOOLS
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
from rl.agents.dialects.response_items import TEXT_ARGUMENT, ItemBuilder
from rl.agents.dialects.writing import (
    COMMENT,
    describe_openai_error,
    frame_event,
    select_parts,
    tell_end,
)
from rl.agents.types import (
    NO_IDS,
    NO_TOKENS,
    ChatReply,
    ChatRequest,
    ReplyExtra,
    ReplyStart,
    RequestError,
    TokenPiece,
    ToolForm,
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
ONE_TEXT = {
    "type": "object",
    "properties": {TEXT_ARGUMENT: {"type": "string"}},
    "required": [TEXT_ARGUMENT],
}
"""Schema of a tool that takes one text."""
KEEP_ALIVE = COMMENT


# Requests


def read_request(body: Mapping[str, Any]) -> ChatRequest:
    """Return the request of a body; raise BadRequestError for a field that is wrong."""
    body = require_object(body, "body")
    sorted_fields = check_fields(body, "responses")
    nested: set[str] = set()
    conversation = Conversation()
    tools = _read_tools(body.get("tools"), nested)
    names = {(t.form.namespace, t.form.name): t.name for t in tools if t.form is not None}
    instructions = read_text(body.get("instructions"), "instructions")
    if instructions:
        conversation.add(Message(role="system", content=instructions))
    given = body.get("input")
    if isinstance(given, str):
        conversation.add(Message(role="user", content=read_text(given, "input")))
    else:
        items = require_list(given, "input")
        for place, item in enumerate(items):
            where = f"input[{place}]"
            _read_item(require_object(item, where), where, conversation, names)
        # Instructions alone ask for nothing.
        if not items:
            Conversation().finish("input")
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


def _read_item(
    item: Mapping[str, Any],
    where: str,
    conversation: Conversation,
    names: Mapping[tuple[str, str], str],
) -> None:
    """Add an item; `names` are those of tools by namespace and name."""
    # The type of a message is often left out.
    kind = item.get("type")
    if kind is None and "role" in item:
        kind = "message"
    if kind == "message":
        _read_message(item, where, conversation)
    elif kind in ("function_call", "custom_tool_call"):
        call = read_call(item.get("name"), _read_arguments(item, where), f"{where}.name")
        namespace = read_text(item.get("namespace"), f"{where}.namespace")
        name = names.get((namespace, call.name), call.name)
        conversation.add_call(replace(call, name=name), call_id=item.get("call_id"))
    elif kind in ("function_call_output", "custom_tool_call_output"):
        call_id = read_text(item.get("call_id"), f"{where}.call_id")
        text = _join_text(item.get("output"), f"{where}.output", separator="\n")
        conversation.add_result(text, call_id=call_id)
    # Reasoning is left out: it neither begins nor ends a turn.
    elif kind != "reasoning":
        row = FIELDS["responses"]["input[].type"]
        check_refused("" if kind is None else kind, row, field=f"{where}.type")


def _read_arguments(item: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    if item["type"] == "custom_tool_call":
        return {TEXT_ARGUMENT: read_text(item.get("input"), f"{where}.input")}
    arguments, field = item.get("arguments"), f"{where}.arguments"
    # Some clients keep arguments as the object that they are.
    read = check_arguments if isinstance(arguments, dict) else read_arguments
    return read(arguments, field)


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
    """Return the tools that the client runs; a hosted tool beside them is left out."""
    if value is None:
        return ()
    tools: dict[str, ToolSpec] = {}
    hosted: list[tuple[str, str]] = []
    for place, given in enumerate(require_list(value, "tools")):
        where = f"tools[{place}]"
        outer = require_object(given, where)
        kind = outer.get("type")
        if kind in HOSTED_TOOLS:
            hosted.append((kind, where))
        elif kind == "namespace":
            namespace = read_text(outer.get("name"), f"{where}.name")
            inner = require_list(outer.get("tools"), f"{where}.tools")
            for number, each in enumerate(inner):
                at = f"{where}.tools[{number}]"
                _add_tool(require_object(each, at), at, tools, nested, namespace=namespace)
        else:
            _add_tool(outer, where, tools, nested)
    for kind, where in hosted:
        # An agent without other tools relies on it.
        if not tools:
            refuse_tool_type(kind, where, "responses")
        nested.add(f"tools[].type={kind}")
    return tuple(tools.values())


def _add_tool(
    given: Mapping[str, Any],
    where: str,
    tools: dict[str, ToolSpec],
    nested: set[str],
    *,
    namespace: str = "",
) -> None:
    """Add a function, or a tool that takes one text, by a name that no earlier tool has."""
    kind, name = given.get("type"), given.get("name")
    is_text = kind == "custom"
    if kind != "function" and not is_text:
        refuse_tool_type(kind, where, "responses")
    read = dict(given)
    if is_text:
        read["parameters"] = ONE_TEXT
        read["description"] = _describe_text_tool(given, where)
    if namespace and name in tools:
        read["name"] = f"{namespace}__{name}"
    tool = read_tool(read, where, schema_key="parameters", earlier=tools.keys())
    if namespace or is_text:
        form = ToolForm(name=str(name), namespace=namespace, is_text=is_text)
        tool = replace(tool, form=form)
    tools[tool.name] = tool
    for field in ("strict", "defer_loading", "cache_control"):
        if given.get(field) is not None:
            nested.add(f"tools[].{field}")


def _describe_text_tool(given: Mapping[str, Any], where: str) -> str:
    """Return the description of a tool that takes one text, with the grammar of the text."""
    text = read_text(given.get("description"), f"{where}.description")
    field = f"{where}.format"
    form = {} if given.get("format") is None else require_object(given["format"], field)
    grammar = read_text(form.get("definition"), f"{field}.definition")
    if not grammar:
        return text
    syntax = read_text(form.get("syntax"), f"{field}.syntax")
    return f"{text}\n\nGrammar of the input ({syntax}):\n{grammar}".strip()


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
    builder = ItemBuilder(reply.id, tools=request.tools)
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

    def __init__(self, request: ChatRequest, *, start: ReplyStart) -> None:
        self._request = request
        self._start = start
        self._builder = ItemBuilder(start.id, tools=request.tools)
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
