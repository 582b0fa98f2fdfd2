"""What of a reply is meant as its answer."""

from __future__ import annotations

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


def answer_part(text: str) -> str:
    """What follows the last `</think>`, without blanks around it; of a reply without thoughts, all of it.

    Thoughts that were never closed have no answer after them: the empty string.
    """
    _, closed, after = text.rpartition(THINK_CLOSE)
    if not closed and THINK_OPEN in after:
        return ""
    return after.strip()
