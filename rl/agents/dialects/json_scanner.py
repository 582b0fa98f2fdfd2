"""The end of a JSON value in text that is still being written.

`json` needs the whole value and starts over at each attempt. A call of a tool may be as long as a
file, and arrives token by token: here each character is looked at once.
"""

from __future__ import annotations

import re
from typing import Literal

ScanState = Literal["open", "done", "broken"]
"""open: more text may complete the value; done: the value has ended; broken: no text can complete
the value."""

_WHITE = re.compile(r"[ \t\n\r]*")
_INSIDE_STRING = re.compile(r'(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u[0-9A-Fa-f]{4})*')
_HALF_ESCAPE = re.compile(r"\\(?:u[0-9A-Fa-f]{0,3})?\Z")
_SCALAR_CHARS = re.compile(r"[-+.0-9A-Za-z]*")
_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_CLOSING = {"{": "}", "[": "]"}


class JsonScanner:
    """Position within one JSON value, which moves on as text arrives.

    Agrees with `json.JSONDecoder(strict=True)`, except that NaN and the infinities are no values.

    Example:
        scanner = JsonScanner(start=1)
        scanner.scan('x{"a": [1')  # open
        scanner.scan('x{"a": [1]} y')  # done; scanner.position is 11
    """

    def __init__(self, *, start: int) -> None:
        self.position = start
        """First character that is not read; behind the value once it has ended."""
        self.state: ScanState = "open"
        self._awaited: list[str] = []
        """Closing brackets of the open objects and lists, the outermost first."""
        self._expected: Literal["value", "first", "name", "colon", "next"] = "value"
        """Next part: a value; a value or name, or at once the end of its list or object; the name
        of a member; a colon; a comma or the end."""
        self._string: Literal["", "value", "name"] = ""
        """Use of the string that is open."""

    def scan(self, text: str, *, is_last: bool = False) -> ScanState:
        """Read on in a text that begins with what was read before.

        `is_last` says that nothing follows, which ends a number or a word.
        """
        while self.state == "open" and self.position < len(text):
            before = self.position
            if self._string:
                self._read_string(text)
            else:
                self._read_next(text, is_last=is_last)
            # The rest is the beginning of an escape, a number or a word.
            if self.position == before:
                break
        return self.state

    def _read_next(self, text: str, *, is_last: bool) -> None:
        white = _WHITE.match(text, self.position)
        assert white is not None  # the pattern matches everywhere
        self.position = white.end()
        if self.position == len(text):
            return
        character = text[self.position]
        is_member = bool(self._awaited) and self._awaited[-1] == "}"
        if self._expected == "colon":
            self._take(character == ":", then="value")
        elif self._expected == "next":
            if character == ",":
                self._take(True, then="name" if is_member else "value")
            else:
                self._close(character)
        # Only a list or an object that has just begun may end here: no comma stands before an end.
        elif self._expected == "first" and character == self._awaited[-1]:
            self._close(character)
        elif self._expected == "name" or (self._expected == "first" and is_member):
            self._take(character == '"', then="colon")
            self._string = "name"
        else:
            self._read_value(text, character, is_last=is_last)

    def _take(self, is_right: bool, *, then: Literal["value", "name", "colon", "next"]) -> None:
        if is_right:
            self.position += 1
            self._expected = then
        else:
            self.state = "broken"

    def _close(self, character: str) -> None:
        if not self._awaited or character != self._awaited.pop():
            self.state = "broken"
            return
        self.position += 1
        self._end_value()

    def _end_value(self) -> None:
        self._expected = "next"
        if not self._awaited:
            self.state = "done"

    def _read_value(self, text: str, character: str, *, is_last: bool) -> None:
        if character in _CLOSING:
            self._awaited.append(_CLOSING[character])
            self._expected = "first"
            self.position += 1
            return
        if character == '"':
            self._string = "value"
            self.position += 1
            return
        run = _SCALAR_CHARS.match(text, self.position)
        assert run is not None  # the pattern matches everywhere
        # A number goes on for as long as its characters do.
        if run.end() == len(text) and run.group() and not is_last:
            return
        if _SCALAR.fullmatch(run.group()):
            self.position = run.end()
            self._end_value()
        else:
            self.state = "broken"

    def _read_string(self, text: str) -> None:
        inside = _INSIDE_STRING.match(text, self.position)
        assert inside is not None  # the pattern matches everywhere
        self.position = inside.end()
        if self.position == len(text) or _HALF_ESCAPE.match(text, self.position):
            return
        if text[self.position] != '"':
            self.state = "broken"
            return
        self.position += 1
        use, self._string = self._string, ""
        if use == "value":
            self._end_value()
