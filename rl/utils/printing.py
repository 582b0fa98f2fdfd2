"""Text for people: bounded excerpts of foreign texts, and lines on a terminal.

A terminal gets no control characters of foreign texts, and a closed pipe is no error.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import unicodedata
from collections.abc import Iterator
from typing import TextIO

MAX_SHOWN_CHARS = 2000
"""Longest excerpt of a foreign text in a message."""


def describe_value(value: object) -> str:
    """Return a bounded repr of a foreign value for a message.

    Example:
        >>> describe_value("a" * 3000)[:8], len(describe_value("a" * 3000))
        ("'aaaaaaa", 2032)
    """
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001  (a user's __repr__)
        text = f"a {type(value).__name__} that has no repr"
    return truncate(text)


def truncate(text: str, *, most: int = MAX_SHOWN_CHARS) -> str:
    """Return a text of at most `most` characters; of a longer text the beginning and the end."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} ... ({len(text) - 2 * half} characters more) ... {text[-half:]}"


_NO_READER = (errno.EPIPE, errno.EIO, errno.EBADF)
"""Errors of a pipe whose reader has ended, of a terminal that was closed, and of a closed
descriptor.
"""
_KEPT = "\n\t"
_INVISIBLE = ("Cc", "Cf", "Co", "Cs", "Zl", "Zp")
"""Categories of Unicode that a terminal obeys instead of showing: controls, formats such as
directions, surrogates, separators of lines."""


def replace_controls(text: str) -> str:
    r"""Return a text whose control characters are written out, as \x1b.

    Line breaks and tabs stay. Text from files, models and tasks can otherwise move the cursor,
    change the title or the clipboard, or reverse what follows.
    """
    # Nearly every text is, and the way by characters is slow.
    if text.isprintable():
        return text
    return "".join(_write_out(character) for character in text)


def _write_out(character: str) -> str:
    if character in _KEPT or unicodedata.category(character) not in _INVISIBLE:
        return character
    return character.encode("unicode_escape").decode("ascii")


def encode_visible(text: str, *, stream: TextIO) -> str:
    """Return a visible text in which characters that the stream lacks are written out."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return replace_controls(text).encode(encoding, "backslashreplace").decode(encoding)


def print_text(text: str, *, stream: TextIO | None = None) -> None:
    """Print lines to a stream, by default standard output, for as long as somebody reads them.

    A closed pipe (`| head`), terminal or stream is no error of the program, whose exit status tells
    the result. For programs whose result is what they print; a run, which goes on without a
    console, prints with `rl.observability.console.print_line`. Raises ValueError if the lines
    cannot be written for another reason, such as a full disk.
    """
    stream = sys.stdout if stream is None else stream
    # The process was started without a standard output.
    if stream is None:
        return
    with _ignore_closed_reader(stream):
        stream.write(f"{encode_visible(text, stream=stream)}\n")


def print_error(text: str) -> None:
    """Print lines to standard error; nothing that fails here is an error."""
    if sys.stderr is not None:
        with contextlib.suppress(ValueError):
            print_text(text, stream=sys.stderr)


@contextlib.contextmanager
def _ignore_closed_reader(stream: TextIO) -> Iterator[None]:
    """End the block without an error when a reader of the output, such as `head`, has seen enough.

    Raises ValueError if the output cannot be written for another reason, such as a full disk.
    """
    try:
        yield
        stream.flush()
    except OSError as error:
        _drop(stream)
        if error.errno not in _NO_READER:
            raise ValueError(f"the output cannot be written: {error.strerror or error}") from error


def _drop(stream: TextIO) -> None:
    """Let a stream write into nothing."""
    # The rest in its buffer would fail again when Python ends. A StringIO has no descriptor.
    with contextlib.suppress(OSError):
        descriptor = stream.fileno()
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, descriptor)
        os.close(sink)
