"""How deeply foreign values of JSON are nested: deep ones decode, but nothing can pickle them."""

from __future__ import annotations

from typing import Any

MAX_VALUE_DEPTH = 64
"""Deepest nesting of a foreign value that is kept. Pickle and JSON can write some hundreds of
levels, in each process another number, because it depends on the stack."""


def exceeds_depth(value: Any, *, most: int = MAX_VALUE_DEPTH) -> bool:
    """Return whether objects and lists are nested in each other more than `most` times.

    Example:
        >>> exceeds_depth([[1]], most=2), exceeds_depth([[[]]], most=2)
        (False, True)
    """
    # By levels instead of a recursion, which would fail where the value is too deep.
    level = [value]
    for _ in range(most + 1):
        level = [each for each in level if isinstance(each, dict | list | tuple)]
        if not level:
            return False
        inner: list[Any] = []
        for each in level:
            inner += each.values() if isinstance(each, dict) else each
        level = inner
    return True
