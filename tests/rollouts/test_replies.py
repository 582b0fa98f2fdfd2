"""The parts of a reply: where thoughts end, what is a call, and what is the answer."""

import pytest

from rl.rollouts.replies import (
    CALL_CLOSE,
    CALL_OPEN,
    THOUGHT_MARKS,
    answer_part,
    continue_thought,
    find_opened_thought,
    is_thought_open,
    split_reply,
)
from rl.tools.tool import BadCall, parse_calls, render_call
from rl.types import ToolCall


def write(text):
    """Return a call that writes a text into a file."""
    return ToolCall(name="write", arguments={"text": text})


def made(text):
    return render_call(write(text))


MARKS = [
    "</think>",
    "<think>",
    "<think>hm</think>",
    "a </think> b <think> c",
    "</tool_call></think>",
    "[THINK]",
]


@pytest.mark.parametrize("marks", MARKS)
@pytest.mark.parametrize(
    "before", ["", "I write. ", "<think>I may.</think>", f"<think>No {made('</think>')}</think>"]
)
def test_marks_of_thoughts_in_arguments_are_text(marks, before):
    text = f"{before}{made(marks)} Done: {made('x')}"
    assert parse_calls(text) == (write(marks), write("x"))
    said = before if before == "I write. " else ""
    assert answer_part(text) == f"{said}{made(marks)} Done: {made('x')}"
    assert not is_thought_open(text)


def test_thought_ends_at_the_first_mark_that_is_not_inside_a_call():
    thought = f"One {made('</think>')} two"
    for opening in ("<think>", ""):
        parts = split_reply(f"{opening}{thought}</think>It is </think> 5.")
        assert [(part.kind, part.text) for part in parts] == [
            ("thought", thought),
            ("text", "It is </think> 5."),
        ]


@pytest.mark.parametrize(
    ("text", "calls", "answer"),
    [
        # Damaged calls are shown to the model, whatever stands in them.
        (f'{CALL_OPEN}{{"name": "a", "arguments": {{"x": "\\</think>"}}}}{CALL_CLOSE}', 1, None),
        (f'{CALL_OPEN}{{"name": "a", "arguments": {{"x": "print(\'</think>', 1, None),
        (f'<think>so</think>{CALL_OPEN}"</think>', 1, f'{CALL_OPEN}"</think>'),
        # A thought may speak of the mark without making a call.
        (f"<think>I use {CALL_OPEN} now.</think>{made('x')}", 1, made("x")),
        (f"I use {CALL_OPEN} now.</think>{made('x')}", 1, made("x")),
        (f'<think>{CALL_OPEN}{{"name": ...}} is it.</think>{made("x")}', 1, made("x")),
        (f'{CALL_OPEN}{{"name": ...}} is it.</think>{made("x")}', 1, made("x")),
        (f"<think>{CALL_OPEN}{{'a': '</think>'}}{CALL_CLOSE}, no.</think>5", 0, "5"),
        (f"maybe {made('x')}</think>5", 0, "5"),
        # A thought that is cut off holds neither calls nor an answer.
        (f"<think>maybe {made('x')}", 0, ""),
        (f"<think>maybe {made('</think>')}", 0, ""),
        # Several thoughts, of which the last may be cut off.
        (f"<think>a</think>{made('x')}<think>b</think>{made('y')}5", 2, f"{made('y')}5"),
        ("<think>a</think>5<think>or 6", 0, ""),
        ("<think><think>a</think>5", 0, "5"),
    ],
)
def test_calls_and_answer_stand_outside_of_thoughts(text, calls, answer):
    assert len(parse_calls(text)) == calls
    assert answer_part(text) == (text if answer is None else answer)


def test_damaged_call_is_an_error_and_not_a_missing_call():
    text = f'{CALL_OPEN}{{"name": "a", "arguments": {{"x": \'</think>\'}}}}{CALL_CLOSE}{made("y")}'
    bad, good = parse_calls(text)
    assert isinstance(bad, BadCall)
    assert "not valid JSON" in bad.error
    assert good == write("y")
    (bad,) = parse_calls(f"<think>a</think>{CALL_OPEN}x</think>")
    assert isinstance(bad, BadCall)
    assert "not valid JSON" in bad.error


@pytest.mark.parametrize(("opening", "closing"), THOUGHT_MARKS.items())
def test_every_family_of_marks_holds_a_thought(opening, closing):
    assert answer_part(f"{opening}6{closing} 5") == "5"
    assert answer_part(f"6{closing} 5") == "5"
    assert answer_part(f"{opening}6") == ""
    other = "[/THINK]" if opening != "[THINK]" else "</think>"
    assert answer_part(f"{opening}6{other}7{closing}5") == "5"


def test_parts_are_the_whole_reply():
    text = f" a <think>b</think> c {made('d')} e {CALL_OPEN}f{CALL_CLOSE}"
    parts = split_reply(text)
    assert [part.kind for part in parts] == ["text", "thought", "text", "call", "text", "call"]
    assert (
        "".join(f"<think>{p.text}</think>" if p.kind == "thought" else p.text for p in parts)
        == text
    )
    assert parts[3].value == {"name": "write", "arguments": {"text": "d"}}
    assert (parts[3].problem, parts[5].problem) == ("", "is not valid JSON: Expecting value")
    assert split_reply("") == ()


# Thoughts that a prompt opens


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ("<|im_start|>assistant\n<think>\n", "<think>\n"),
        ("Assistant: <think>", "<think>"),
        ("<assistant>[THINK]", "[THINK]"),
        ("<think>\n\n</think>\n\n", ""),
        ("say <think> first\n", ""),
        ("", ""),
    ],
)
def test_mark_at_the_end_of_a_prompt_opens_a_thought(prompt, opened):
    assert find_opened_thought(prompt) == opened


@pytest.mark.parametrize(
    ("shown", "written"),
    [
        ("5", "\n</think>\n\n5"),
        (made("</think>"), f"\n</think>\n\n{made('</think>')}"),
        ("It is.</think>5", "It is.</think>5"),
        ("<think>\nIt is.\n</think>5", "It is.\n</think>5"),
        ("\n<think>It is.</think>5", "It is.</think>5"),
    ],
)
def test_demonstration_continues_the_thought_that_the_prompt_opened(shown, written):
    assert continue_thought(shown, "<think>\n") == written
    assert continue_thought(shown, "") == shown
    assert answer_part(f"<think>\n{written}") == answer_part(shown)
