"""Bodies of the three dialects, read to one request; each error names its field."""

import pytest

from rl.agents.dialects import chat, messages, responses
from rl.agents.types import BadRequestError, ToolSpec
from rl.types import Message, ToolCall
from tests.support.agent_replies import make_request

TOOL = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD = ToolCall(name="add", arguments={"a": 1})
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
USE = {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}}
FUNCTION_CALL = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'}
SAY_HI = Message(role="user", content="hi")


def user(content):
    return Message(role="user", content=content)


def system(content):
    return Message(role="system", content=content)


def assistant(content, *calls):
    return Message(role="assistant", content=content, calls=calls)


def tool(content):
    return Message(role="tool", content=content)


def read_chat(*given):
    return chat.read_request({"messages": list(given)}).messages


def read_responses(*given, **more):
    return responses.read_request({"input": list(given), **more}).messages


def read_messages(*given, **more):
    return messages.read_count_request({"messages": list(given), **more}).messages


def fail(read, *given, **more):
    """Return the field that an error names, which its message does too."""
    with pytest.raises(BadRequestError) as caught:
        read(*given, **more)
    assert caught.value.status == 400
    assert caught.value.field in caught.value.message
    return caught.value.field


# Chat


def test_chat_conversation_is_read():
    assert read_chat(
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "2"}]},
        {"role": "assistant", "content": "It is 2.", "tool_calls": None, "audio": None},
    ) == (system("Be brief."), user("a\nb"), assistant("", ADD), tool("2"), assistant("It is 2."))


@pytest.mark.parametrize("content", [None, "", [], [{"type": "thinking", "thinking": "x"}]])
def test_empty_contents_are_equal(content):
    given = [{"role": "assistant", "content": content, "tool_calls": [CALL]}]
    assert read_chat(*given) == (assistant("", ADD),)
    del given[0]["content"]
    assert read_chat(*given) == (assistant("", ADD),)


def test_parts_of_an_assistant_are_joined_as_they_are():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert read_chat({"role": "assistant", "content": parts}) == (assistant("ab"),)
    assert read_messages({"role": "assistant", "content": parts}) == (assistant("ab"),)


@pytest.mark.parametrize(
    ("arguments", "expected"), [("{}", {}), ("", {}), (None, {}), (' {"a": 1}\n', {"a": 1})]
)
def test_arguments_are_parsed(arguments, expected):
    call = {"function": {"name": "add", "arguments": arguments}}
    (message,) = read_chat({"role": "assistant", "tool_calls": [call]})
    assert message.calls == (ToolCall(name="add", arguments=expected),)


def test_arguments_that_are_an_object_already_are_kept():
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    assert read_chat({"role": "assistant", "tool_calls": [call]}) == (assistant("", ADD),)
    item = {**FUNCTION_CALL, "arguments": {"a": 1}}
    assert read_responses(item) == (assistant("", ADD),)


@pytest.mark.parametrize(
    "arguments",
    [
        "[1]",
        '"a"',
        '{"a": 1',
        '{"a": 1} x',
        "{'a': 1}",
        '{"a": NaN}',
        '{"a": 1e999}',
        '{"a": "\\ud800"}',
        5,
        {"a": float("inf")},
        {"a": "\ud800"},
    ],
)
def test_arguments_that_are_no_json_object_are_an_error(arguments):
    call = {"function": {"name": "add", "arguments": arguments}}
    field = "messages[1].tool_calls[0].function.arguments"
    hi = {"role": "user", "content": "hi"}
    assert fail(read_chat, hi, {"role": "assistant", "tool_calls": [call]}) == field
    item = {**FUNCTION_CALL, "arguments": arguments}
    assert fail(read_responses, hi, item) == "input[1].arguments"


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ("hi", "messages[0]"),
        ({"content": "a"}, "messages[0].role"),
        ({"role": "function", "content": "a"}, "messages[0].role"),
        ({"role": ["user"], "content": "a"}, "messages[0].role"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": "\ud800"}, "messages[0].content"),
        ({"role": "user", "content": ["a"]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"text": "a"}]}, "messages[0].content[0].type"),
        (
            {"role": "user", "content": [{"type": "text", "text": 5}]},
            "messages[0].content[0].text",
        ),
        (
            {"role": "user", "content": [{"type": "text"}, {"type": "input_audio"}]},
            "messages[0].content[1].type",
        ),
        ({"role": "tool", "content": "a", "tool_call_id": 5}, "messages[0].tool_call_id"),
        ({"role": "assistant", "tool_calls": {}}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [5]}, "messages[0].tool_calls[0]"),
        (
            {"role": "assistant", "tool_calls": [{"type": "custom"}]},
            "messages[0].tool_calls[0].type",
        ),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls[0].function"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": ""}}]},
            "messages[0].tool_calls[0].function.name",
        ),
    ],
)
def test_wrong_part_of_a_chat_is_named(message, field):
    assert fail(read_chat, message) == field


def test_conversation_without_messages_is_an_error():
    assert fail(read_chat) == "messages"
    assert fail(read_responses) == "input"
    assert fail(read_responses, instructions="Be brief.") == "input"
    assert fail(read_messages, system="Be brief.") == "messages"
    for module, field in ((chat, "messages"), (responses, "input"), (messages, "messages")):
        assert fail(module.read_request, {}) == field


def test_name_of_a_call_that_the_model_invented_is_read():
    call = {"function": {"name": "no such tool!", "arguments": "{}"}}
    (message,) = read_chat({"role": "assistant", "tool_calls": [call]})
    assert message.calls[0].name == "no such tool!"


# Responses


def test_items_of_a_turn_are_one_message():
    output = [{"type": "output_text", "text": "Let me see.", "annotations": []}]
    assert read_responses(
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": []},
        {"type": "message", "role": "assistant", "id": "msg_1", "content": output},
        FUNCTION_CALL,
        {"type": "reasoning", "id": "rs_2", "summary": []},
        FUNCTION_CALL,
        {"type": "message", "role": "assistant", "content": " More."},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "3"}],
        },
        FUNCTION_CALL,
        instructions="Be brief.",
    ) == (
        system("Be brief."),
        SAY_HI,
        assistant("Let me see. More.", ADD, ADD),
        tool("2"),
        tool("3"),
        assistant("", ADD),
    )


def test_input_may_be_a_text():
    assert make_request("responses", instructions="a").messages == (system("a"), SAY_HI)
    assert make_request("responses", instructions=None).messages == (SAY_HI,)


def test_reasoning_alone_is_no_turn():
    reasoning = {"type": "reasoning", "summary": []}
    assert read_responses({"role": "user", "content": "hi"}, reasoning) == (SAY_HI,)


@pytest.mark.parametrize(
    ("item", "field"),
    [
        (5, "input[0]"),
        ({}, "input[0].type"),
        ({"type": "item_reference", "id": "msg_1"}, "input[0].type"),
        ({"type": "local_shell_call"}, "input[0].type"),
        ({"type": "custom_tool_call", "name": "f", "input": 5}, "input[0].input"),
        ({"type": "message", "content": "a"}, "input[0].role"),
        ({"role": "tool", "content": "a"}, "input[0].role"),
        ({"role": "user", "content": [{"type": "input_file"}]}, "input[0].content[0].type"),
        ({**FUNCTION_CALL, "name": None}, "input[0].name"),
        (
            {"type": "function_call_output", "output": [{"type": "input_image"}]},
            "input[0].output[0].type",
        ),
        ({"type": "function_call_output", "output": 5}, "input[0].output"),
    ],
)
def test_wrong_item_is_named(item, field):
    assert fail(read_responses, item) == field


# Messages


def test_blocks_of_a_conversation_are_read():
    result = {"type": "tool_result", "tool_use_id": "c1"}
    texts = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]
    assert read_messages(
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Let me see."},
                USE,
                USE,
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Go on."},
                {**result, "content": "2"},
                {**result, "content": [{"type": "text", "text": "no"}], "is_error": True},
                result,
                {"type": "text", "text": "Please."},
            ],
        },
        {"role": "assistant", "content": [USE]},
        {"role": "user", "content": [{**result, "content": "3"}]},
        {"role": "system", "content": []},
        system=texts,
    ) == (
        system("Be brief.\nBe kind."),
        SAY_HI,
        assistant("Let me see.", ADD, ADD),
        tool("2"),
        tool("no"),
        tool(""),
        user("Go on.\nPlease."),
        assistant("", ADD),
        tool("3"),
    )


def test_consecutive_messages_of_the_assistant_are_one():
    given = [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": [USE]}]
    assert read_messages(*given) == (assistant("a", ADD),)
    calling = {"role": "assistant", "content": " b", "tool_calls": [CALL]}
    again = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    assert read_chat(given[0], calling, again) == (assistant("a b", ADD, ADD),)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "tool", "content": "a"}, "messages[0].role"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [USE]}, "messages[0].content[0].type"),
        (
            {"role": "user", "content": [{"type": "tool_result", "content": [{"type": "image"}]}]},
            "messages[0].content[0].content[0].type",
        ),
        (
            {"role": "assistant", "content": [{**USE, "input": "{}"}]},
            "messages[0].content[0].input",
        ),
        (
            {"role": "assistant", "content": [{**USE, "input": {"a": float("nan")}}]},
            "messages[0].content[0].input",
        ),
        ({"role": "assistant", "content": [{**USE, "name": 5}]}, "messages[0].content[0].name"),
        (
            {"role": "assistant", "content": [{"type": "server_tool_use"}]},
            "messages[0].content[0].type",
        ),
        ({"role": "system", "content": [{"type": "image"}]}, "messages[0].content[0].type"),
    ],
)
def test_wrong_block_is_named(message, field):
    assert fail(read_messages, message) == field


def test_request_for_a_reply_needs_a_limit_and_a_question():
    assert fail(make_request, "messages", max_tokens=None) == "max_tokens"
    given = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "It"}]
    assert fail(make_request, "messages", messages=given) == "messages[1].role"


def test_count_needs_no_limit():
    body = {"messages": [{"role": "user", "content": "hi"}], "model": "m"}
    assert messages.read_count_request(body).messages == (SAY_HI,)
    assert messages.make_count(7) == {"input_tokens": 7}


@pytest.mark.parametrize(
    ("thinking", "is_told"),
    [
        (None, False),
        ({"type": "disabled"}, False),
        ({"type": "enabled", "budget_tokens": 2000}, True),
        ({"type": "adaptive"}, True),
    ],
)
def test_thoughts_are_told_to_clients_that_turned_thinking_on(thinking, is_told):
    wants = make_request("messages", thinking=thinking).wants
    assert wants == ({"reasoning"} if is_told else frozenset())


def test_unknown_kind_of_thinking_is_an_error():
    assert fail(make_request, "messages", thinking={"type": "deep"}) == "thinking.type"


# Tools

WRAP = {
    "chat": lambda tool: {"type": "function", "function": tool},
    "responses": lambda tool: {"type": "function", **tool},
    "messages": lambda tool: tool,
}
PATHS = {"chat": "tools[1].function", "responses": "tools[1]", "messages": "tools[1]"}
SCHEMA = {"chat": "parameters", "responses": "parameters", "messages": "input_schema"}


def make_tools(dialect, *tools):
    wrapped = []
    for given in tools:
        given = dict(given)
        if "schema" in given:
            given[SCHEMA[dialect]] = given.pop("schema")
        wrapped.append(WRAP[dialect](given))
    return wrapped


@pytest.mark.parametrize("dialect", WRAP)
def test_tools_are_read(dialect):
    tools = make_tools(
        dialect,
        {"name": "add", "description": "Adds.", "schema": TOOL},
        {"name": "now", "description": None},
        {"name": "get", "schema": {"properties": {}}},
    )
    nothing = {"type": "object", "properties": {}}
    assert make_request(dialect, tools=tools).tools == (
        ToolSpec(name="add", description="Adds.", parameters=TOOL),
        ToolSpec(name="now", parameters=nothing),
        ToolSpec(name="get", parameters=nothing),
    )
    assert make_request(dialect, tools=None).tools == ()


@pytest.mark.parametrize("dialect", WRAP)
@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({"schema": TOOL}, "name"),
        ({"name": "a b"}, "name"),
        ({"name": "a" * 65}, "name"),
        ({"name": "add"}, "name"),
        ({"name": "f", "description": 5}, "description"),
        ({"name": "f", "schema": "object"}, "schema"),
        ({"name": "f", "schema": {"type": "object", "properties": 5}}, "schema"),
        ({"name": "f", "schema": {"type": "array"}}, "schema.type"),
        ({"name": "f", "schema": {"type": "object", "title": "\ud800"}}, "schema"),
        ({"name": "f", "schema": {"type": "object", "default": float("nan")}}, "schema"),
    ],
)
def test_wrong_tool_is_named(dialect, given, where):
    tools = make_tools(dialect, {"name": "add"}, given)
    where = where.replace("schema", SCHEMA[dialect])
    assert fail(make_request, dialect, tools=tools) == f"{PATHS[dialect]}.{where}"


@pytest.mark.parametrize(
    ("dialect", "kind"),
    [
        ("chat", "custom"),
        ("responses", "web_search"),
        ("responses", "mcp"),
        ("responses", None),
        ("messages", "bash_20250124"),
    ],
)
def test_hosted_tool_is_an_error(dialect, kind):
    assert fail(make_request, dialect, tools=[{"type": kind, "name": "f"}]) == "tools[0].type"


ALLOWED = [{"type": "function", "name": "f"}]


@pytest.mark.parametrize(
    ("dialect", "choice", "requires", "allows"),
    [
        *((dialect, None, False, True) for dialect in WRAP),
        ("chat", "auto", False, True),
        ("chat", "required", True, True),
        ("chat", "none", False, False),
        (
            "chat",
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": ALLOWED}},
            True,
            True,
        ),
        ("responses", "required", True, True),
        ("responses", "none", False, False),
        ("responses", {"type": "allowed_tools", "mode": "auto", "tools": ALLOWED}, False, True),
        ("messages", {"type": "any"}, True, True),
        ("messages", {"type": "none"}, False, False),
        ("messages", {"type": "auto"}, False, True),
    ],
)
def test_choice_of_tools_is_recorded(dialect, choice, requires, allows):
    tools = make_tools(dialect, {"name": "f"})
    request = make_request(dialect, tool_choice=choice, tools=tools)
    assert (request.requires_call, request.allows_calls) == (requires, allows)
    # Another announcement would be another prompt: the tools stay.
    assert len(request.tools) == 1
    assert request.has_tools == allows


@pytest.mark.parametrize(
    ("dialect", "choice", "field"),
    [
        ("chat", "any", "tool_choice"),
        ("chat", {"type": "function", "function": {"name": "f"}}, "tool_choice.function.name"),
        ("chat", {"type": "custom"}, "tool_choice.function.name"),
        ("chat", {"type": "allowed_tools"}, "tool_choice.allowed_tools"),
        ("responses", {"type": "function", "name": "f"}, "tool_choice.name"),
        ("responses", {"type": "web_search"}, "tool_choice.name"),
        ("messages", {"type": "tool", "name": "f"}, "tool_choice.name"),
        ("messages", "auto", "tool_choice"),
        ("messages", {"type": "required"}, "tool_choice.type"),
    ],
)
def test_wrong_choice_of_tools_is_named(dialect, choice, field):
    assert fail(make_request, dialect, tool_choice=choice) == field


# Other fields


def test_limits_of_tokens():
    assert make_request("chat").max_tokens is None
    assert make_request("chat", max_tokens=5).max_tokens == 5
    assert make_request("chat", max_completion_tokens=5).max_tokens == 5
    assert make_request("chat", max_completion_tokens=5, max_tokens=3).max_tokens == 3
    assert make_request("responses", max_output_tokens=5).max_tokens == 5
    for value in (0, -1, 1.0, True, "5"):
        assert fail(make_request, "chat", max_completion_tokens=value) == "max_completion_tokens"
        assert fail(make_request, "responses", max_output_tokens=value) == "max_output_tokens"
        assert fail(make_request, "messages", max_tokens=value) == "max_tokens"


@pytest.mark.parametrize(("dialect", "name"), [("chat", "stop"), ("messages", "stop_sequences")])
def test_stop_texts(dialect, name):
    assert make_request(dialect, **{name: ["a", "b"]}).stop == ("a", "b")
    assert make_request(dialect, **{name: "a"}).stop == ("a",)
    assert make_request(dialect, **{name: []}).stop == ()
    assert fail(make_request, dialect, **{name: ["a", ""]}) == f"{name}[1]"
    assert fail(make_request, dialect, **{name: ["a", 5]}) == f"{name}[1]"
    assert fail(make_request, dialect, **{name: ""}) == name
    assert fail(make_request, dialect, **{name: {"a": 1}}) == name
    assert fail(make_request, dialect, **{name: ["a"] * 65}) == name


def test_extras_of_chat():
    request = make_request(
        "chat",
        logprobs=True,
        top_logprobs=3,
        return_token_ids=True,
        include_reasoning=False,
        stream=True,
        stream_options={"include_usage": True},
        model="m",
    )
    assert request.wants == {"logprobs", "token_ids", "usage"}
    assert (request.top_logprobs, request.is_streamed, request.model) == (3, True, "m")
    assert make_request("chat").wants == {"reasoning"}
    for value in (21, -1, True):
        assert fail(make_request, "chat", top_logprobs=value) == "top_logprobs"
