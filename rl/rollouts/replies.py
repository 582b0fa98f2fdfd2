"""Parts of a reply: thoughts, tool calls and other text.

Every reader of replies takes them from here.

    <think>47 is 4 and 7.</think>It is 11. <tool_call>{"name": "add", "arguments": {}}</tool_call>
    thought                      text      call
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rl.utils.nesting import MAX_VALUE_DEPTH, exceeds_depth

CallFormat = Literal["hermes", "llama"]
"""hermes: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Qwen3 writes calls; llama:
a reply that begins with such objects, with `parameters` or `arguments`, after `<|python_tag|>` or
without it, separated by `;` or white space."""
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
THOUGHT_MARKS = {
    "<think>": "</think>",
    "<thought>": "</thought>",
    "<|begin_of_thought|>": "<|end_of_thought|>",
    "<mm:think>": "</mm:think>",
    "<seed:think>": "</seed:think>",
    "[THINK]": "[/THINK]",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|channel>thought": "<channel|>",
    "◁think▷": "◁/think▷",
}
"""Closing mark of a thought by its opening one: of Qwen and DeepSeek, EXAONE, OpenThinker, MiniMax,
Seed, Magistral, Command, Gemma and Kimi."""
MAX_CALLS = 256
"""Most calls that are read from one reply: the time for each grows with the length of the reply."""

_MARKS = re.compile("|".join(map(re.escape, (CALL_OPEN, *THOUGHT_MARKS, *THOUGHT_MARKS.values()))))
_CLOSING = re.compile("|".join(map(re.escape, THOUGHT_MARKS.values())))
_OPENED = re.compile(f"(?:{'|'.join(map(re.escape, THOUGHT_MARKS))})\\s*\\Z")
_CALL_MARKS = re.compile(f"{CALL_OPEN}|{CALL_CLOSE}")
_WHITESPACE = re.compile(r"\s*")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyPart:
    """A part of a reply."""

    kind: Literal["thought", "call", "text"]
    text: str
    """The part as it was written; of a thought, what stands between its marks."""
    is_closed: bool = True
    """False for a thought that the reply does not close."""
    value: Any = None
    """The JSON of a call."""
    problem: str = ""
    """Reason why a call cannot be read, as the end of a sentence; empty if it can."""


def split_reply(text: str) -> tuple[ReplyPart, ...]:
    """Return the parts of a reply in order, without empty texts.

    A thought ends at the first closing mark that is not inside a tool call. A closing mark without
    an opening one closes a thought that began before the reply. Calls inside a thought belong to
    the thought.
    """
    # Most replies have no marks, and replies are read several times for each reward.
    if _MARKS.search(text) is None:
        return (ReplyPart(kind="text", text=text),) if text else ()
    scan = _Scan(text=text)
    while scan.take_next():
        pass
    return scan.finish()


def answer_part(text: str) -> str:
    """Return the reply after its last thought, stripped; empty if a thought is never closed."""
    return join_answer(split_reply(text))


def join_answer(parts: Sequence[ReplyPart]) -> str:
    """Return the text after the last thought, stripped; empty if a thought is never closed."""
    answer = ""
    for part in parts:
        # Nothing follows a thought that is open.
        answer = "" if part.kind == "thought" else answer + part.text
    return answer.strip()


def is_thought_open(text: str) -> bool:
    """Return True if the reply ends within a thought."""
    return any(not part.is_closed for part in split_reply(text))


def find_opened_thought(prompt: str) -> str:
    """Return the opening mark at the end of a prompt, with the white space after it.

    Empty if there is none.
    """
    opened = _OPENED.search(prompt)
    return "" if opened is None else opened.group()


def find_open_thought(text: str) -> str:
    """Return the end of a text from the mark of its open thought on.

    Empty if no thought is open.
    """
    parts = split_reply(text)
    if not parts or parts[-1].is_closed:
        return ""
    start = len(text) - len(parts[-1].text)
    for mark in THOUGHT_MARKS:
        if text.endswith(mark, 0, start):
            return text[start - len(mark) :]
    raise AssertionError("a thought is open only after its mark")


def continue_thought(reply: str, opened: str) -> str:
    """Return what a model writes after a prompt that ends in `opened`.

    Both together are the reply.

    `opened` begins with the mark of a thought. A reply without any thought first closes the one
    that the prompt opened.
    """
    if not opened:
        return reply
    mark = next(mark for mark in THOUGHT_MARKS if opened.startswith(mark))
    # Demonstrations were often written with the mark in them, which stands in the prompt already.
    repeated = reply.lstrip()
    if repeated.startswith(mark):
        return repeated.removeprefix(opened).removeprefix(mark)
    if split_reply(opened + reply)[0].is_closed:
        return reply
    return f"\n{THOUGHT_MARKS[mark]}\n\n{reply}"


@dataclass(kw_only=True, slots=True)
class _Scan:
    """State of `split_reply`, which reads from mark to mark."""

    text: str
    start: int = 0
    """Beginning of the part that is being read."""
    position: int = 0
    """Place from which the next mark is looked for."""
    closing: str = ""
    """Closing mark of the thought that is being read; empty outside of thoughts."""
    parts: list[ReplyPart] = field(default_factory=list)
    has_thoughts: bool = False
    num_read: int = 0
    """Calls read so far, those inside thoughts included."""

    def take_next(self) -> bool:
        """Read up to the next mark and take it; return False if there is none."""
        match = _MARKS.search(self.text, self.position)
        if match is None:
            return False
        mark, self.position = match.group(), match.end()
        if mark == CALL_OPEN:
            self._take_call(match.start())
        elif self.closing:
            if mark == self.closing:
                self._add("thought", match.start(), resume=match.end())
                self.closing = ""
        elif mark in THOUGHT_MARKS:
            self._add("text", match.start(), resume=match.end())
            self.closing = THOUGHT_MARKS[mark]
        elif not self.has_thoughts:
            # The thought began before the reply, or its opening mark was left out.
            self.parts, self.start = [], 0
            self._add("thought", match.start(), resume=match.end())
        return True

    def finish(self) -> tuple[ReplyPart, ...]:
        self._add("thought" if self.closing else "text", len(self.text), resume=len(self.text))
        return tuple(self.parts)

    def _take_call(self, start: int) -> None:
        """Read the call at `start`, or go past its mark if the text only mentions it."""
        # Beyond the limit a call stays a part of the text.
        if self.num_read == MAX_CALLS:
            return
        self.num_read += 1
        call, end = _read_call(
            self.text, start, in_thought=bool(self.closing), may_be_thought=not self.has_thoughts
        )
        self.position = max(self.position, end)
        if call is not None:
            self._add("text", start, resume=end)
            self.parts.append(call)

    def _add(self, kind: Literal["thought", "text"], end: int, *, resume: int) -> None:
        text = self.text[self.start : end]
        if text or kind == "thought":
            self.parts.append(
                ReplyPart(kind=kind, text=text, is_closed=kind == "text" or resume > end)
            )
        self.has_thoughts |= kind == "thought"
        self.start = resume


def _read_call(
    text: str, start: int, *, in_thought: bool, may_be_thought: bool
) -> tuple[ReplyPart | None, int]:
    """Read the call whose mark is at `start`; return it and its end.

    The JSON object itself says where it ends, because a string in it may contain any mark. Return
    None, and the place to read on from, inside a thought, and for a mark that is followed by the
    end of a thought that nothing opened.
    """
    white = _WHITESPACE.match(text, start + len(CALL_OPEN))
    assert white is not None  # the pattern matches everywhere
    body = white.end()
    value, end, problem = decode_json(text, body)
    following = _CALL_MARKS.search(text, end)
    stop = len(text) if following is None else following.start()
    is_ended = following is not None and following.group() == CALL_CLOSE
    # Up to its end, a damaged object may hold marks too; a thought ends sooner than a call that is
    # cut off.
    is_object = text.startswith("{", body) and (is_ended or (following is None and not in_thought))
    holds_marks = bool(problem) and is_object
    if in_thought:
        return None, stop if holds_marks else end
    if may_be_thought and not holds_marks and _CLOSING.search(text, end, stop) is not None:
        return None, end
    close = text.find(CALL_CLOSE, end)
    after = len(text) if close < 0 else close + len(CALL_CLOSE)
    if not problem and (close < 0 or text[end:close].strip()):
        problem = f"has no {CALL_CLOSE} after one JSON object"
    return ReplyPart(kind="call", text=text[start:after], value=value, problem=problem), after


def decode_json(text: str, start: int) -> tuple[Any, int, str]:
    """Return the JSON value at `start`, its end, and what is wrong with it.

    An invalid value ends where it begins.
    """
    value, end = None, start
    # Written once more: a lone half of a surrogate pair is valid JSON, but no text of any file.
    try:
        value, end = _DECODER.raw_decode(text, start)
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        return value, end, f"is not valid JSON: {getattr(error, 'msg', error)}"
    # It would become a part of a rollout, which has to reach other processes.
    if exceeds_depth(value):
        return value, end, f"is nested deeper than {MAX_VALUE_DEPTH} levels"
    return value, end, ""


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
