"""Which options a config cannot take otherwise than they are, found by trying other values.

The config's own checks answer, so what is said here is what a run says, and cannot come to differ from it.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rl.config.tree import ConfigError, Entry, walk, with_value

Check = Callable[[Any], Sequence[str]]
"""What is wrong with a whole config: messages that begin with the option's path."""
_NO_EFFECT = "has no effect"
"""In the message of a check that refuses a value because it would change nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fixed:
    """An option that only has the value that it has, beside the others as they are."""

    path: str
    tried: Any
    """A value that was refused."""
    why: str
    """The reason of the check, without the option and the value."""


def fixed_options(config: Any, *, check: Check | None = None) -> Iterator[Fixed]:
    """Each leaf all of whose other values, as far as they are tried, are refused.

    Args:
        check: of fields that are in several components. Of a number or a text, of which not every value can
            be tried, its word counts only where it says that there is one value alone.
    """
    present = set(() if check is None else check(config))
    for entry in walk(config):
        if entry.kind != "leaf":
            continue
        tried = [value for value in _others(entry) if value != entry.value]
        refused = _refused_by_all(config, entry, tried)
        if refused:
            # Which value is refused says less than that none would change anything.
            value, reason = next((pair for pair in refused if _NO_EFFECT in pair[1]), refused[0])
            yield Fixed(path=entry.path, tried=value, why=_reason(entry, value, reason))
        elif check is not None and (found := _fixed_beside(config, entry, tried, check, present)):
            yield found


def _fixed_beside(
    config: Any, entry: Entry, tried: Sequence[Any], check: Check, present: set[str]
) -> Fixed | None:
    """By the check of the whole config, which already says what is `present`."""
    first: tuple[Any, str] | None = None
    for value in tried:
        try:
            messages = check(with_value(config, entry.path, value))
        except ConfigError:
            continue  # Refused by its own component, as other values may be that are not tried.
        # Of several faults that a value brings the first is the one that a run would name.
        fault = next((m for m in messages if m not in present and m.startswith(entry.path)), None)
        if fault is None or not (_is_exhaustive(entry.annotation) or _says_one_value(fault, entry.value)):
            return None
        first = first or (value, fault)
    return None if first is None else Fixed(path=entry.path, tried=first[0], why=_reason(entry, *first))


def _refused_by_all(config: Any, entry: Entry, tried: Sequence[Any]) -> list[tuple[Any, str]]:
    """Each value with what the components say that hold the option; empty where they take one of them."""
    found = []
    for value in tried:
        try:
            with_value(config, entry.path, value)
        except ConfigError as error:
            found.append((value, str(error)))
        else:
            return []
    return found


def _others(entry: Entry) -> list[Any]:
    """Values of the field's type, of many kinds; nothing for types that nothing is known of."""
    arms = typing.get_args(entry.annotation) if entry.optional else (entry.annotation,)
    found: list[Any] = [None] if entry.optional else []
    for arm in arms:
        found += _values(arm, entry.value)
    return found


def _values(annotation: Any, present: Any) -> list[Any]:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is bool:
        return [True, False]
    if origin is Literal:
        return list(args)
    if annotation is int:
        count = present if isinstance(present, int) else 0
        return [*dict.fromkeys((count + 1, max(2 * count, 2), max(count - 1, 0), 1, 2, 16, 64))]
    if annotation is float:
        start = float(present) if isinstance(present, int | float) else 0.0
        return [*dict.fromkeys((0.5, start / 2, start + 1.0, 2 * start, 0.0, 1.0))]
    if annotation is str:
        return ["x", "/x", "1", "2", "{question}"]
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        items = ["--x", *_values(str, None)] if args[0] is str else _values(args[0], None)
        return [(item,) for item in items]
    return []


def _is_exhaustive(annotation: Any) -> bool:
    """Whether all of the type's values were tried."""
    return annotation is bool or typing.get_origin(annotation) is Literal


def _says_one_value(message: str, value: Any) -> bool:
    if _NO_EFFECT in message:
        return True
    named = re.search(r"must be ([^\s,:;]+)", message)
    forms = {repr(value), str(value)} | ({f"{value:g}"} if isinstance(value, float) else set())
    return named is not None and named[1] in forms


def _reason(entry: Entry, value: Any, message: str) -> str:
    """Without the component's path and `name=value`, which stand beside it."""
    said = re.split(
        rf"\b{re.escape(entry.name)}=(?:{re.escape(repr(value))}|{re.escape(str(value))})", message
    )
    return said[-1].lstrip(" :,") if len(said) > 1 else message
