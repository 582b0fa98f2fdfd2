"""Numbers that reward functions and environments give, and how large a reward may be."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Set
from decimal import Decimal
from inspect import isawaitable
from itertools import islice
from numbers import Real
from typing import Any

MAX_REWARD = 1e15
"""Largest magnitude of a reward. Variances, gradients and squared gradient norms of such rewards
stay finite in float32, which 1e39 does not fit and in which the gradient norm of 1e20 overflows."""

_NUMBERS = (float, int, Real, Decimal)
_TEXTS = (str, bytes, bytearray)


def to_number(value: Any) -> float:
    """Return a number, or the only element of an array or tensor, as a float.

    The float may be infinite or NaN.

    Raises:
        TypeError: the value is no number.
        ValueError: it is a text, even one that `float` could read, or it has several elements.
        OverflowError: it is an integer beyond the floats.
    """
    if not isinstance(value, _NUMBERS):
        item = getattr(value, "item", None)
        if callable(item):  # arrays and tensors of any library
            value = item()
    if isinstance(value, _TEXTS):
        raise ValueError(f"a {type(value).__name__} is not a number")
    if not isinstance(value, _NUMBERS):
        raise TypeError(f"a {type(value).__name__} is not a number")
    return float(value)


def to_numbers(values: Any, *, most: int) -> list[float]:
    """Return the numbers of an ordered collection, at most `most` of them; raises as `to_number`.

    Mappings would be read by their keys, sets in any order, texts and bytes by their characters:
    all are refused.
    """
    # A data frame would give the names of its columns; a Series has `keys` too, and is a sequence.
    is_table = hasattr(values, "keys") and not hasattr(values, "tolist")
    if is_table or isinstance(values, Mapping | Set | str | bytes | bytearray | memoryview):
        raise TypeError(f"a {type(values).__name__} is not a sequence of numbers")
    # A generator may never end.
    return [to_number(value) for value in islice(iter(values), most)]


def to_truth(value: Any) -> bool:
    """Return the truth of True, False, 0, 1 or an object such as a match or None.

    A text, a tuple, a mapping, a function and a coroutine are always true, and a partial reward
    such as 0.5 would be, which nobody means.

    Raises:
        TypeError: the value is one of these.
        ValueError: it is an array of several elements.
    """
    item = getattr(value, "item", None)
    if not isinstance(value, _NUMBERS) and callable(item):
        value = item()
    is_partial = isinstance(value, _NUMBERS) and float(value) not in (0.0, 1.0)
    is_never_false = isinstance(value, (complex, tuple, Mapping, Iterator, AsyncIterator, *_TEXTS))
    if is_partial or is_never_false or callable(value) or isawaitable(value):
        raise TypeError(f"a {type(value).__name__} says neither")
    return bool(value)
