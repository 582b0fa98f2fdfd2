"""The table of request fields: each field does what its class says, and errors name their field."""

from dataclasses import replace
from typing import Any

import pytest

from rl.agents.dialects.fields import FIELDS, HOSTED_TOOLS, Bounds
from rl.agents.types import BadRequestError
from tests.support.agent_replies import ASKS, DIALECTS, make_request
from tools import agent_fields

TOOL = {"type": "object", "properties": {}}
TOOLS: dict[str, dict[str, Any]] = {
    "chat": {"type": "function", "function": {"name": "f", "parameters": TOOL}},
    "responses": {"type": "function", "name": "f", "parameters": TOOL},
    "messages": {"name": "f", "input_schema": TOOL},
}
CACHE = {"cache_control": {"type": "ephemeral"}}
PART = {"type": "text", "text": "hi", **CACHE}
CALL = {"name": "f", "arguments": "{}"}


def list_rows(kind, *, is_nested):
    rows = []
    for dialect, fields in FIELDS.items():
        for name, row in fields.items():
            if row.kind == kind and ("." in name) == is_nested:
                rows.append(pytest.param(dialect, row, id=f"{dialect}-{name}"))
    return rows


def fail(dialect, **more):
    """Return the field that an error names, which its message does too."""
    with pytest.raises(BadRequestError) as caught:
        make_request(dialect, **more)
    assert caught.value.status == 400
    assert caught.value.field in caught.value.message
    return caught.value.field


@pytest.mark.parametrize(("dialect", "row"), list_rows("asked", is_nested=False))
def test_asked_field_is_recorded_within_its_bounds(dialect, row):
    values = {"number": 1, "integer": 1, "integers": [1], "object": {"a": 1}, "boolean": True}
    value = values[row.bounds.type]
    assert make_request(dialect, **{row.name: value}).asked == {row.name: value}
    assert make_request(dialect, **{row.name: None}).asked == {}
    assert fail(dialect, **{row.name: "1"}) == row.name


@pytest.mark.parametrize(
    ("bounds", "right", "wrong"),
    [
        (Bounds(low=0, high=2), (0, 2, 0.5), (-0.1, 2.1, True, "1", float("nan"), None)),
        (Bounds(), (1e300, -3), (float("inf"),)),
        (Bounds(type="integer", low=-1), (-1, 10**30), (-2, 1.0, False)),
        (Bounds(type="integers"), ([], [1]), ([True], ["1"], (1,), 1)),
        (Bounds(type="object"), ({},), ([], "a")),
        (Bounds(type="boolean"), (True, False), (0, "true")),
    ],
)
def test_bounds_hold_only_what_they_describe(bounds, right, wrong):
    assert all(bounds.hold(value) for value in right)
    assert not any(bounds.hold(value) for value in wrong)


@pytest.mark.parametrize(("dialect", "row"), list_rows("harmless", is_nested=False))
def test_harmless_field_is_accepted_and_counted(dialect, row):
    expected = replace(make_request(dialect), harmless=(row.name,))
    assert make_request(dialect, **{row.name: {}}) == expected
    assert make_request(dialect, **{row.name: None}).harmless == ()


@pytest.mark.parametrize(("dialect", "row"), list_rows("refused", is_nested=False))
def test_refused_field_is_an_error_that_names_it(dialect, row):
    assert fail(dialect, **{row.name: {"x": [1]}}) == row.name
    for neutral in (None, *row.neutral):
        assert make_request(dialect, **{row.name: neutral}) == make_request(dialect)


@pytest.mark.parametrize(("dialect", "row"), list_rows("used", is_nested=False))
def test_used_field_of_a_wrong_type_is_an_error_that_names_it(dialect, row):
    assert fail(dialect, **{row.name: 0.5}).partition(".")[0] == row.name


NESTED: dict[tuple[str, str], dict[str, Any]] = {
    ("chat", "stream_options.include_usage"): {"stream_options": {"include_usage": "yes"}},
    ("chat", "stream_options.include_obfuscation"): {"stream_options": {"include_obfuscation": 1}},
    ("chat", "stream_options.continuous_usage_stats"): {
        "stream_options": {"continuous_usage_stats": True}
    },
    ("chat", "messages[].name"): {"messages": [{"role": "user", "content": "a", "name": "b"}]},
    ("chat", "messages[].reasoning"): {"messages": [{"role": "assistant", "reasoning": "b"}]},
    ("chat", "messages[].reasoning_content"): {
        "messages": [{"role": "assistant", "reasoning_content": "b"}]
    },
    ("chat", "messages[].content[].cache_control"): {
        "messages": [{"role": "user", "content": [PART]}]
    },
    ("chat", "messages[].function_call"): {
        "messages": [{"role": "assistant", "function_call": CALL}]
    },
    ("chat", "messages[].content[].type"): {
        "messages": [{"role": "user", "content": [{"type": "image_url"}]}]
    },
    ("chat", "tool_choice.name"): {"tool_choice": {"type": "function", "function": {"name": "f"}}},
    ("responses", "stream_options.include_obfuscation"): {
        "stream_options": {"include_obfuscation": True}
    },
    ("responses", "text.verbosity"): {"text": {"verbosity": "low"}},
    ("responses", "text.format"): {"text": {"format": {"type": "json_object"}}},
    ("responses", "input[].type"): {"input": [{"type": "web_search_call"}]},
    ("responses", "input[].content[].type"): {
        "input": [{"role": "user", "content": [{"type": "input_image"}]}]
    },
    ("responses", "tool_choice.name"): {"tool_choice": {"type": "function", "name": "f"}},
    ("messages", "system[].x-anthropic-billing-header"): {
        "system": [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}]
    },
    ("messages", "output_config.effort"): {"output_config": {"effort": "low"}},
    ("messages", "output_config.format"): {"output_config": {"format": {"type": "json_schema"}}},
    ("messages", "tool_choice.disable_parallel_tool_use"): {
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}
    },
    ("messages", "tool_choice.name"): {"tool_choice": {"type": "tool", "name": "f"}},
    ("messages", "system[].cache_control"): {"system": [PART]},
    ("messages", "messages[].content[].cache_control"): {
        "messages": [{"role": "user", "content": [PART]}]
    },
    ("messages", "messages[].content[].is_error"): {
        "messages": [
            {"role": "user", "content": [{"type": "tool_result", "is_error": True, "content": "x"}]}
        ]
    },
    ("messages", "messages[].content[].type"): {
        "messages": [{"role": "user", "content": [{"type": "document"}]}]
    },
}
"""Bodies with one nested field each."""
FIELD_OF = {
    ("chat", "messages[].function_call"): "messages[0].function_call",
    ("chat", "messages[].content[].type"): "messages[0].content[0].type",
    ("chat", "tool_choice.name"): "tool_choice.function.name",
    ("responses", "input[].type"): "input[0].type",
    ("responses", "input[].content[].type"): "input[0].content[0].type",
    ("messages", "messages[].content[].type"): "messages[0].content[0].type",
}
"""Fields that errors name where the table has another name."""
for _dialect, _tool in TOOLS.items():
    for _name in ("strict", "defer_loading", "cache_control"):
        NESTED[_dialect, f"tools[].{_name}"] = {"tools": [{**_tool, _name: True}]}
    NESTED[_dialect, "tools[].type"] = {"tools": [{"type": "web_search", "name": "f"}]}
    FIELD_OF[_dialect, "tools[].type"] = "tools[0].type"
for _kind in HOSTED_TOOLS:
    NESTED["responses", f"tools[].type={_kind}"] = {
        "tools": [{"type": _kind, "name": "g"}, TOOLS["responses"]]
    }
NESTED["responses", "tools[].type=namespace"] = {"tools": [{"type": "namespace", "tools": [{}]}]}
FIELD_OF["responses", "tools[].type=namespace"] = "tools[0].tools[0].type"
NESTED["responses", "tools[].type=custom"] = {"tools": [{"type": "custom", "name": "a b"}]}
FIELD_OF["responses", "tools[].type=custom"] = "tools[0].name"
for _dialect in ("tokens", "completions"):
    NESTED[_dialect, "stream_options.include_usage"] = {"stream_options": {"include_usage": "yes"}}
NESTED["completions", "stream_options.include_obfuscation"] = {
    "stream_options": {"include_obfuscation": True}
}
for _name in FIELDS["tokens"]:
    _outer, _, _inner = _name.partition(".")
    if _outer == "sampling_params" and _inner:
        NESTED["tokens", _name] = {_outer: {_inner: {"x": [1]}}}


@pytest.mark.parametrize(
    ("dialect", "row"),
    [
        *list_rows("used", is_nested=True),
        *list_rows("harmless", is_nested=True),
        *list_rows("refused", is_nested=True),
    ],
)
def test_nested_field_does_what_its_class_says(dialect, row):
    more = NESTED[dialect, row.name]
    if row.kind == "harmless":
        harmless = set(make_request(dialect, **more).harmless) - {"stream_options"}
        expected = set() if row.name.startswith("stream_options") else {row.name}
        assert harmless == expected
    else:
        assert fail(dialect, **more) == FIELD_OF.get((dialect, row.name), row.name)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_unknown_field_is_an_error_that_names_it_and_the_nearest(dialect):
    with pytest.raises(BadRequestError, match=r"temprature is not a known field .* temperature\?"):
        make_request(dialect, temprature=1)
    assert fail(dialect, x="1") == "x"
    # Neither the length of a name nor half a character in it breaks the answer.
    with pytest.raises(BadRequestError) as caught:
        make_request(dialect, **{"\ud800" * 5000: 1})
    assert len(caught.value.message.encode()) < 200


def test_unknown_field_of_an_object_with_several_classes_is_refused():
    assert fail("responses", text={"forma": {}}) == "text.forma"
    assert fail("messages", output_config={"x": 1}) == "output_config.x"
    assert fail("responses", text="low") == "text"


def test_sampling_of_a_prompt_of_tokens_is_recorded_by_its_usual_names():
    request = make_request("tokens", sampling_params={"temperature": 0.5, "top_k": 3, "seed": None})
    assert request.asked == {"temperature": 0.5, "top_k": 3}
    assert fail("tokens", sampling_params={"temperature": 9}) == "sampling_params.temperature"
    assert fail("tokens", sampling_params={"temprature": 1}) == "sampling_params.temprature"


def test_true_is_not_the_number_one():
    assert fail("chat", n=True) == "n"


@pytest.mark.parametrize("body", [None, [], "text"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_body_that_is_no_object_is_an_error(dialect, body):
    with pytest.raises(BadRequestError, match=r"body=.* must be an object"):
        DIALECTS[dialect].read_request(body)


def test_smallest_requests_are_complete():
    for dialect in ASKS:
        request = make_request(dialect)
        assert [message.content for message in request.messages] == ["hi"]
        assert (request.harmless, dict(request.asked)) == ((), {})


def test_page_of_fields_is_up_to_date():
    assert agent_fields.PAGE.read_text() == agent_fields.page(), "run make docs"
