"""Bounded excerpts of foreign texts (replies, values, errors of a user's code) for messages and
logs.
"""

from __future__ import annotations

MAX_SHOWN_CHARS = 2000
"""Longest excerpt of a foreign text in a message."""


def shown(value: object) -> str:
    """Return a bounded repr of a foreign value for a message."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001  (a user's __repr__)
        text = f"a {type(value).__name__} that has no repr"
    return shortened(text)


def shortened(text: str, *, most: int = MAX_SHOWN_CHARS) -> str:
    """Return a text of at most `most` characters as it is, of a longer one the beginning and the
    end.
    """
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} ... ({len(text) - 2 * half} characters more) ... {text[-half:]}"
