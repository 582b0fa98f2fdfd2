"""Values that several users read: read-only arrays and mappings, and private copies.

Reward functions and environments are code of many hands, and all of them see the same problem and
the same rollout. Whatever is part of a result (tokens, logprobs, metrics) cannot be changed;
whatever is input (a problem's data) is copied for each user, because popping from a list of
questions is a natural way to work through it.
"""

from __future__ import annotations

import copy
import copyreg
from dataclasses import fields
from datetime import date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

import numpy as np

KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")

_IMMUTABLE = frozenset(
    {str, bytes, int, float, complex, bool, type(None), frozenset, range, type}
    | {Decimal, Fraction, date, datetime, timedelta}
)
_WAITING = ("asyncio", "threading", "queue", "multiprocessing")
"""Modules whose objects coordinate their users, who therefore must have the same object."""
_OF_RESOURCES = ("close", "aclose", "__enter__", "__aenter__")
"""Methods of objects that stand for a resource."""


def freeze_arrays(instance: Any, *names: str) -> None:
    """Replace these arrays of a frozen dataclass by views that cannot be written to."""
    for name in names:
        value = getattr(instance, name)
        if isinstance(value, np.ndarray) and value.flags.writeable:
            view = value.view()
            view.setflags(write=False)
            object.__setattr__(instance, name, view)


def restore_fields(instance: Any, state: list[Any]) -> None:
    """Set the fields of a frozen dataclass to the state of a pickle."""
    for field, value in zip(fields(instance), state, strict=True):
        object.__setattr__(instance, field.name, value)


class ReadOnlyDict(dict[KeyT, ValueT]):
    """Dict that refuses changes; equal to a dict, and pickled and written as JSON like one."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("this mapping is read-only: change a copy, dict(...)")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return ReadOnlyDict, (dict(self),)


class Shareable:
    """Base of a frozen, slotted dataclass of which each user gets a private copy.

    Example:
        >>> mine = problem.make_private()
        >>> mine.data["questions"].pop()   # changes no other user's data

    A private copy has the same immutable fields. Other fields are copied when they are first read,
    so a user who reads none of them costs nothing.
    """

    __slots__ = ("_original",)

    def make_private(self) -> Self:
        """Return an equal object whose mutable data belongs to the caller alone."""
        mine = object.__new__(type(self))
        object.__setattr__(mine, "_original", self)
        # Other fields stay unset, so that `__getattr__` is asked for them.
        for name in self.__dataclass_fields__:  # type: ignore[attr-defined]
            value = getattr(self, name)
            if type(value) in _IMMUTABLE:
                object.__setattr__(mine, name, value)
        return mine

    if not TYPE_CHECKING:  # a type checker would accept every name

        def __getattr__(self, name: str) -> Any:
            """Copy the data of a field that a private copy does not have yet."""
            try:
                original = object.__getattribute__(self, "_original")
                if name.startswith("__"):
                    raise AttributeError(name)
            except AttributeError:
                message = f"{type(self).__name__!r} object has no attribute {name!r}"
                raise AttributeError(message) from None
            value = copy_data(getattr(original, name))
            object.__setattr__(self, name, value)
            return value


def copy_data(value: Any) -> Any:
    """Return a deep copy of plain data that shares what is immutable or belongs to no single user.

    Shared are texts, numbers and read-only arrays, objects that cannot be copied (a generator, a
    lambda), objects that stand for a resource (with a method `close`, `aclose`, `__enter__` or
    `__aenter__`: clients, files, locks) and those with which users wait for each other. An object
    that holds such an object is copied around it.
    """
    return _copy(value, {})


def _copy(value: Any, memo: dict[int, Any]) -> Any:
    kind = type(value)
    if kind in _IMMUTABLE or _is_shared(value):
        return value
    # The same list in two places stays one list.
    if id(value) in memo:
        return memo[id(value)]
    # A container is in `memo` before its items are copied, as it may hold itself.
    if kind is dict:
        new: Any = memo.setdefault(id(value), {})
        for key, item in value.items():
            new[key] = _copy(item, memo)
    elif kind is list:
        new = memo.setdefault(id(value), [])
        new.extend(_copy(item, memo) for item in value)
    elif kind is tuple:
        items = tuple(_copy(item, memo) for item in value)
        new = value if all(a is b for a, b in zip(items, value, strict=True)) else items
    elif kind is set:
        new = memo.setdefault(id(value), set(value))
    elif kind is MappingProxyType:
        content: dict[Any, Any] = {}
        new = memo[id(value)] = MappingProxyType(content)
        for key, item in value.items():
            content[key] = _copy(item, memo)
    else:
        new = _copy_object(value, memo)
    return new


def _copy_object(value: Any, memo: dict[int, Any]) -> Any:
    """Return a deep copy of an object of any other class, or the object itself if that fails."""
    num_before = len(memo)
    try:
        if hasattr(value, "__deepcopy__"):
            return copy.deepcopy(value, memo)
        return _rebuild(value, memo)
    except Exception:  # noqa: BLE001  (code of a user's class)
        # The latest entries are parts of a copy that nobody gets.
        while len(memo) > num_before:
            memo.popitem()
        return value


def _rebuild(value: Any, memo: dict[int, Any]) -> Any:
    """Return an object made of copies of what the object is pickled as.

    Raises an error of any kind if it cannot be pickled.
    """
    reduce = copyreg.dispatch_table.get(type(value))
    reduced = value.__reduce_ex__(4) if reduce is None else reduce(value)
    # A name of its module stands for the object itself.
    if isinstance(reduced, str):
        return value
    function, args, state, items, pairs = (*reduced, None, None, None)[:5]
    items, pairs = list(items or ()), list(pairs or ())
    # `memo` knows objects by id, so temporary objects have to live on.
    memo.setdefault(id(memo), []).append((reduced, items, pairs))
    new = memo[id(value)] = function(*[_copy(arg, memo) for arg in args])
    if state is not None:
        _set_state(new, _copy(state, memo))
    for item in items:
        new.append(_copy(item, memo))
    for key, item in pairs:
        new[key] = _copy(item, memo)
    return new


def _set_state(new: Any, state: Any) -> None:
    """Set the state of an object as pickle does."""
    if hasattr(new, "__setstate__"):
        new.__setstate__(state)
        return
    attributes, slots = state if isinstance(state, tuple) else (state, None)
    if attributes:
        vars(new).update(attributes)
    for name, item in (slots or {}).items():
        setattr(new, name, item)


def _is_shared(value: Any) -> bool:
    kind = type(value)
    if kind in (dict, list, tuple, set):
        return False
    if isinstance(value, np.ndarray):
        return not (value.flags.writeable or value.dtype.hasobject)
    if isinstance(value, (type, Enum, np.number, np.bool_)):
        return True
    # A copy of an open file or a client would share its descriptor, and close it.
    is_resource = any(hasattr(kind, name) for name in _OF_RESOURCES)
    return is_resource or kind.__module__.partition(".")[0] in _WAITING
