from pathlib import Path

import pytest
import trl
from transformers.utils.chat_template_utils import render_jinja_template

from rl.tools.calculator import Calculator
from rl.tools.calls import BadCall, ToolCall, announce, check_call, describe, parse_calls, render_call
from rl.tools.function_tool import FunctionTool

QWEN3 = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()


def search(query: str, limit: int = 3, sources: list[str] | None = None) -> str:
    """Look für a "query" & <more>.

    Args:
        query: what to look for
        limit: how many
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
    told = call("search", query='für "x"', limit=2)
    function = {"name": told.name, "arguments": dict(told.arguments)}
    conversation = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "user", "content": "!"},
    ]
    assert render_call(told) in rendered(conversation)
    assert parse_calls(render_call(told)) == (told,)


def test_calls_are_read_in_order_with_text_around_them():
    text = (
        'First <tool_call>\n{"name": "calculator", "arguments": {"expression": "1+1"}}\n</tool_call>\n'
        'then <tool_call>{"arguments": {"query": "a"}, "name": "search"}</tool_call> done.'
    )
    assert parse_calls(text) == (call("calculator", expression="1+1"), call("search", query="a"))


def test_end_tag_in_a_string_does_not_end_the_call():
    code = "print('</tool_call><tool_call>')"
    assert parse_calls(render_call(call("python", code=code))) == (call("python", code=code),)


@pytest.mark.parametrize("text", ["", "The answer is 42.", "</tool_call>", "<tool call>{}</tool call>"])
def test_text_without_a_call_has_none(text):
    assert parse_calls(text) == ()


def test_a_call_that_is_thought_of_is_not_made():
    thought, made = render_call(call("a", x=1)), render_call(call("b", x=2))
    assert parse_calls(f"<think>maybe {thought}</think>{made}") == (call("b", x=2),)
    assert parse_calls(f"maybe {thought}</think>{made}") == (call("b", x=2),)
    assert parse_calls(f"<think>maybe {thought}") == ()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('{"name": "a", "arguments": {}', "is not valid JSON"),
        ("{'name': 'a'}", "at character 1 of it"),
        ("", "is not valid JSON"),
        ("[1]", "is a JSON array"),
        ('"a"', "is a JSON string"),
        ("null", "is a JSON value"),
        ('{"name": 3, "arguments": {}}', 'no "name" that is a string'),
        ('{"arguments": {}}', 'no "name" that is a string'),
        ('{"name": "a"}', 'no "arguments" that is an object'),
        ('{"name": "a", "arguments": "{}"}', 'no "arguments" that is an object'),
        ('{"name": "a", "arguments": {}} {"name": "b", "arguments": {}}', "more than one JSON object"),
        ('{"name": "a", "arguments": {"x": NaN}}', "NaN is no JSON number"),
        ('{"name": "a", "arguments": {"x": "\\ud800"}}', "half of a surrogate pair"),
        ('{"name": "a", "arguments": {"x": ' + "[" * 100_000 + "}}", "nested too deeply"),
        ('{"name": "a", "arguments": {"x": ' + "9" * 5000 + "}}", "is not valid JSON"),
    ],
)
def test_malformed_call_becomes_an_error_and_the_next_is_read(body, said):
    bad, good = parse_calls(f"<tool_call>{body}</tool_call> and {render_call(call('b', x=2))}")
    assert isinstance(bad, BadCall)
    assert bad.error.startswith("Error: the tool call ")
    assert said in bad.error
    assert good == call("b", x=2)


def test_call_without_an_end_is_an_error():
    (bad,) = parse_calls('<tool_call>{"name": "a", "arguments": {}}')
    assert isinstance(bad, BadCall)
    assert "has no </tool_call>" in bad.error
    (cut_off,) = parse_calls('<tool_call>{"name": "a", "argu')
    assert isinstance(cut_off, BadCall)
    assert "is not valid JSON" in cut_off.error


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (call("nothing", x=1), "there is no tool 'nothing'; the tools are calculator, search"),
        (call("calculator"), "'expression' is a required property"),
        (call("calculator", expression="1", x=2), "'x' was unexpected"),
        (
            call("calculator", expression=3),
            "arguments['expression'] of calculator: 3 is not of type 'string'",
        ),
        (call("search", query="a", limit="3"), "arguments['limit'] of search: '3' is not of type 'integer'"),
        (call("search", query="a", limit=True), "True is not of type 'integer'"),
        (call("search", query="a", sources=["x", 1]), "arguments['sources'][1]"),
    ],
)
def test_call_that_does_not_fit_a_tool_says_what_is_wrong(told, said):
    found = check_call(told, TOOLS)
    assert isinstance(found, BadCall)
    assert said in found.error


def test_error_quotes_no_more_than_a_little_of_a_long_argument():
    found = check_call(call("calculator", expression=["x" * 10_000]), TOOLS)
    assert isinstance(found, BadCall)
    assert "is not of type 'string'" in found.error
    assert len(found.error) < 300


def test_no_depth_of_nesting_gets_through_as_an_exception():
    """Where the parser stands it and what comes after it does not, too."""
    said = set()
    for depth in range(2, 1200):
        nested = "[" * depth + "]" * depth
        (told,) = parse_calls(
            f'<tool_call>{{"name": "calculator", "arguments": {{"expression": {nested}}}}}</tool_call>'
        )
        found = check_call(told, TOOLS) if isinstance(told, ToolCall) else told
        assert isinstance(found, BadCall)
        said.add("too deeply" if "too deeply" in found.error else "type")
    assert said == {"too deeply", "type"}
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    found = check_call(call("calculator", expression=deep), TOOLS)
    assert found == BadCall(error="Error: arguments of calculator are nested too deeply")


def test_call_that_fits_finds_its_tool():
    assert check_call(call("calculator", expression="1"), TOOLS) is TOOLS[0]
    assert check_call(call("search", query="a", sources=None), TOOLS) is TOOLS[1]
