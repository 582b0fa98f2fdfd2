"""Calls that the official package is to lose, and warns of: code that has them still runs.

Each is a calling of its successor by another name, with the same parameters.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
SelfT = TypeVar("SelfT")


def warn_of(name: str, *, instead: str, stacklevel: int = 3) -> None:
    warnings.warn(
        f"{name} is deprecated, as in the official client: {instead}", FutureWarning, stacklevel=stacklevel
    )


def async_variant(
    method: Callable[Concatenate[SelfT, P], T],
) -> Callable[Concatenate[SelfT, P], Coroutine[Any, Any, T]]:
    """`method` as a coroutine function with `_async` behind its name; it returns what the method does."""

    @functools.wraps(method)
    async def variant(self: SelfT, *args: P.args, **kwargs: P.kwargs) -> T:
        warn_of(f"{method.__qualname__}_async()", instead=f"call {method.__name__}()")
        return method(self, *args, **kwargs)

    return _named(variant, method)


def awaited_variant(
    method: Callable[Concatenate[SelfT, P], Awaitable[T]],
) -> Callable[Concatenate[SelfT, P], Coroutine[Any, Any, T]]:
    """The same, but returning the result of the future that the method returns."""

    @functools.wraps(method)
    async def variant(self: SelfT, *args: P.args, **kwargs: P.kwargs) -> T:
        warn_of(f"{method.__qualname__}_async()", instead=f"await {method.__name__}()")
        return await method(self, *args, **kwargs)

    return _named(variant, method)


def _named(variant: Any, method: Callable[..., Any]) -> Any:
    variant.__name__ = f"{method.__name__}_async"
    variant.__qualname__ = f"{method.__qualname__}_async"
    variant.__doc__ = f"Deprecated: as `{method.__name__}`."
    return variant
