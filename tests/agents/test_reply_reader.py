"""One parser for whole and streamed replies: content, thoughts and calls."""

import random

import pytest

from rl.agents.dialects.reply_reader import ReplyReader, TextDelta, join_events, read_reply
from rl.agents.types import ReplyCall
from rl.rollouts.replies import MAX_CALLS, split_reply
from rl.types import Message, ToolCall
from tests.support.agent_replies import feed_in_pieces, make_text

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ADD = ToolCall(name="add", arguments={"a": 1})
PLAIN = '{"name": "add", "parameters": {"a": 1}}'


def read(text, *, call_format="hermes", has_tools=True):
    return read_reply(text, call_format=call_format, reply_id="r1", has_tools=has_tools)


def show(text, **options):
    """Return content, reasoning and calls of a reply."""
    parsed = read(text, **options)
    return parsed.content, parsed.reasoning, [call.call for call in parsed.calls]


def feed_by_character(text, *, call_format="hermes", has_tools=True):
    reader = ReplyReader(call_format=call_format, reply_id="r1", has_tools=has_tools)
    events = []
    for character in text:
        events += reader.feed(character)
    return [*events, *reader.finish()]


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "num_calls"),
    [
        ("It is 5.\n", "It is 5.\n", "", 0),
        (" \n", " \n", "", 0),
        ("<think>\nWell.\n</think>\n\nIt is 5.", "It is 5.", "Well.", 0),
        ("<think>\n\n</think>\n\nIt is 5.", "It is 5.", "", 0),
        ("<think>a</think>b<think>c</think>d", "bd", "ac", 0),
        ("<think>a\n</think>\nb\n<think>\nc</think>\nd", "b\n\nd", "a\n\nc", 0),
        ("<think>cut", "", "cut", 0),
        ("<think>cut \n", "", "cut \n", 0),
        (f"Let me see.\n{CALL}", "Let me see.", "", 1),
        (f"{CALL}\n{CALL}", "", "", 2),
        (f"<think>x</think>\n\n{CALL}\n", "", "x", 1),
        # Text after calls is content; white space between two texts stays.
        (f"A\n{CALL}\nB\n", "A\n\nB\n", "", 1),
        (f"{CALL}\nB", "B", "", 1),
        # The end of a thought that nothing opened is text: what was told is not taken back.
        ("a</think>b", "a</think>b", "", 0),
    ],
)
def test_parts_of_a_reply(text, content, reasoning, num_calls):
    assert show(text) == (content, reasoning, [ADD] * num_calls)


@pytest.mark.parametrize(
    "text",
    [
        # Truncated, with every possible end.
        *(CALL[:end] for end in range(1, len(CALL))),
        "<tool_call>{'name': 'add'}</tool_call>",
        '<tool_call>{"name": "add"}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": "{}"}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 1}} and</tool_call>',
        '<tool_call>["add"]</tool_call>',
        "<tool_call></tool_call>",
        # Numbers and characters that JSON text of others cannot carry.
        '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',
        # Marks in a damaged call are its text.
        '<tool_call>{"name": "add", "arguments": {"a": "<think>',
        "<tool_call>{bad <think> }</tool_call>",
        "</tool_call>",
        "<tool",
        "a < b <",
    ],
)
def test_damaged_or_truncated_call_is_content_as_it_was_written(text):
    for whole in (text, f"I call: {text}"):
        assert show(whole) == (whole, "", [])


def test_text_after_a_damaged_call_is_read_on():
    bad = "<tool_call>{bad}</tool_call>"
    assert show(f"{bad}\n{CALL}") == (bad, "", [ADD])
    assert show(f"{bad}<think>x</think>") == (bad, "x", [])


def test_call_inside_a_thought_belongs_to_the_thought():
    assert show(f"<think>I may {CALL} here.</think>5") == ("5", f"I may {CALL} here.", [])
    assert show(f"<think>I may {CALL}") == ("", f"I may {CALL}", [])
    # A mark in its arguments does not end the thought.
    call = '<tool_call>{"name": "add", "arguments": {"a": "</think>"}}</tool_call>'
    assert show(f"<think>{call}</think>5") == ("5", call, [])
    damaged = "<tool_call>{'a': '</think>'}</tool_call>"
    assert show(f"<think>{damaged}, no.</think>5") == ("5", f"{damaged}, no.", [])


def test_marks_in_arguments_are_text():
    for marks in ("</tool_call>", "<think>", "}</think>{", "<tool_call>"):
        text = f'<tool_call>{{"name": "add", "arguments": {{"a": "{marks}"}}}}</tool_call> ok'
        assert show(text) == ("ok", "", [ToolCall(name="add", arguments={"a": marks})])


def test_ids_are_derived_from_the_reply_and_the_number_of_the_call():
    assert [call.id for call in read(CALL + CALL).calls] == ["call_r1_0", "call_r1_1"]
    ids = [event.id for event in feed_by_character(CALL + CALL)]
    assert ids == ["call_r1_0", "call_r1_1"]


@pytest.mark.parametrize("mark", ["<tool_call>", "<think>", "<|begin_of_thought|>"])
def test_text_that_may_be_a_mark_is_held_back_until_it_is_decided(mark):
    reader = ReplyReader(call_format="hermes", reply_id="r1", has_tools=True)
    for character in mark[:-1]:
        assert reader.feed(character) == []
    assert reader.feed("!") == [TextDelta(kind="content", text=f"{mark[:-1]}!")]


def test_text_is_told_at_once_if_it_can_be_no_mark():
    reader = ReplyReader(call_format="hermes", reply_id="r1", has_tools=True)
    assert reader.feed("It is") == [TextDelta(kind="content", text="It is")]
    assert reader.feed(" 5<") == [TextDelta(kind="content", text=" 5")]
    assert reader.finish() == [TextDelta(kind="content", text="<")]


# Faults of other servers


def test_truncated_opening_mark_is_the_same_streamed_and_whole():
    text = "It is sunny.<tool_ca"
    assert join_events(feed_by_character(text)) == read(text).parts
    assert show(text) == (text, "", [])


def test_streamed_call_comes_once_with_name_arguments_and_id_together():
    """Pieces of a call that are merged by id were lost, as only the first piece had one."""
    call = ToolCall(name="summary", arguments={"query": "具体有哪些提升", "n": {"a": [1]}})
    text = '<tool_call>\n{"name": "summary", "arguments": {"query": "具体有哪些提升", "n": '
    events = feed_by_character(text + '{"a": [1]}}}\n</tool_call>')
    assert events == [ReplyCall(id="call_r1_0", call=call)]


def test_call_without_arguments_and_several_closing_braces_at_once_are_complete():
    text = '<tool_call>{"name": "list", "arguments": {}}</tool_call>'
    assert feed_by_character(text) == list(read(text).parts)
    assert read(text).calls[0].call == ToolCall(name="list", arguments={})
    reader = ReplyReader(call_format="hermes", reply_id="r1", has_tools=True)
    assert reader.feed('<tool_call>{"name": "add", "arguments": {"a": 1') == []
    assert reader.feed("}}\n</tool_call>") == [ReplyCall(id="call_r1_0", call=ADD)]


def test_no_part_of_a_call_is_told_as_content_while_the_call_is_written():
    reader = ReplyReader(call_format="hermes", reply_id="r1", has_tools=True)
    for token in (
        "<tool_call>",
        "\n",
        '{"',
        "name",
        '": "',
        "add",
        '", "arguments',
        '": {}}',
        "\n",
    ):
        assert reader.feed(token) == []
    assert len(reader.feed("</tool_call>")) == 1


def test_calls_beyond_the_limit_stay_text():
    parsed = read(CALL * (MAX_CALLS + 1))
    assert len(parsed.calls) == MAX_CALLS
    assert parsed.content == CALL


def test_without_tools_nothing_is_a_call():
    assert show(CALL, has_tools=False) == (CALL, "", [])
    assert show(PLAIN, call_format="llama", has_tools=False) == (PLAIN, "", [])
    assert show("<think>a</think>b", has_tools=False) == ("b", "a", [])


# Llama


@pytest.mark.parametrize(
    ("text", "content", "num_calls"),
    [
        (PLAIN, "", 1),
        (f"\n{PLAIN}\n", "", 1),
        (f"<|python_tag|>{PLAIN}", "", 1),
        (f"{PLAIN}; {PLAIN}\n{PLAIN};", "", 3),
        ('{"name": "add", "arguments": {"a": 1}}', "", 1),
        (f"<think>hm</think>\n{PLAIN}", "", 1),
        (f"I call.<|python_tag|>{PLAIN}", "I call.", 1),
        (f"{PLAIN} I called.", "I called.", 1),
        # An object behind a text is no call, nor is one of another shape.
        (f"I call {PLAIN}", f"I call {PLAIN}", 0),
        ('{"answer": "<think>"}', '{"answer": "<think>"}', 0),
        ('{"name": "add", "parameters": [1]}', '{"name": "add", "parameters": [1]}', 0),
        ("<|python_tag|>print(1)", "<|python_tag|>print(1)", 0),
        (f"{PLAIN}; {{bad}}", "; {bad}", 1),
        *((PLAIN[:end], PLAIN[:end], 0) for end in range(1, len(PLAIN))),
        ("<|python", "<|python", 0),
        ('{"name": "add", "parameters": {"a": "<think>', None, 0),
    ],
)
def test_calls_of_llama(text, content, num_calls):
    told, _, calls = show(text, call_format="llama")
    assert told == (text if content is None else content)
    assert calls == [ADD] * num_calls


def test_unknown_format_of_calls_is_refused():
    with pytest.raises(ValueError, match="call_format='xml' must be one of hermes, llama"):
        read("", call_format="xml")


# The same as the reader of rewards


def expect_of_parts(text):
    """Return content and calls of a reply from the parts that rewards see."""
    content, calls, white, at_mark = "", [], "", False
    # Behind a thought, the end of another one that nothing opened says nothing about what stood
    # before it: without this, that would be the one difference.
    first, *parts = split_reply(f"<think></think>{text}")
    assert first.kind == "thought"
    for part in parts:
        is_call = part.kind == "call" and not part.problem and isinstance(part.value, dict)
        is_call = is_call and isinstance(part.value.get("arguments"), dict)
        is_call = is_call and bool(part.value.get("name"))
        if part.kind == "thought" or is_call:
            at_mark = True
            calls += [part.value] if is_call else []
            continue
        stripped = part.text.strip()
        if not stripped:
            white += part.text
            continue
        start = part.text.index(stripped)
        before = white + part.text[:start]
        content += (before if content or not at_mark else "") + stripped
        white, at_mark = part.text[start + len(stripped) :], False
    return content + ("" if at_mark else white), calls


def test_parts_are_those_that_rewards_see():
    rng = random.Random(3)
    num_calls = 0
    for _ in range(3000):
        text = make_text(rng, "hermes")
        content, calls = expect_of_parts(text)
        parsed = read(text)
        found = [{"name": c.call.name, "arguments": c.call.arguments} for c in parsed.calls]
        assert (parsed.content, found) == (content, calls), text
        num_calls += len(calls)
    assert num_calls > 1000


@pytest.mark.parametrize("call_format", ["hermes", "llama"])
def test_pieces_make_no_difference(call_format):
    rng = random.Random(4)
    for _ in range(2000):
        text = make_text(rng, call_format)
        reader = ReplyReader(call_format=call_format, reply_id="r1", has_tools=True)
        events = []
        for piece in feed_in_pieces(reader, text, rng):
            events += piece
        assert join_events(events) == read(text, call_format=call_format).parts, text


def test_message_of_a_reply_has_its_content_and_calls():
    message = read(f"<think>x</think>A{CALL}").message
    assert message == Message(role="assistant", content="A", calls=(ADD,))
