"""OpenAI chat completions, with vLLM's token ids.

A reply's thoughts are told as `reasoning_content` and as `reasoning`, since clients read one or the
other. A history of it reads back to the same messages: content, calls with their arguments as JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl.agents.dialects.checking import check_fields, check_refused
from rl.agents.dialects.fields import FIELDS
from rl.agents.dialects.reading import (
    MAX_TOP_LOGPROBS,
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
    DONE,
    describe_openai_error,
    describe_openai_usage,
    frame_data,
    list_logprobs,
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
from rl.types import Message, ToolCall

ROLES = ("system", "developer", "user", "assistant", "tool")
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Name of the text in each type of part; the Responses API's types occur in echoed histories."""
THOUGHT_PARTS = ("thinking", "redacted_thinking", "reasoning")
CHOICES = ("none", "auto", "required")
KEEP_ALIVE = COMMENT


# Requests


def read_request(body: Mapping[str, Any]) -> ChatRequest:
    """Return the request of a body; raise BadRequestError for a field that is wrong."""
    body = require_object(body, "body")
    sorted_fields = check_fields(body, "chat")
    nested: set[str] = set()
    messages = _read_messages(body.get("messages"), nested)
    tools = _read_tools(body.get("tools"), nested)
    requires_call, allows_calls = _read_choice(body.get("tool_choice"))
    # Some clients send both, the older name for older servers.
    limits = []
    for name in ("max_tokens", "max_completion_tokens"):
        limit = read_count(body.get(name), name)
        if limit is not None:
            limits.append(limit)
    top = read_count(body.get("top_logprobs"), "top_logprobs", low=0, high=MAX_TOP_LOGPROBS)
    return ChatRequest(
        messages=messages,
        tools=tools,
        model=read_text(body.get("model"), "model"),
        is_streamed=read_flag(body.get("stream"), "stream"),
        max_tokens=min(limits, default=None),
        stop=read_stops(body.get("stop"), "stop"),
        asked=sorted_fields.asked,
        harmless=count_harmless(sorted_fields.harmless, nested),
        requires_call=requires_call,
        allows_calls=allows_calls,
        wants=_read_wants(body),
        top_logprobs=top or 0,
    )


def _read_wants(body: Mapping[str, Any]) -> frozenset[ReplyExtra]:
    wants: set[ReplyExtra] = {"reasoning"}
    switches: tuple[tuple[str, ReplyExtra], ...] = (
        ("logprobs", "logprobs"),
        ("return_token_ids", "token_ids"),
        ("return_tokens_as_token_ids", "token_names"),
    )
    for name, extra in switches:
        if read_flag(body.get(name), name):
            wants.add(extra)
    told = body.get("include_reasoning")
    if told is not None and not read_flag(told, "include_reasoning"):
        wants.remove("reasoning")
    options = body.get("stream_options")
    if options is not None:
        field = "stream_options.include_usage"
        if read_flag(require_object(options, "stream_options").get("include_usage"), field):
            wants.add("usage")
    return frozenset(wants)


def _read_choice(value: Any) -> tuple[bool, bool]:
    """Return whether a call is required, and whether calls are allowed."""
    if isinstance(value, dict):
        if value.get("type") != "allowed_tools":
            inner = value.get("function")
            name = inner.get("name") if isinstance(inner, dict) else value.get("type")
            refuse_named_choice(name, "tool_choice.function.name", "chat")
        # A subset of the tools is a hint to the model, which is not constrained.
        inner = require_object(value.get("allowed_tools"), "tool_choice.allowed_tools")
        value = read_choice(inner.get("mode"), "tool_choice.allowed_tools.mode", CHOICES)
    elif value is not None:
        read_choice(value, "tool_choice", CHOICES)
    return value == "required", value != "none"


def _read_tools(value: Any, nested: set[str]) -> tuple[ToolSpec, ...]:
    if value is None:
        return ()
    tools: dict[str, ToolSpec] = {}
    for place, given in enumerate(require_list(value, "tools")):
        where = f"tools[{place}]"
        outer = require_object(given, where)
        if outer.get("type", "function") != "function":
            refuse_tool_type(outer["type"], where, "chat")
        function = require_object(outer.get("function"), f"{where}.function")
        tool = read_tool(
            function, f"{where}.function", schema_key="parameters", earlier=tools.keys()
        )
        tools[tool.name] = tool
        for name in ("strict", "defer_loading", "cache_control"):
            if outer.get(name) is not None or function.get(name) is not None:
                nested.add(f"tools[].{name}")
    return tuple(tools.values())


def _read_messages(value: Any, nested: set[str]) -> tuple[Message, ...]:
    conversation = Conversation()
    for place, given in enumerate(require_list(value, "messages")):
        where = f"messages[{place}]"
        message = require_object(given, where)
        role = read_choice(message.get("role"), f"{where}.role", ROLES)
        for name in ("name", "reasoning", "reasoning_content"):
            if message.get(name) is not None:
                nested.add(f"messages[].{name}")
        content = _read_content(message.get("content"), f"{where}.content", role, nested)
        if role == "assistant":
            _read_assistant(message, content, where, conversation)
        elif role == "user":
            conversation.add(Message(role="user", content=content))
        elif role == "tool":
            call_id = read_text(message.get("tool_call_id"), f"{where}.tool_call_id")
            conversation.add_result(content, call_id=call_id)
        else:
            conversation.add(Message(role="system", content=content))
    return conversation.finish("messages")


def _read_content(value: Any, field: str, role: str, nested: set[str]) -> str:
    if isinstance(value, list):
        for part in value:
            if isinstance(part, dict) and part.get("cache_control") is not None:
                nested.add("messages[].content[].cache_control")
    # A reply of several texts was one text, texts of other roles are paragraphs.
    is_reply = role == "assistant"
    return join_parts(
        value,
        field,
        types=TEXT_PARTS,
        separator="" if is_reply else "\n",
        refusal=FIELDS["chat"]["messages[].content[].type"].note,
        left_out=THOUGHT_PARTS if is_reply else (),
    )


def _read_assistant(
    message: Mapping[str, Any], content: str, where: str, conversation: Conversation
) -> None:
    row = FIELDS["chat"]["messages[].function_call"]
    check_refused(message.get("function_call"), row, field=f"{where}.function_call")
    # A refusal is a text of its own in this API.
    if not content:
        content = read_text(message.get("refusal"), f"{where}.refusal")
    conversation.add_text(content)
    given = message.get("tool_calls")
    if given is not None:
        for place, call in enumerate(require_list(given, f"{where}.tool_calls")):
            read = _read_call(call, f"{where}.tool_calls[{place}]")
            conversation.add_call(read, call_id=call.get("id"))


def _read_call(given: Any, where: str) -> ToolCall:
    call = require_object(given, where)
    read_choice(call.get("type") or "function", f"{where}.type", ("function",))
    function = require_object(call.get("function"), f"{where}.function")
    field = f"{where}.function.arguments"
    arguments = function.get("arguments")
    # Some clients keep arguments as the object that they are.
    read = check_arguments if isinstance(arguments, dict) else read_arguments
    return read_call(function.get("name"), read(arguments, field), f"{where}.function.name")


# Replies


def make_body(reply: ChatReply, request: ChatRequest, parsed: ParsedReply) -> dict[str, Any]:
    """Return the body of a whole reply."""
    calls = [_describe_call(call) for call in parsed.calls]
    # Strict clients take null for content only beside calls.
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if calls and not parsed.content else parsed.content,
        "refusal": None,
    }
    if parsed.reasoning and "reasoning" in request.wants:
        message |= {"reasoning_content": parsed.reasoning, "reasoning": parsed.reasoning}
    if calls:
        message["tool_calls"] = calls
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": tell_end(reply, has_calls=bool(calls)),
        "stop_reason": reply.stop_text,
        **_describe_tokens(reply.tokens, request),
    }
    body = {**_describe_head(reply.start, kind="chat.completion"), "choices": [choice]}
    body["usage"] = describe_openai_usage(reply)
    if "token_ids" in request.wants:
        body["prompt_token_ids"] = reply.prompt_ids.tolist()
    return body


def make_error(error: RequestError) -> tuple[int, dict[str, Any]]:
    """Return status and body of an error."""
    return error.status, {"error": _describe_error(error)}


class ChatStream:
    """Chunks of one reply: `start`, `add` for each piece, then `finish` or `fail`."""

    def __init__(self, request: ChatRequest, *, start: ReplyStart) -> None:
        self._request = request
        self._start = start
        self._head = _describe_head(start, kind="chat.completion.chunk")
        self._num_calls = 0
        self._num_tokens = 0

    def start(self) -> bytes:
        """Return the first chunk, which has the role and vLLM's ids of the prompt."""
        chunk = self._make_chunk({"role": "assistant", "content": ""})
        if "token_ids" in self._request.wants:
            chunk["prompt_token_ids"] = self._start.prompt_ids.tolist()
        return frame_data(chunk)

    def add(self, events: Sequence[ReplyEvent], *, tokens: TokenPiece = NO_TOKENS) -> bytes:
        """Return the chunks of some events, with the tokens that were sampled meanwhile.

        Text is held back while it may be part of a mark, so that tokens and text need not fit.
        """
        # The first chunk has the tokens; without a chunk they get one of their own.
        extras = _describe_tokens(tokens, self._request) if len(tokens.token_ids) else {}
        self._num_tokens += len(tokens.token_ids)
        frames = []
        for delta in self._list_deltas(events):
            frames.append(frame_data(self._make_chunk(delta, **extras)))
            extras = {}
        if extras.get("token_ids") or extras.get("logprobs"):
            frames.append(frame_data(self._make_chunk({}, **extras)))
        return b"".join(frames)

    def finish(self, reply: ChatReply) -> bytes:
        """Return the last chunks: the end with the tokens not told yet, and the usage."""
        tokens = reply.tokens
        rest = TokenPiece(
            token_ids=tokens.token_ids[self._num_tokens :],
            logprobs=tokens.logprobs[self._num_tokens :],
            texts=tokens.texts[self._num_tokens :],
        )
        end = {
            "finish_reason": tell_end(reply, has_calls=self._num_calls > 0),
            "stop_reason": reply.stop_text,
        }
        chunk = self._make_chunk({}, **end, **_describe_tokens(rest, self._request))
        frames = [frame_data(chunk)]
        # The usage has a chunk without choices to itself.
        if "usage" in self._request.wants:
            last = {**self._head, "choices": [], "usage": describe_openai_usage(reply)}
            frames.append(frame_data(last))
        return b"".join([*frames, DONE])

    def fail(self, error: RequestError) -> bytes:
        """Return the end of a stream whose reply has failed."""
        return frame_data({"error": _describe_error(error)}) + DONE

    def _list_deltas(self, events: Sequence[ReplyEvent]) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        for event in select_parts(events, self._request):
            if isinstance(event, ReplyCall):
                # The whole call at once: clients that merge by id would lose later pieces.
                call = {"index": self._num_calls, **_describe_call(event)}
                self._num_calls += 1
                deltas.append({"tool_calls": [call]})
            elif event.kind == "content":
                deltas.append({"content": event.text})
            else:
                deltas.append({"reasoning_content": event.text, "reasoning": event.text})
        return deltas

    def _make_chunk(self, delta: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": None, **more}
        chunk: dict[str, Any] = {**self._head, "choices": [choice]}
        if "usage" in self._request.wants:
            chunk["usage"] = None
        return chunk


def stream_error(error: RequestError, request: ChatRequest) -> bytes:
    """Return the stream of a reply that has failed before its first token."""
    start = ReplyStart(id="", created=0, model=request.model, prompt_ids=NO_IDS)
    return ChatStream(request, start=start).fail(error)


def stream_body(reply: ChatReply, request: ChatRequest, parsed: ParsedReply) -> bytes:
    """Return a whole reply as the stream of it."""
    stream = ChatStream(request, start=reply.start)
    return stream.start() + stream.add(parsed.parts) + stream.finish(reply)


def _describe_head(start: ReplyStart, *, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{start.id}",
        "object": kind,
        "created": start.created,
        "model": start.model,
    }


def _describe_call(call: ReplyCall) -> dict[str, Any]:
    function = {"name": call.call.name, "arguments": write_arguments(call.call)}
    return {"id": call.id, "type": "function", "function": function}


def _describe_tokens(tokens: TokenPiece, request: ChatRequest) -> dict[str, Any]:
    extras: dict[str, Any] = {"logprobs": None}
    if "logprobs" in request.wants:
        extras["logprobs"] = {"content": list_logprobs(tokens, request), "refusal": None}
    if "token_ids" in request.wants:
        extras["token_ids"] = list(tokens.token_ids)
    return extras


def _describe_error(error: RequestError) -> dict[str, Any]:
    return describe_openai_error(
        error.message, status=error.status, field=error.field, code=error.code
    )
