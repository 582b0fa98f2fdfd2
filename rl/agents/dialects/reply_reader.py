"""Content, thoughts and calls of tools in a reply, while it is being written or at once.

A whole reply is a reply that is fed in one piece, so that both forms cannot differ:

    reader = ReplyReader(call_format="hermes", reply_id="r1", has_tools=True)
    reader.feed('Let me see. <tool_call>{"name": "add", "argu')  # a TextDelta, "Let me see."
    reader.feed('ments": {"a": 1}}</tool_call>')  # a ReplyCall, complete
    reader.finish()

The parts are those of `rl.rollouts.replies.split_reply`, with two differences. A client cannot be
told to forget what it has read: the end of a thought that nothing opened is content, and says
nothing about the text before it. A call whose JSON other programs could not read (`1e999`) is
content too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from rl.agents.dialects.json_scanner import JsonScanner
from rl.agents.types import ReplyCall
from rl.rollouts.replies import (
    CALL_CLOSE,
    CALL_OPEN,
    MAX_CALLS,
    THOUGHT_MARKS,
    CallFormat,
    decode_json,
)
from rl.types import Message, ToolCall

PYTHON_TAG = "<|python_tag|>"
ARGUMENTS = {"hermes": ("arguments",), "llama": ("arguments", "parameters")}
"""Names of a call's arguments."""

_WHITE = re.compile(r"\s*")
_BETWEEN_CALLS = re.compile(r"[\s;]*")
_CALL_MARKS = re.compile(f"{CALL_OPEN}|{CALL_CLOSE}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TextDelta:
    """More text of the content or of a thought."""

    kind: Literal["content", "reasoning"]
    text: str


ReplyEvent = TextDelta | ReplyCall


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedReply:
    """The parts of a reply, in the order in which the model wrote them."""

    parts: tuple[ReplyEvent, ...]
    """No two texts of one kind follow each other."""

    @property
    def content(self) -> str:
        return self._join("content")

    @property
    def reasoning(self) -> str:
        return self._join("reasoning")

    @property
    def calls(self) -> tuple[ReplyCall, ...]:
        return tuple(part for part in self.parts if isinstance(part, ReplyCall))

    @property
    def message(self) -> Message:
        """The message that a client sends back as history."""
        calls = tuple(reply_call.call for reply_call in self.calls)
        return Message(role="assistant", content=self.content, calls=calls)

    def _join(self, kind: str) -> str:
        texts = []
        for part in self.parts:
            if isinstance(part, TextDelta) and part.kind == kind:
                texts.append(part.text)
        return "".join(texts)


def read_reply(
    text: str, *, call_format: CallFormat, reply_id: str, has_tools: bool
) -> ParsedReply:
    """Return the parts of a whole reply."""
    reader = ReplyReader(call_format=call_format, reply_id=reply_id, has_tools=has_tools)
    return ParsedReply(parts=join_events([*reader.feed(text), *reader.finish()]))


def join_events(events: Iterable[ReplyEvent]) -> tuple[ReplyEvent, ...]:
    """Return the events with consecutive texts of one kind joined."""
    joined: list[ReplyEvent] = []
    texts: list[str] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, TextDelta) and isinstance(last, TextDelta) and last.kind == event.kind:
            # Joined once at the end of a run: a reply may come in a hundred thousand pieces.
            texts.append(event.text)
            continue
        _join_last(joined, texts)
        joined.append(event)
    _join_last(joined, texts)
    return tuple(joined)


def _join_last(joined: list[ReplyEvent], texts: list[str]) -> None:
    if texts:
        last = joined[-1]
        assert isinstance(last, TextDelta)
        joined[-1] = TextDelta(kind=last.kind, text="".join([last.text, *texts]))
        texts.clear()


class ReplyReader:
    """Incremental parser of a reply, for all formats of calls.

    White space next to the marks of thoughts and calls belongs to the marks, except between two
    texts. A call is told once it is complete. A damaged call, or one that is cut off, is content as
    it was written; text after calls is content as well. Without tools nothing is a call.
    """

    def __init__(self, *, call_format: CallFormat, reply_id: str, has_tools: bool) -> None:
        scans: dict[CallFormat, type[_Scan]] = {"hermes": _HermesScan, "llama": _LlamaScan}
        if call_format not in scans:
            raise ValueError(f"call_format={call_format!r} must be one of {', '.join(scans)}")
        self._scan = scans[call_format](reply_id=reply_id, has_tools=has_tools)

    def feed(self, text: str) -> list[ReplyEvent]:
        """Return the parts that are certain once `text` is added."""
        return self._scan.advance(text, is_last=False)

    def finish(self) -> list[ReplyEvent]:
        """Return the rest; the reply has ended."""
        return self._scan.advance("", is_last=True)


class _Trimmer:
    """Text of one kind without the white space at its ends that touches a mark."""

    def __init__(self) -> None:
        self.white = ""
        """White space that is held back until it is known what follows."""
        self.touches_mark = False
        self.is_empty = True

    def add(self, text: str) -> str:
        """Return the text that is certain."""
        start = len(text) - len(text.lstrip())
        if start == len(text):
            self.white += text
            return ""
        end = len(text.rstrip())
        # White space between two texts stays, also if calls stood there.
        before = "" if self.is_empty and self.touches_mark else self.white + text[:start]
        self.white, self.touches_mark, self.is_empty = text[end:], False, False
        return before + text[start:end]

    def finish(self) -> str:
        white, self.white = self.white, ""
        return "" if self.touches_mark else white


@dataclass(kw_only=True, slots=True)
class _OpenCall:
    """A call whose end is not decided."""

    body: int
    """Beginning of its JSON, or of the white space before the JSON."""
    scanner: JsonScanner | None = None
    end: int = -1
    """End of the JSON, or `body` if it is invalid; -1: not known."""
    call: ToolCall | None = None
    has_problem: bool = True
    searched: int = 0
    """Place up to which the text behind the JSON has been looked at."""


class _Scan:
    """Text that is not told yet, and the place that the scan has reached in it."""

    def __init__(self, *, reply_id: str, has_tools: bool) -> None:
        self.reply_id = reply_id
        self.has_tools = has_tools
        self.text = ""
        self.told = 0
        """Beginning of the text that no event has told."""
        self.position = 0
        self.is_last = False
        self.closing = ""
        """Mark that ends the open thought; empty outside of a thought."""
        self.open_call: _OpenCall | None = None
        self.num_calls = 0
        self.events: list[ReplyEvent] = []
        self.trimmers: dict[str, _Trimmer] = {"content": _Trimmer(), "reasoning": _Trimmer()}

    def advance(self, piece: str, *, is_last: bool) -> list[ReplyEvent]:
        # The local name is the only reference while the text grows, so that Python extends it in
        # place.
        text, self.text = self.text, ""
        text += piece
        self.text, self.is_last = text, is_last
        while self.take_next():
            pass
        # What no rule has taken is told as it stands.
        if is_last:
            self.tell(len(self.text))
            for kind, trimmer in self.trimmers.items():
                self._emit(kind, trimmer.finish())
        # While a call is open, places in the text stay as they are.
        if self.open_call is None:
            self.text = self.text[self.told :]
            self.position -= self.told
            self.told = 0
        events, self.events = self.events, []
        return list(join_events(events))

    def take_next(self) -> bool:
        """Read one part; return False if that needs more text."""
        raise NotImplementedError

    def tell(self, end: int) -> None:
        """Tell the text up to `end` as a thought or as content."""
        kind = "reasoning" if self.closing else "content"
        text = self.text[self.told : end]
        self.told = end
        if text:
            self._emit(kind, self.trimmers[kind].add(text))

    def _emit(self, kind: str, text: str) -> None:
        if text:
            is_thought = kind == "reasoning"
            self.events.append(TextDelta(kind="reasoning" if is_thought else "content", text=text))

    def touch_mark(self) -> None:
        for trimmer in self.trimmers.values():
            trimmer.touches_mark = True

    def tell_call(self, call: ToolCall, *, end: int) -> None:
        """Tell a call instead of the text up to `end`."""
        call_id = f"call_{self.reply_id}_{self.num_calls}"
        self.num_calls += 1
        self.events.append(ReplyCall(id=call_id, call=call))
        self.touch_mark()
        self.told = self.position = end

    def find_mark(self, marks: _Marks) -> re.Match[str] | None:
        """Return the next mark, or tell the text up to where one could begin."""
        found = marks.pattern.search(self.text, self.position)
        if found is None:
            self.position = max(self.position, self.end_without_mark(marks))
            self.tell(self.position)
        return found

    def end_without_mark(self, marks: _Marks) -> int:
        """Return the place behind which a mark could begin whose rest is missing."""
        end = len(self.text)
        if self.is_last:
            return end
        for size in range(min(marks.longest, end - self.position), 0, -1):
            if self.text[end - size :] in marks.beginnings:
                return end - size
        return end

    def take_thought(self, found: re.Match[str]) -> None:
        """Begin or end a thought at a mark."""
        self.tell(found.start())
        self.told = self.position = found.end()
        self.touch_mark()
        self.closing = "" if self.closing else THOUGHT_MARKS[found.group()]

    def decode_call(self, open_call: _OpenCall, names: Sequence[str]) -> None:
        """Decode the JSON of a call at whose end the scanner has arrived, or cannot arrive."""
        scanner, body = open_call.scanner, open_call.body
        assert scanner is not None
        # Text that is no JSON ends where it begins, as in `decode_json`.
        open_call.end = body
        if scanner.state != "done":
            return
        value, open_call.end, problem = decode_json(self.text, body)
        open_call.has_problem = bool(problem)
        if not problem and isinstance(value, dict):
            name = value.get("name")
            given = [value[key] for key in names if key in value]
            is_call = isinstance(name, str) and name and given and isinstance(given[0], dict)
            if is_call and _is_portable(given[0]):
                open_call.call = ToolCall(name=value["name"], arguments=given[0])


def _is_portable(arguments: dict[str, object]) -> bool:
    """Return False for numbers that are too large to be told, which Python calls infinite."""
    try:
        json.dumps(arguments, allow_nan=False)
    except ValueError:
        return False
    return True


class _Marks:
    """Marks to look for, and all beginnings of them at which a piece of text may end."""

    def __init__(self, *marks: str) -> None:
        self.pattern = re.compile("|".join(map(re.escape, marks)))
        self.longest = max(map(len, marks)) - 1
        beginnings = set()
        for mark in marks:
            beginnings |= {mark[:size] for size in range(1, len(mark))}
        self.beginnings = frozenset(beginnings)


_OUTSIDE = {
    "hermes": _Marks(CALL_OPEN, *THOUGHT_MARKS),
    "llama": _Marks(PYTHON_TAG, *THOUGHT_MARKS),
    "": _Marks(*THOUGHT_MARKS),
}
_CLOSE = _Marks(CALL_CLOSE)
_IN_THOUGHT = {closing: _Marks(CALL_OPEN, closing) for closing in THOUGHT_MARKS.values()}
_END_OF_THOUGHT = {closing: _Marks(closing) for closing in THOUGHT_MARKS.values()}


class _HermesScan(_Scan):
    """Scan for `<tool_call>{...}</tool_call>`."""

    def __init__(self, *, reply_id: str, has_tools: bool) -> None:
        super().__init__(reply_id=reply_id, has_tools=has_tools)
        self.num_read = 0
        self.is_damaged = False
        """True within a damaged call, whose marks say nothing up to `</tool_call>`."""

    def take_next(self) -> bool:
        if self.open_call is not None:
            return self._take_call(self.open_call)
        if self.is_damaged:
            found = self.find_mark(_CLOSE)
            if found is not None:
                self.is_damaged = False
                self.position = found.end()
            return found is not None

        found = self.find_mark(_IN_THOUGHT[self.closing] if self.closing else _OUTSIDE["hermes"])
        if found is None:
            return False
        if found.group() != CALL_OPEN:
            self.take_thought(found)
        elif self.num_read == MAX_CALLS:
            self.position = found.end()  # Beyond the limit a call stays a part of the text.
        else:
            self.num_read += 1
            if not self.closing:
                self.tell(found.start())
            self.open_call = _OpenCall(body=found.end())
        return True

    def _take_call(self, open_call: _OpenCall) -> bool:
        if open_call.scanner is None:
            open_call.body = self._skip_white(open_call.body)
            if open_call.body == len(self.text) and not self.is_last:
                return False
            open_call.scanner = JsonScanner(start=open_call.body)
        # Decoded once, also if the mark behind the JSON takes its time.
        if open_call.end < 0:
            state = open_call.scanner.scan(self.text, is_last=self.is_last)
            if state == "open" and not self.is_last:
                return False
            self.decode_call(open_call, ARGUMENTS["hermes"])
        if self.closing:
            return self._pass_call(open_call)

        # White space may go on, and is looked at once.
        open_call.searched = white = self._skip_white(max(open_call.end, open_call.searched))
        rest = self.text[white : white + len(CALL_CLOSE)]
        is_cut = rest != CALL_CLOSE and CALL_CLOSE.startswith(rest) and not self.is_last
        if is_cut and not open_call.has_problem:
            return False
        self.open_call = None
        if rest == CALL_CLOSE and open_call.call is not None and self.has_tools:
            self.tell_call(open_call.call, end=white + len(CALL_CLOSE))
        else:
            # Its text is told as content while the search for its end goes on.
            self.is_damaged = True
            self.position = open_call.end
        return True

    def _skip_white(self, place: int) -> int:
        white = _WHITE.match(self.text, place)
        assert white is not None  # the pattern matches everywhere
        return white.end()

    def _pass_call(self, open_call: _OpenCall) -> bool:
        """Go past a call in a thought, so that no string in it ends the thought."""
        end = open_call.end
        if open_call.has_problem and self.text.startswith("{", open_call.body):
            following = _CALL_MARKS.search(self.text, max(end, open_call.searched))
            if following is None and not self.is_last:
                open_call.searched = len(self.text) - len(CALL_CLOSE)
                return False
            # A damaged object may hold marks too, up to its end.
            if following is not None and following.group() == CALL_CLOSE:
                end = following.start()
        self.open_call = None
        self.position = end
        return True


class _LlamaScan(_Scan):
    """Scan for objects at the beginning of the reply or after `<|python_tag|>`."""

    def __init__(self, *, reply_id: str, has_tools: bool) -> None:
        super().__init__(reply_id=reply_id, has_tools=has_tools)
        self.may_call = has_tools
        """True where an object is a call: nothing but thoughts and calls stands before it."""

    def take_next(self) -> bool:
        if self.open_call is not None:
            return self._take_object(self.open_call)
        if self.closing:
            return self._take_mark(_END_OF_THOUGHT[self.closing])
        marks = _OUTSIDE["llama" if self.has_tools else ""]
        if not self.may_call:
            return self._take_mark(marks)

        white = (_BETWEEN_CALLS if self.num_calls else _WHITE).match(self.text, self.position)
        assert white is not None  # the pattern matches everywhere
        # White space is looked at once, and told once it is known what follows.
        self.position = start = white.end()
        if start == len(self.text):
            # A separator behind the last call is no content.
            if self.is_last and self.num_calls and _BETWEEN_CALLS.fullmatch(self.text, self.told):
                self.told = start
            return False
        # In this place, an object is a call or the end of all calls.
        if self.text[start] == "{" and self.num_calls < MAX_CALLS:
            self.open_call = _OpenCall(body=start, scanner=JsonScanner(start=start))
        elif marks.pattern.match(self.text, start):
            return self._take_mark(marks)
        elif self.text[start:] in marks.beginnings and not self.is_last:
            return False
        else:
            self.may_call = False
        return True

    def _take_mark(self, marks: _Marks) -> bool:
        found = self.find_mark(marks)
        if found is None:
            return False
        if found.group() == PYTHON_TAG:
            # The tag is told only if no call follows it.
            self.tell(found.start())
            self.position = found.end()
            self.may_call = True
        else:
            self.take_thought(found)
        return True

    def _take_object(self, open_call: _OpenCall) -> bool:
        scanner = open_call.scanner
        assert scanner is not None
        if scanner.scan(self.text, is_last=self.is_last) == "open" and not self.is_last:
            return False
        self.decode_call(open_call, ARGUMENTS["llama"])
        self.open_call = None
        if open_call.call is not None:
            self.tell_call(open_call.call, end=scanner.position)
        else:
            # No object after this one is a call. The marks in what was read of it are text.
            self.may_call = False
            self.position = scanner.position
        return True
