"""Arguments of a registry function that the command line gives: `--model NAME --max_tokens 300`."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable
from typing import Any

from rl.config.common_options import ALIASES
from rl.config.tree import ConfigError


def take_arguments(function: Callable[..., Any], options: dict[str, list[str]]) -> dict[str, Any]:
    """Remove the options that are arguments of a registry function, and return their values.

    The long name of an option is an argument too, as `--task.train_files` is `--data`. It stays
    among the options, since a function may make something else of its argument.
    """
    arguments: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        path = ALIASES.get(name)
        if name in options and path in options:
            raise ConfigError(f"--{name} is short for --{path}: give one of them")
        option = name if name in options else path
        if option is None or option not in options:
            continue
        if path is not None and options[option] == ["None"]:
            options.pop(name, None)  # as the function has it
            continue
        value = _read_argument(option, options[option], _read_type(function, parameter))
        if value is not None:
            arguments[name] = value
            options.pop(name, None)
    return arguments


def _read_argument(option: str, values: list[str], kind: Any) -> Any:
    """Return the value of an argument; None for a type that is no argument's."""
    if kind == tuple[str, ...]:
        return tuple(values)
    if kind not in (str, str | None, int, int | None):
        return None
    if len(values) != 1:
        raise ConfigError(f"--{option} takes one value, not {values!r}")
    return values[0] if kind in (str, str | None) else _to_int(option, values[0])


def _read_type(function: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    """Return the type of a parameter; None for one that only type checkers see."""
    stub = types.SimpleNamespace(__annotations__={parameter.name: parameter.annotation})
    try:
        # A decorated function's types are named in the module of the function itself.
        names = inspect.unwrap(function).__globals__
        return typing.get_type_hints(stub, names)[parameter.name]
    except NameError:
        return None


def _to_int(option: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ConfigError(f"--{option} {value}: must be int") from None
