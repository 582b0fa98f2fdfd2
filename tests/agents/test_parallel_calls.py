"""Results of parallel calls: read in the order of the calls, whichever was ready first."""

import pytest

from rl.types import Message, ToolCall
from tests.support.agent_replies import make_request

ADD = ToolCall(name="add", arguments={})
CALL = {"function": {"name": "add"}}
USE = {"type": "tool_use", "name": "add"}
FUNCTION_CALL = {"type": "function_call", "name": "add"}
OUTPUT = {"type": "function_call_output"}
SAY_HI = {"role": "user", "content": "hi"}


def assistant(content, *calls):
    return Message(role="assistant", content=content, calls=calls)


def make_history(dialect, calls, results):
    """Return calls and results in a dialect; both are lists of ids, and a result is its own id."""
    if dialect == "chat":
        given = [{"role": "assistant", "tool_calls": [{**CALL, "id": each} for each in calls]}]
        for each in results:
            given.append({"role": "tool", "tool_call_id": each, "content": each})
        return given
    if dialect == "responses":
        items = [{**FUNCTION_CALL, "call_id": each} for each in calls]
        return items + [{**OUTPUT, "call_id": each, "output": each} for each in results]
    blocks = [{"type": "tool_result", "tool_use_id": each, "content": each} for each in results]
    return [
        {"role": "assistant", "content": [{**USE, "id": each} for each in calls]},
        # Some clients send each in a message of its own.
        {"role": "user", "content": blocks[:1]},
        {"role": "user", "content": blocks[1:]},
    ]


def read(dialect, *given):
    field = "input" if dialect == "responses" else "messages"
    first, *others = make_request(dialect, **{field: [SAY_HI, *given]}).messages
    assert first == Message(role="user", content="hi")
    return others


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
@pytest.mark.parametrize(
    ("calls", "results", "expected"),
    [
        ("ab", "ba", ["a", "b"]),
        ("ab", "ab", ["a", "b"]),
        ("abc", "cab", ["a", "b", "c"]),
        ("abc", "cb", ["b", "c"]),
        # Ids that do not say it: unknown ones, missing ones, and equal ones.
        ("ab", "bax", ["b", "a", "x"]),
        ("ab", ["b", None], ["b", ""]),
        (["a", None], "ba", ["b", "a"]),
        (["b", 5, "a"], "ab", ["a", "b"]),
        ("baa", "ab", ["a", "b"]),
    ],
)
def test_results_of_parallel_calls_have_the_order_of_the_calls(dialect, calls, results, expected):
    reply, *told = read(dialect, *make_history(dialect, calls, results))
    assert reply == assistant("", *[ADD] * len(calls))
    assert told == [Message(role="tool", content=content) for content in expected]


def test_results_are_those_of_the_last_turn():
    say = {"role": "assistant", "content": "Well."}
    calls = [*make_history("chat", "a", ""), *make_history("chat", "b", "ba")]
    after = make_history("chat", "", "ba")[1:]
    assert [m.content for m in read("chat", *calls, say, *after)] == ["", "a", "b", "Well.", *"ba"]
