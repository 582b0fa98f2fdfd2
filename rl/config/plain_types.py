"""Whether a value is of the type that a field is annotated with, as far as that can be seen."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Literal


def is_of_type(value: Any, annotation: Any) -> bool:
    """A list passes for a tuple and an integer for a float; what no class can answer passes too, such as a
    protocol."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return any(is_of_type(value, arm) for arm in args)
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in args)
    if annotation is None or annotation is Any:
        return value is None or annotation is Any
    if annotation in (int, float):
        return isinstance(value, Integral if annotation is int else Real) and not isinstance(value, bool)
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return isinstance(value, list | tuple) and _are_of_types(value, args, is_tuple=origin is tuple)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return isinstance(value, Mapping) and all(
            is_of_type(key, args[0]) and is_of_type(item, args[1]) for key, item in value.items()
        )
    if not isinstance(annotation, type) or origin is not None or getattr(annotation, "_is_protocol", False):
        return True
    return isinstance(value, annotation)


def _are_of_types(items: Sequence[Any], args: tuple[Any, ...], *, is_tuple: bool) -> bool:
    if not is_tuple or args[-1:] == (Ellipsis,):
        args = args[:1] * len(items)
    return len(args) == len(items) and all(map(is_of_type, items, args))
