"""Values of a row's columns, checked by their use; a ValueError names column and value.

Values come from JSON and CSV files as they are written (`rl.tasks.rows`), or with the types of a
Parquet file.
"""

from __future__ import annotations

import math
import re
import typing
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from rl.tasks.rows import WrittenNumber, to_plain
from rl.types import Message, Role
from rl.utils.printing import truncate

MAX_WHOLE = 2**53
"""Numbers below it are exact as a float."""
MAX_SHOWN_CHARS = 200
"""Longest excerpt of a value in an error's text."""


def to_text(value: Any, column: str) -> str:
    """Return a text, or a number as it is written."""
    # A bool is an int in Python, but the answer "True" of a Parquet file is no text.
    if (
        isinstance(value, int | float | Decimal)
        and not isinstance(value, bool)
        and math.isfinite(value)
    ):
        # A table with an empty cell has all its whole numbers as 7.0, which nobody wrote.
        is_whole = isinstance(value, float) and value.is_integer() and abs(value) < MAX_WHOLE
        return str(int(value)) if is_whole else str(value)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"column {column!r} is {_show(value)}, not text")
    return str(value)


def to_messages(value: Sequence[Any], column: str) -> tuple[Message, ...]:
    """Return the messages of a question, of which the last one is to be answered."""
    roles = typing.get_args(Role)
    messages = []
    for message in value:
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise ValueError(
                f"column {column!r} is {_show(value)}, not text or a list of messages with role "
                "and content"
            )
        if message["role"] not in roles:
            raise ValueError(
                f"column {column!r} has a message with role {_show(message['role'])}: must be one "
                f"of {', '.join(roles)}"
            )
        # Left out, the replies to them would answer nothing.
        if message.get("tool_calls"):
            raise ValueError(
                f"column {column!r} has a message with tool_calls, which a question cannot have: "
                "write them into its content, as the model's chat template does"
            )
        messages.append(Message(role=message["role"], content=_to_content(message, column)))
    if not messages or messages[-1].role not in ("user", "tool"):
        last = f"ends with a message of the {messages[-1].role}" if messages else "has no messages"
        raise ValueError(
            f"column {column!r} {last}: a question must end with the user's message, which the "
            "model answers"
        )
    return tuple(messages)


def _to_content(message: Mapping[str, Any], column: str) -> str:
    """Return the text of a message, whose content may be a list of parts."""
    content = message["content"]
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = []
    for part in parts:
        # Parquet files have every kind of part's fields, empty ones too.
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else None
            what = f"a part of type {kind!r}" if kind and kind != "text" else _show(text)
            raise ValueError(f"column {column!r} has a message with {what}: must be text")
        texts.append(str(text))
    return "".join(texts)


def to_system(value: Any, column: str) -> str:
    """Return a text; the empty one for an empty cell."""
    if _is_missing(value):
        return ""
    if not isinstance(value, str) or isinstance(value, WrittenNumber):
        raise ValueError(f"column {column!r}, the system message, is {_show(value)}, not text")
    return value


def to_context(value: Any, column: str) -> str:
    """Return a text, or a number as it is written; the empty text for an empty cell."""
    is_blank = isinstance(value, str) and not value.strip()
    return "" if is_blank or _is_missing(value) else to_text(value, column)


def to_id(value: Any, column: str) -> str:
    """Return a text, or a whole number as one."""
    if _is_missing(value) or value == "":
        raise ValueError(f"column {column!r}, the id, is empty")
    # Ids such as 00501 keep their zeros, and 72.0 is a mistake rather than the id 72.
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if isinstance(value, WrittenNumber):
        is_whole = re.fullmatch("-?[0-9]+", value) is not None
    if not (is_whole or (isinstance(value, str) and not isinstance(value, WrittenNumber))):
        raise ValueError(
            f"column {column!r}, the id, is {_show(value)}, not a text or a whole number"
        )
    return str(value)


def to_demonstration(value: Any, column: str) -> str | tuple[str, ...]:
    """Return a reply, or one for each turn; the empty text for an empty cell."""
    # Data sets with demonstrations for some rows have empty cells for the others.
    if _is_missing(value) or value == "" or value == []:
        return ""
    if not isinstance(value, list):
        return to_text(value, column)
    if not all(isinstance(reply, str) and not isinstance(reply, WrittenNumber) for reply in value):
        raise ValueError(f"column {column!r} is {_show(value)}, not a text or a list of texts")
    return tuple(value)


def to_rate(value: Any) -> Any:
    """Return a number, also one that a CSV file has as a text; None for an empty cell."""
    # What is no rate is returned as it is: the filter names it in its error.
    value = to_plain(value)
    if not isinstance(value, str):
        return None if _is_missing(value) else value
    try:
        return float(value) if value else None
    except ValueError:
        return value


def _is_missing(value: Any) -> bool:
    """Return True for null, and for the NaN that pandas has in its place."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def _show(value: Any) -> str:
    return truncate(repr(to_plain(value)), most=MAX_SHOWN_CHARS)
