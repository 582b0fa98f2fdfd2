import asyncio
import threading
from typing import Literal

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from rl.tools.calculator import Calculator
from rl.tools.tool import (
    BadCall,
    FunctionTool,
    ToolError,
    ToolTimeoutError,
    announce,
    check_tools,
    describe,
    find_tool,
    parse_calls,
    render_call,
)
from rl.types import ToolCall
from tests.support.chat_templates import TEMPLATES

QWEN3 = (TEMPLATES / "qwen3.jinja").read_text()


def search(query: str, limit: int = 3, sources: list[str] | None = None) -> str:
    """Look für a "query" & <more>.

    Args:
        query: what to look for
        limit: how many
        sources: where
    """
    return f"{query} {limit} {sources}"


TOOLS = (Calculator(), FunctionTool(search))


def call(name, **arguments):
    return ToolCall(name=name, arguments=arguments)


def rendered(messages, tools=None):
    (text,), _ = render_jinja_template([messages], tools=tools, chat_template=QWEN3)
    return text


@pytest.mark.parametrize("system", ["", "Be brief.\n\nVery."])
def test_announcement_is_word_for_word_that_of_qwen3s_template(system):
    user = {"role": "user", "content": "What is 6 times 7?"}
    theirs = rendered(
        [{"role": "system", "content": system}, user] if system else [user],
        tools=[describe(tool) for tool in TOOLS],
    )
    assert rendered([{"role": "system", "content": announce(TOOLS, system)}, user]) == theirs
    assert '"name": "calculator"' in theirs


def test_rendered_call_is_word_for_word_that_of_qwen3s_template():
    made = call("search", query='für "x"', limit=2)
    function = {"name": made.name, "arguments": dict(made.arguments)}
    conversation = [
        {"role": "user", "content": "?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": function}],
        },
        {"role": "user", "content": "!"},
    ]
    assert render_call(made) in rendered(conversation)
    assert parse_calls(render_call(made)) == (made,)


def test_calls_are_read_in_order_with_text_around_them():
    text = (
        'First <tool_call>\n{"name": "calculator", "arguments": {"expression": '
        '"1+1"}}\n</tool_call>\nthen <tool_call>{"arguments": {"query": "a"}, "name": '
        '"search"}</tool_call> done.'
    )
    assert parse_calls(text) == (call("calculator", expression="1+1"), call("search", query="a"))
    code = call("python", code="print('</tool_call><tool_call>')")
    assert parse_calls(render_call(code)) == (code,)
    for text in ("", "The answer is 42.", "</tool_call>", "<tool call>{}</tool call>"):
        assert parse_calls(text) == ()


def test_call_that_is_thought_of_is_not_made():
    thought, made = render_call(call("a", x=1)), render_call(call("b", x=2))
    assert parse_calls(f"<think>maybe {thought}</think>{made}") == (call("b", x=2),)
    assert parse_calls(f"maybe {thought}</think>{made}") == (call("b", x=2),)
    assert parse_calls(f"<think>maybe {thought}") == ()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('{"name": "a", "arguments": {}', "is not valid JSON"),
        ("{'name': 'a'}", "is not valid JSON"),
        ("", "is not valid JSON"),
        ("[1]", 'is not an object with a string "name"'),
        ('{"name": 3, "arguments": {}}', 'is not an object with a string "name"'),
        ('{"name": "a", "arguments": "{}"}', 'an object "arguments"'),
        ('{"name": "a", "arguments": {}} {"name": "b", "arguments": {}}', "after one JSON object"),
        ('{"name": "a", "arguments": {"x": NaN}}', "NaN is not a JSON number"),
        ('{"name": "a", "arguments": {"x": "\\ud800"}}', "surrogates not allowed"),
        ('{"name": "a", "arguments": {"x": ' + "[" * 100_000 + "}}", "recursion"),
        ('{"name": "a", "arguments": {"x": ' + "9" * 5000 + "}}", "is not valid JSON"),
    ],
)
def test_malformed_call_becomes_an_error_and_the_next_is_read(body, message):
    bad, good = parse_calls(f"<tool_call>{body}</tool_call> and {render_call(call('b', x=2))}")
    assert isinstance(bad, BadCall)
    assert bad.error.startswith("Error: the tool call ")
    assert message in bad.error
    assert good == call("b", x=2)
    (unended,) = parse_calls(f"<tool_call>{body}")
    assert isinstance(unended, BadCall)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (call("nothing", x=1), "there is no tool 'nothing'; the tools are calculator, search"),
        (call("calculator"), "'expression' is a required property"),
        (call("calculator", expression="1", x=2), "'x' was unexpected"),
        (
            call("calculator", expression=3),
            "arguments['expression'] of calculator: 3 is not of type 'str",
        ),
        (
            call("search", query="a", limit="3"),
            "arguments['limit'] of search: '3' is not of type 'integer'",
        ),
        (call("calculator", expression=["x" * 10_000]), "is not of type 'string'"),
        (call("search", query="a", limit=True), "True is not of type 'integer'"),
        (call("search", query="a", sources=["x", 1]), "arguments['sources'][1]"),
    ],
)
def test_call_that_does_not_fit_a_tool_is_refused(made, message):
    assert find_tool(call("search", query="a", sources=["b"]), TOOLS) is TOOLS[1]
    with pytest.raises(ToolError) as caught:
        find_tool(made, TOOLS)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 300


# Tools from functions


def convert(value: float, to: Literal["m", "ft"], digits: int = 2, *, exact: bool = False) -> str:
    """Convert a length
    between units.

    Of any size.

    Args:
        value: the length,
            in the other unit
        to: the unit wanted
        digits: after the point
        exact: unused
    """
    return f"{value} {to} {digits!r} {exact}"


def run(function, time_limit_s=10.0, **arguments):
    return asyncio.run(FunctionTool(function, time_limit_s=time_limit_s).call(arguments))


def test_schema_is_that_of_signature_and_docstring():
    tool = FunctionTool(convert)
    assert (tool.name, tool.description) == (
        "convert",
        "Convert a length\nbetween units.\n\nOf any size.",
    )
    assert tool.parameters["properties"]["value"] == {
        "type": "number", "description": "the length, in the other unit",
    }  # fmt: skip
    assert tool.parameters["properties"]["to"]["enum"] == ["m", "ft"]
    assert (tool.parameters["required"], tool.parameters["additionalProperties"]) == (
        ["value", "to"],
        False,
    )
    # Whole numbers arrive as integers.
    assert run(convert, value=2.5, to="m", digits=3.0) == "2.5 m 3 False"
    with pytest.raises(ValueError, match="time_limit_s=0 is not above 0"):
        FunctionTool(convert, time_limit_s=0)


def test_function_without_a_schema_is_refused_by_name():
    def no_annotation(x):
        """Says.

        Args:
            x: a thing
        """

    def undescribed(x: int) -> str:
        """Says."""
        return str(x)

    for function in (no_annotation, undescribed):
        with pytest.raises(ValueError, match=f"the function {function.__name__}: "):
            FunctionTool(function)


@pytest.mark.parametrize(("result", "text"), [({"é": [1, None]}, '{"é": [1, null]}'), ({1}, "{1}")])
def test_result_other_than_text_is_json(result, text):
    def thing() -> object:
        """A thing."""
        return result

    assert run(thing) == text


@pytest.mark.parametrize(
    "error", [KeyError("k"), TimeoutError("its own"), StopIteration("s"), SystemExit(3)]
)
def test_error_of_a_function_is_a_tool_error(error):
    def fail() -> str:
        """Fails."""
        raise error

    with pytest.raises(ToolError, match=f"^Error: .*{type(error).__name__}: {error}") as caught:
        run(fail)
    assert not isinstance(caught.value, ToolTimeoutError)


def test_function_that_blocks_fails_at_its_time_limit_without_blocking_the_loop():
    release = threading.Event()

    def block() -> str:
        """Blocks."""
        release.wait()
        return "late"

    async def both():
        blocked = asyncio.create_task(FunctionTool(block, time_limit_s=0.2).call({}))
        assert await FunctionTool(convert).call({"value": 1, "to": "m"}) == "1 m 2 False"
        with pytest.raises(ToolTimeoutError, match=r"block took longer than 0.2 s"):
            await blocked

    asyncio.run(both())
    release.set()


def named(name, parameters=None):
    tool = FunctionTool(convert, name=name)
    tool.parameters = tool.parameters if parameters is None else parameters
    return tool


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([named("two words")], "tool name 'two words': must be 1 to 64 letters"),
        ([named("a"), named("b"), named("a")], r"tool name 'a': .* differ from the others"),
        ([named("a", {"type": "objekt"})], "parameters of the tool 'a' are not a JSON schema"),
        ([named("a", {"type": "string"})], "must have the type 'object'"),
    ],
)
def test_invalid_tools_are_refused(tools, message):
    with pytest.raises(ValueError, match=message):
        check_tools(tools)
